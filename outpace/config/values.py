"""Types of config fields: dtypes, devices, paths, sizes. torch is imported only when it is needed."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

if TYPE_CHECKING:
    import torch

DTYPE_NAMES: Mapping[str, str] = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "bfloat": "bfloat16",
    "int8": "int8",
}
"""Name of a dtype -> its name in torch."""


def dtype_name(value: object) -> str:
    """torch's name of a dtype, given under any of its names or as a torch.dtype."""
    name = str(value).removeprefix("torch.").lower()
    if (isinstance(value, str) or type(value).__module__ == "torch") and name in DTYPE_NAMES:
        return DTYPE_NAMES[name]
    raise ValueError(f"{value!r} is not a dtype Outpace runs in; use one of {', '.join(DTYPE_NAMES)}")


def parse_dtype(value: object) -> "torch.dtype":
    """A torch.dtype from itself or any of its names ("fp16", "half", "torch.float16", ...)."""
    name = dtype_name(value)  # before torch is imported, so that a wrong name fails at once

    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def same_dtype(left: object, right: object) -> bool:
    """Whether two values mean the same dtype."""
    try:
        return dtype_name(left) == dtype_name(right)
    except ValueError:
        return left == right


if TYPE_CHECKING:
    DType = torch.dtype
else:
    DType = Annotated[Any, BeforeValidator(parse_dtype), PlainSerializer(str, return_type=str)]
DTypeName = Annotated[str, BeforeValidator(dtype_name)]


def device_name(value: object) -> object:
    """The name of a torch.device; other values are returned as they are, and validated later."""
    return str(value) if type(value).__module__ == "torch" else value


def same_device(left: object, right: object) -> bool:
    """Whether two values mean the same device."""
    return device_name(left) == device_name(right)


Device = Annotated[str, BeforeValidator(device_name)]


def check_device(name: str) -> None:
    """Raise ValueError unless this machine has the device."""
    if name == "cpu":
        return

    import torch

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
        raise ValueError(f"{name!r} does not exist: this machine has {count} CUDA devices; use 'cpu' or remove device")


def _path(value: object) -> object:
    """A path as text. Bytes are refused, which pydantic would take."""
    found = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(found, str):
        raise ValueError(f"expected a path, got {value!r}")
    return found


def _named_path(value: object) -> object:
    found = _path(value)
    if not found:
        raise ValueError("the path is empty; name a folder, or remove it")
    return found


def _path_or_dict(value: object) -> object:
    if not isinstance(value, str | os.PathLike | dict):
        raise ValueError(f"expected a path or a dict, got {value!r}")
    return value if isinstance(value, dict) else _named_path(value)


def _calibration(value: object) -> object:
    if isinstance(value, list | tuple):
        if not all(type(token) is int and token >= 0 for token in value):
            raise ValueError(f"expected token ids, integers from 0 on, got {value!r:.80}")
        return tuple(value)
    return _named_path(value)


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?)?B?", re.IGNORECASE)
_FACTORS: Mapping[str, int] = {
    **{letter: 1000**power for power, letter in enumerate(" kmgt")},
    **{f"{letter}i": 1024**power for power, letter in enumerate(" kmgt") if power},
}


def _size(value: object) -> object:
    """A number of bytes, given as a number or as text with a unit."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {value!r}")
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"{value!r} is not a size; write it as 4GB, 3.5GiB or 500MB")
    return int(float(found[1]) * _FACTORS[(found[2] or " ").lower()])


def _budget(value: object) -> object:
    """A number of bytes or a fraction, from 0.5, "50%", "20GB" or 20_000_000_000."""
    if isinstance(value, str):
        text = value.strip()
        try:
            value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            return _size(value)
        value = int(value) if value > 1 and not text.endswith("%") else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"expected bytes, a size such as 20GB, or a fraction such as 0.8, got {value!r}")
    if isinstance(value, float) and value > 1 and not value.is_integer():
        raise ValueError(f"{value!r} is neither a fraction nor whole bytes; write it as 20GB, or as 0.8")
    return value if isinstance(value, int) or value <= 1 else int(value)


def _loads(value: object) -> object:
    """Tokens of each expert of each layer, from lists, a tensor, or a JSON file (also a saved reply of
    /status/experts)."""
    if isinstance(value, str | os.PathLike):
        path = Path(value)
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {str(path)!r} as JSON: {error}") from None
    if isinstance(value, Mapping):
        value = value.get("tokens")
    if "tolist" in dir(value):  # a tensor or an array
        value = value.tolist()  # type: ignore[attr-defined]
    rows = value if isinstance(value, list | tuple) else ()
    numbers = [number for row in rows for number in (row if isinstance(row, list | tuple) else (None,))]
    if not numbers or any(isinstance(each, bool) or not isinstance(each, int | float) or each < 0 for each in numbers):
        raise ValueError("expected the tokens of each expert for each layer, as LLM.expert_load().tolist() gives them")
    return tuple(tuple(float(number) for number in row) for row in rows)


PathText = Annotated[str, BeforeValidator(_path)]
"""A path, given as text or pathlib.Path."""
NamedPath = Annotated[str, BeforeValidator(_named_path)]
"""A path that is not empty."""
PathOrDict = Annotated[str | dict[str, Any], BeforeValidator(_path_or_dict)]
"""A path that is not empty, or a dict."""
CalibrationText = Annotated[str | tuple[int, ...], BeforeValidator(_calibration)]
"""The path of a text file, or token ids."""
ExpertLoads = Annotated[tuple[tuple[float, ...], ...], BeforeValidator(_loads)]
"""Tokens of each expert, of each layer that has experts."""
Size = Annotated[int, BeforeValidator(_size), Field(ge=1)]
"""A number of bytes, or text such as 4GB."""
Budget = Annotated[Any, BeforeValidator(_budget)]
"""An amount of memory: a float up to 1 is a fraction, other numbers are bytes; or text such as 20GB or 80%."""
