"""The options of `outpace quantize`, checked, and the scheme that they give to a weight."""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from outpace.config import InferenceConfig
from outpace.config.quantization import CalibrationConfig
from outpace.errors import ConfigError, NotSupported, as_field
from outpace.loading.calibrate import Method
from outpace.loading.dtypes import short
from outpace.quant.asked import NAMED
from outpace.quant.compressed import format_of
from outpace.quant.plan import QuantPlan
from outpace.quant.rules import Rules
from outpace.quant.scheme import Scheme

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of `outpace quantize`; invalid combinations are refused on creation."""

    scheme: str | None
    group_size: int | None = None
    """Columns that share a scale; None: 128 for int4, or fewer if 128 do not divide a weight's columns."""
    asymmetric: bool = False
    head: Literal["int8"] | None = None
    """None: the head is not quantized."""
    exclude: tuple[str, ...] = ()
    """Parts of names of linears that are not quantized."""
    dtype: torch.dtype | None = None
    """dtype of unquantized tensors and of scales; None: the model's."""
    plan: QuantPlan | None = None
    """The scheme of each weight, instead of all other options except `dtype`."""
    method: Method = "rtn"
    smooth: float | None = None
    """SmoothQuant's alpha; None: no smoothing."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """The calibration text of gptq and smooth."""
    device: str | None = None
    """The device for calibration; None: the first GPU, if there is one."""

    def __post_init__(self) -> None:
        if self.method not in ("rtn", "gptq"):
            raise ConfigError(f"method: expected rtn or gptq, got {self.method!r}")
        if self.smooth is not None and not 0 <= self.smooth <= 1:
            raise ConfigError(f"smooth: expected a number from 0 to 1, got {self.smooth}")
        if not self.calibrates and self.calibration != CalibrationConfig():
            raise ConfigError("text: rounding to nearest needs no text; give method gptq or smooth, or remove it")
        if self.dtype is not None and self.dtype not in FLOATS:
            raise ConfigError(f"dtype: expected float32, float16 or bfloat16, got {short(self.dtype)}")
        if self.plan is not None:
            self._check_plan(self.plan)
            return
        if self.scheme not in NAMED:
            raise ConfigError(f"scheme: expected one of {', '.join(NAMED)}, got {self.scheme!r}")
        if self.group_size is not None and (self.group_size < 16 or self.group_size % 8):
            raise ConfigError(f"group_size: expected a multiple of 8, at least 16, got {self.group_size}")
        if self.group_size is not None and NAMED[self.scheme].activations is not None:
            raise ConfigError(
                f"group_size: {self.scheme} has one scale for each row of a weight; remove it, or use int8 or int4"
            )
        if self.asymmetric and self.scheme != "int4":
            raise ConfigError(f"asymmetric: {self.scheme} has no zero points; remove it, or use int4")
        if self.head not in (None, "int8"):
            raise ConfigError(f"head: expected int8, got {self.head!r}")
        if self.head is not None and self.scheme == "fp8":
            raise ConfigError("head: a folder of fp8 weights cannot hold an int8 head; remove it")

    def _check_plan(self, plan: QuantPlan) -> None:
        others: dict[str, object] = {"scheme": self.scheme, "group_size": self.group_size}
        others |= {"asymmetric": self.asymmetric, "head": self.head, "exclude": self.exclude}
        others |= {"method": self.method != "rtn", "smooth": self.smooth is not None}
        for name, value in others.items():
            if value:
                raise ConfigError(f"{name}: the plan says what each weight becomes; remove it")
        found = [(weight, weight.scheme.scheme) for weight in plan.weights if weight.scheme is not None]
        if not found:
            raise ConfigError("plan: it quantizes no weight; use the model itself, or allow more loss")
        if len(formats := sorted({format_of(scheme) for _, scheme in found})) > 1:
            raise ConfigError(
                f"plan: a folder has one format, but its schemes need {' and '.join(formats)}; make a plan with fewer "
                "quant.auto.schemes, or give it as quant.plan when the model is loaded"
            )
        if stack := next((weight.names[0] for weight, _ in found if len(weight.shape) > 2), None):
            raise NotSupported(
                f"plan: {stack} is a stack of experts, which the format that is written (compressed-tensors) does "
                "not support; give the plan as quant.plan when the model is loaded"
            )

    @property
    def has_head(self) -> bool:
        """Whether the head may be quantized."""
        return self.head is not None or self.plan is not None

    @property
    def calibrates(self) -> bool:
        """Whether the model runs on a text."""
        return self.method != "rtn" or self.smooth is not None

    @property
    def torch_device(self) -> torch.device:
        """The device for calibration; an error if it does not exist."""
        return InferenceConfig.of({} if self.device is None else {"device": self.device}).torch_device

    @property
    def rules(self) -> Rules:
        if self.plan is not None:
            return self.plan.rules
        assert self.scheme is not None, "without a plan there is a scheme"
        base = NAMED[self.scheme]
        scheme = replace(base, group=self.group_size or base.group, symmetric=not self.asymmetric)
        return Rules(scheme, fit=self.group_size is None)

    def of(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, head: bool) -> Scheme | None:
        """The scheme of a linear's weight; None: not quantized. dtype: of scales."""
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in _ROUTERS or (head and not self.has_head):
            return None
        with as_field("group_size", known_as="quant.weight.group_size"):
            found = self.rules.of("head" if head else "other", [name], shape)
        return None if found is None else replace(found, scales=dtype)
