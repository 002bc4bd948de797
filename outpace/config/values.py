"""Values that configs share: a dtype by any of its names, a device that exists."""

from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import BeforeValidator, PlainSerializer

DTYPE_NAMES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "bfloat": torch.bfloat16,
    "int8": torch.int8,
}


def parse_dtype(value: object) -> torch.dtype:
    """A torch.dtype from itself or any of its names ("fp16", "half", "torch.float16", ...)."""
    name = str(value).removeprefix("torch.").lower()
    if isinstance(value, torch.dtype | str) and name in DTYPE_NAMES:
        return DTYPE_NAMES[name]
    raise ValueError(f"{value!r} is not a dtype Outpace runs in; use one of {', '.join(DTYPE_NAMES)}")


def same_dtype(left: object, right: object) -> bool:
    """Whether two ways of writing a dtype mean the same one."""
    try:
        return parse_dtype(left) == parse_dtype(right)
    except ValueError:
        return left == right


DType = Annotated[torch.dtype, BeforeValidator(parse_dtype), PlainSerializer(str, return_type=str)]


def device_name(value: object) -> object:
    """A device by its name; what is no torch.device is left for others to judge."""
    return str(value) if isinstance(value, torch.device) else value


def same_device(left: object, right: object) -> bool:
    """Whether two ways of writing a device mean the same one."""
    return device_name(left) == device_name(right)


Device = Annotated[str, BeforeValidator(device_name)]


def check_device(name: str) -> None:
    """Raise ValueError unless this machine has the device."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name!r} is not a device; use 'cpu', 'cuda' or 'cuda:N'") from None
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise ValueError(f"{name!r}: Outpace runs on 'cpu' and 'cuda', not on {device.type!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ValueError(
            f"{name!r} does not exist: this machine has {count} CUDA devices; use 'cpu' or leave device out"
        )
