"""A checkpoint of any kind written with quantized weights, in the layout of compressed-tensors (`outpace quantize`)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.config import InferenceConfig
from outpace.config.sections import CalibrationConfig
from outpace.errors import ConfigError, InputError, ModelError, NotSupported, as_field
from outpace.inject.quantize_others import in_fp32
from outpace.inject.split import known_splits
from outpace.loading.calibrate import Calibration, Give, Method, calibrate
from outpace.loading.calibration import read_windows
from outpace.loading.checkpoint import weight_files
from outpace.loading.conversion import quantization
from outpace.loading.dtypes import short
from outpace.loading.inspect import kept_in_fp32
from outpace.loading.measure_plan import write_plan
from outpace.loading.names import match, tensors_of, unwrapped
from outpace.loading.open import open_weights
from outpace.loading.original import CONFIG, find_model, opened, set_entries, skeleton_of
from outpace.loading.out_folder import check_out
from outpace.loading.read_tokenizer import load_tokenizer
from outpace.loading.unchanged import Unchanged
from outpace.loading.weights import Source
from outpace.loading.write_calibrated import Run, write_calibrated
from outpace.loading.write_quantized import QUANTIZED, Item, WrittenQuantized, write_quantized
from outpace.loading.write_shards import Progress
from outpace.quant.asked import NAMED
from outpace.quant.compressed import format_of, quantization_config
from outpace.quant.plan import QuantPlan
from outpace.quant.rules import TOGETHER, Rules
from outpace.quant.scheme import Scheme

PLAN = "outpace-plan.json"
"""The plan that a folder was made by, in it."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True)
class Asked:
    """What weights shall become. Options that do not go together are refused when it is made."""

    scheme: str | None
    group_size: int | None = None
    """Columns that share a scale; None: of int4 128, or less where a weight needs it."""
    asymmetric: bool = False
    head: Literal["int8"] | None = None
    """None: the head stays as it is."""
    exclude: tuple[str, ...] = ()
    """Parts of names of linears that stay as they are."""
    dtype: torch.dtype | None = None
    """Of everything that stays, and of scales; None: the model's."""
    plan: QuantPlan | None = None
    """What becomes of each weight, in the place of all others but `dtype`."""
    method: Method = "rtn"
    smooth: float | None = None
    """SmoothQuant's alpha; None: activations keep their outliers."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """The text that gptq and smooth run the model on."""
    device: str | None = None
    """Where they run it; None: on the first GPU, if there is one."""

    def __post_init__(self) -> None:
        if self.method not in ("rtn", "gptq"):
            raise ConfigError(f"method: expected rtn or gptq, got {self.method!r}")
        if self.smooth is not None and not 0 <= self.smooth <= 1:
            raise ConfigError(f"smooth: expected a number from 0 to 1, got {self.smooth}")
        if not self.calibrates and self.calibration != CalibrationConfig():
            raise ConfigError("text: rounding to nearest needs no text; give method gptq or smooth, or leave it out")
        if self.dtype is not None and self.dtype not in _FLOATS:
            raise ConfigError(f"dtype: expected float32, float16 or bfloat16, got {short(self.dtype)}")
        if self.plan is not None:
            self._check_plan(self.plan)
            return
        if self.scheme not in NAMED:
            raise ConfigError(f"scheme: expected one of {', '.join(NAMED)}, got {self.scheme!r}")
        if self.group_size is not None and (self.group_size < 16 or self.group_size % 8):
            raise ConfigError(f"group_size: expected a multiple of 8 from 16 on, got {self.group_size}")
        if self.group_size is not None and NAMED[self.scheme].activations is not None:
            raise ConfigError(
                f"group_size: {self.scheme} has one scale for each row of a weight; leave it out, or use int8 or int4"
            )
        if self.asymmetric and self.scheme != "int4":
            raise ConfigError(f"asymmetric: {self.scheme} has no zero points; leave it out, or use int4")
        if self.head not in (None, "int8"):
            raise ConfigError(f"head: expected int8, got {self.head!r}")
        if self.head is not None and self.scheme == "fp8":
            raise ConfigError("head: a folder of fp8 weights has no place for an int8 head; leave it out")

    def _check_plan(self, plan: QuantPlan) -> None:
        others: dict[str, object] = {"scheme": self.scheme, "group_size": self.group_size}
        others |= {"asymmetric": self.asymmetric, "head": self.head, "exclude": self.exclude}
        others |= {"method": self.method != "rtn", "smooth": self.smooth is not None}
        for name, value in others.items():
            if value:
                raise ConfigError(f"{name}: the plan says what becomes of each weight; leave it out")
        found = [(weight, weight.scheme.scheme) for weight in plan.weights if weight.scheme is not None]
        if not found:
            raise ConfigError("plan: all weights stay as they are in it; use the model itself, or allow more loss")
        if len(formats := sorted({format_of(scheme) for _, scheme in found})) > 1:
            raise ConfigError(
                f"plan: a folder has one format, and its schemes need {' and '.join(formats)}; make a plan with fewer "
                "quant.auto.schemes, or give it as quant.plan when the model is loaded"
            )
        if stack := next((weight.names[0] for weight, _ in found if len(weight.shape) > 2), None):
            raise NotSupported(
                f"plan: {stack} is a stack of experts, for which the layout that is written (compressed-tensors) has "
                "no form; give the plan as quant.plan when the model is loaded"
            )

    @property
    def has_head(self) -> bool:
        """Whether the head may be quantized."""
        return self.head is not None or self.plan is not None

    @property
    def calibrates(self) -> bool:
        """Whether the model is run on a text."""
        return self.method != "rtn" or self.smooth is not None

    @property
    def torch_device(self) -> torch.device:
        """Where the model is run on a text; one that is not here is an error."""
        return InferenceConfig.of({} if self.device is None else {"device": self.device}).torch_device

    @property
    def rules(self) -> Rules:
        """Which linear gets which scheme."""
        if self.plan is not None:
            return self.plan.rules
        assert self.scheme is not None, "there is one or the other"
        base = NAMED[self.scheme]
        scheme = replace(base, group=self.group_size or base.group, symmetric=not self.asymmetric)
        return Rules(scheme, fit=self.group_size is None)

    def of(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, head: bool) -> Scheme | None:
        """The scheme of a linear's weight. dtype: of scales."""
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in _ROUTERS or (head and not self.has_head):
            return None
        with as_field("group_size", known_as="quant.weight.group_size"):
            found = self.rules.of("head" if head else "other", [name], shape)
        return None if found is None else replace(found, scales=dtype)


def quantize_model(
    model: str | Path | None,
    out: Path,
    asked: Asked,
    *,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> WrittenQuantized:
    """Write a checkpoint with quantized weights; everything is checked before the first byte."""
    check_out(out, QUANTIZED, force=force)
    path = find_model(model)
    if path.is_relative_to(out.expanduser().resolve()):
        raise InputError(f"out: {out} holds the model itself; give another folder")
    config, beside = opened(path)
    unchanged = Unchanged.of(weight_files(path))
    skeleton = skeleton_of(config)
    if (settings := quantization(skeleton)) is not None:
        method = settings.get("quant_method", "by an unknown method")
        raise ModelError(f"model: {path} is quantized already ({method}); give the model that it was made from")
    shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
    weights = open_weights(path, shapes=shapes, splits=partial(known_splits, skeleton))
    stored = unwrapped(weights.sources, tensors_of(skeleton))
    found = match(skeleton, weights)
    if asked.plan is not None and asked.plan.model != type(skeleton).__name__:
        raise ConfigError(
            f"plan: it was made for a {asked.plan.model}, and this is a {type(skeleton).__name__}; make a plan for "
            "this model with --auto"
        )
    plan = _Plan(skeleton, stored, found, asked)
    run = (
        plan.calibrated(found, asked.torch_device, read_windows(asked.calibration, load_tokenizer(model), config))
        if asked.calibrates
        else None
    )

    def write_beside(folder: Path) -> None:
        beside(folder)
        set_entries(folder / CONFIG, quantization_config=quantization_config(plan.schemes, plan.ignore))
        if asked.dtype is not None:
            set_entries(folder / CONFIG, dtype=short(asked.dtype))
        if plan.unties:
            set_entries(folder / CONFIG, tie_word_embeddings=False)
        if asked.plan is not None:
            write_plan(asked.plan, folder / PLAN)

    write = write_quantized if run is None else partial(write_calibrated, run=run)
    return write(plan.items, out, beside=write_beside, unchanged=unchanged, force=force, progress=progress)


class _Plan:
    """What becomes of each tensor, under the name that the checkpoint gives it."""

    def __init__(
        self, model: PreTrainedModel, stored: Mapping[str, Source], found: Mapping[str, Source], asked: Asked
    ) -> None:
        self._model, self._asked, self._wanted = model, asked, tensors_of(model)
        self._names: dict[int, list[str]] = {}
        """Names that the model has for a stored tensor, by the id of its source."""
        for name, source in found.items():
            self._names.setdefault(id(source), []).append(name)
        self._head = _path_of(model, model.get_output_embeddings())
        self._scales = asked.dtype or _dtype_of(model, stored)
        self._keep = kept_in_fp32(model, asked.dtype) if asked.dtype is not None else set()
        schemes = {name: self._scheme(name, source) for name, source in stored.items()}
        self.items = [self._item(name, source, schemes[name]) for name, source in stored.items()]
        self.unties = self._untied(stored, found)
        self.schemes = {_module(item.name): item.scheme for item in self.items if item.scheme is not None}
        self._check(stored)
        kept = [item for item in self.items if item.scheme is None and self._is_product(item.name, item.source)]
        head = {self._head} if self._head is not None and self._head not in self.schemes else set()
        self.ignore = {_module(item.name) for item in kept} | head
        """Linears that stay as they are."""

    def calibrated(self, found: Mapping[str, Source], device: torch.device, tokens: Tensor) -> Run:
        """What quantizes linears while the model runs on these tokens."""
        named = {name: item for item in self.items for name in self._names_of(item.name, item.source)}
        linears = {_module(name): item for name, item in named.items() if item.scheme and _module(name) != self._head}
        reached = {item.name for item in linears.values()} | {f"{self._head}.weight"}
        if missed := [item.name for item in self.items if item.scheme is not None and item.name not in reached]:
            raise NotSupported(
                f"method: {missed[0]} belongs to an expert, and weights of experts cannot be calibrated yet; give "
                "--exclude experts, or leave --method and --smooth out"
            )
        schemes = {path: item.scheme for path, item in linears.items() if item.scheme is not None}
        asked = Calibration(tokens, self._asked.method, self._asked.smooth)

        def run(give: Give) -> dict[str, Tensor]:
            made = calibrate(
                self._model, found, schemes, asked, device, lambda path, *weights: give(linears[path].name, *weights)
            )
            return {named[name].name: tensor for name, tensor in made.items()}

        return run

    def _item(self, name: str, source: Source, scheme: Scheme | None) -> Item:
        wanted = torch.float32 if self._keep.intersection(self._names_of(name, source)) else self._asked.dtype
        return Item(name, source, wanted if wanted and source.dtype.is_floating_point else source.dtype, scheme)

    def _untied(self, stored: Mapping[str, Source], found: Mapping[str, Source]) -> bool:
        """Give a head that is tied to the embedding a weight of its own, if it is quantized."""
        name = f"{self._head}.weight"
        if not self._asked.has_head or (name not in found and self._asked.plan is not None):
            return False
        if name not in found:
            raise ModelError("head: this model has none; leave it out")
        scheme = self._asked.of(name, found[name].shape, self._scales, head=True)
        if name not in stored and scheme is not None:
            source = found[name]
            self.items.append(Item(name, source, source.dtype, scheme))
        return scheme is not None

    def _names_of(self, name: str, source: Source) -> Sequence[str]:
        """What the model calls a stored tensor; nothing, if it is merged with others."""
        return self._names.get(id(source)) or ([name] if name in self._wanted else [])

    def _scheme(self, name: str, source: Source) -> Scheme | None:
        if not self._is_able(name, source) or any(part in name for part in self._asked.exclude):
            return None
        if self._is_stack(name, source):
            raise NotSupported(
                f"scheme: {name} holds all experts of a layer in one tensor, for which the layout that is written "
                "(compressed-tensors) has no form; give --exclude experts to leave them as they are"
            )
        head = self._head is not None and f"{self._head}.weight" in self._names_of(name, source)
        known = name if self._asked.plan is None else next(iter(self._names_of(name, source)), name)
        return self._asked.of(known, source.shape, self._scales, head=head)

    def _is_able(self, name: str, source: Source) -> bool:
        """Whether it would be quantized if nothing were excluded, and the layout had a form for it."""
        kinds = (self._is_linear, self._is_expert, self._is_stack)
        return source.dtype.is_floating_point and any(is_one(name, source) for is_one in kinds)

    def _is_linear(self, name: str, source: Source) -> bool:
        modules = [self._model.get_submodule(_module(each)) for each in self._names_of(name, source)]
        return (
            name.endswith(".weight")
            and len(source.shape) == 2
            and bool(modules)
            and all(isinstance(module, nn.Linear) for module in modules)
            and not any(in_fp32(self._model, _module(each)) for each in self._names_of(name, source))
        )

    def _is_expert(self, name: str, source: Source) -> bool:
        """A linear of one expert, which the model has in a stack of all."""
        parts = name.split(".")
        numbered = any(first == "experts" and second.isdecimal() for first, second in pairwise(parts))
        return numbered and parts[-1] == "weight" and len(source.shape) == 2 and not self._names_of(name, source)

    def _is_stack(self, name: str, source: Source) -> bool:
        return len(source.shape) == 3 and "experts" in name.split(".")

    def _is_product(self, name: str, source: Source) -> bool:
        """Whether it is what others may take for a linear."""
        modules = [self._model.get_submodule(_module(each)) for each in self._names_of(name, source)]
        return (
            name.endswith(".weight")
            and len(source.shape) == 2
            and not any(isinstance(module, nn.Embedding) for module in modules)
        )

    def _check(self, stored: Mapping[str, Source]) -> None:
        """Options that do nothing, and folders that nobody could read."""
        if self._asked.plan is not None:
            self._check_plan(self._asked.plan)
        able = [name for name, source in stored.items() if self._is_able(name, source)]
        for part in self._asked.exclude:
            if not any(part in name for name in able):
                raise ConfigError(f"exclude: {part!r} is in no name of a linear's weight, as {', '.join(able[:2])}")
        if not self.schemes:
            raise ModelError(
                f"model: {type(self._model).__name__} has no linear that could be quantized (weights of Conv1D lie the "
                "other way round, for which the layout has no form), or all are excluded; quantize it at load time"
            )
        for together in TOGETHER:
            self._check_together(together)

    def _check_plan(self, plan: QuantPlan) -> None:
        """Every weight that it wants quantized is."""
        for weight in plan.weights:
            for name in weight.names if weight.scheme is not None else ():
                if _module(name) not in self.schemes:
                    raise ConfigError(
                        f"plan: {name} is no linear that is stored in this model; make a plan for it with --auto, or "
                        "give the plan as quant.plan when the model is loaded"
                    )

    def _check_together(self, together: Sequence[str]) -> None:
        layers: dict[str, set[Scheme | None]] = {}
        for item in self.items:
            owner, _, last = _module(item.name).rpartition(".")
            if last in together and item.name.endswith(".weight"):
                layers.setdefault(owner, set()).add(item.scheme)
        for owner, schemes in layers.items():
            if len(schemes) > 1:
                raise ConfigError(
                    f"exclude: {', '.join(together)} of {owner} are one layer for those who read the folder; exclude "
                    "all of them or none"
                )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _path_of(model: nn.Module, module: nn.Module | None) -> str | None:
    return next((path for path, other in model.named_modules() if other is module), None)


def _dtype_of(model: PreTrainedModel, stored: Mapping[str, Source]) -> torch.dtype:
    """The dtype that the model runs in for those who read its config."""
    said = getattr(model.config, "dtype", None)
    if said in _FLOATS:
        return said
    counts = Counter(source.dtype for source in stored.values() if source.dtype in _FLOATS)
    return counts.most_common(1)[0][0] if counts else torch.float32
