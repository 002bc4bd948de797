"""AskedConfig: the options of an engine that another process will make, checked without torch and without a GPU."""

import re

from pydantic import field_validator

from outpace.config.llm import LLMConfig
from outpace.config.values import DTypeName

_DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")


class AskedConfig(LLMConfig):
    """LLMConfig for a process that does not import torch: only what depends on the machine is left to the engine."""

    dtype: DTypeName | None = None  # type: ignore[assignment]
    """torch's name of the dtype."""

    @field_validator("device")
    @classmethod
    def _device_exists(cls, value: str | None) -> str | None:
        if value is not None and not _DEVICE.fullmatch(value):
            raise ValueError(f"{value!r} is not a device Outpace runs on; use 'cpu', 'cuda' or 'cuda:N'")
        return value

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda" as it was asked for; empty: the engine will find out."""
        return (self.device or "").partition(":")[0]
