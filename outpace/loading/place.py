"""A model's last two steps before it runs: its dtype and its device."""

from typing import Any

import torch
from torch import nn

from outpace.loading.inspect import buffer_dtypes, kept_in_fp32


def to_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert in place what Hugging Face would have loaded in `dtype`: one tensor at a time, ties kept.

    What its author keeps in float32 stays so. Buffers that are not in the checkpoint get the dtype that its class makes
    them in: rotary frequencies are float32 whatever the weights' dtype, and rounding them changes every position.
    """
    keep, made = kept_in_fp32(model, dtype), buffer_dtypes(model, dtype)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if name in keep else dtype)
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{path}.{name}" if path else name
            if not buffer.is_floating_point():
                continue
            stored = name not in module._non_persistent_buffers_set
            wanted = dtype if stored else made.get(full, buffer.dtype)
            buffer.data = buffer.data.to(torch.float32 if full in keep else wanted)
    _tell_config(model, dtype)


def _tell_config(model: nn.Module, dtype: torch.dtype) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "dtype"):
        config.dtype = dtype
