"""Writes a checkpoint of any kind with quantized weights as compressed-tensors (`outpace quantize`)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.errors import ConfigError, ModelError, NotSupported
from outpace.inject.quantize_others import in_fp32
from outpace.loading.calibrate import Calibration, Give, calibrate
from outpace.loading.calibration import read_windows
from outpace.loading.conversion import quantization
from outpace.loading.dtypes import short
from outpace.loading.inspect import kept_in_fp32
from outpace.loading.measure_plan import write_plan
from outpace.loading.names import match, tensors_of, unwrapped
from outpace.loading.original import CONFIG, Original, set_entries
from outpace.loading.out_folder import check_out
from outpace.loading.quantize_options import FLOATS, Asked
from outpace.loading.read_tokenizer import load_tokenizer
from outpace.loading.weights import Source
from outpace.loading.write_calibrated import Run
from outpace.loading.write_items import Item
from outpace.loading.write_quantized import QUANTIZED, WrittenQuantized, write_quantized
from outpace.loading.write_shards import Progress
from outpace.quant.compressed import quantization_config
from outpace.quant.plan import QuantPlan
from outpace.quant.rules import TOGETHER
from outpace.quant.scheme import Scheme

PLAN = "outpace-plan.json"
"""Name of the plan's file in the folder."""


def quantize_model(
    model: str | Path | None,
    out: Path,
    asked: Asked,
    *,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> WrittenQuantized:
    """Write a checkpoint with quantized weights; everything is checked before anything is written."""
    check_out(out, QUANTIZED, force=force)
    original = Original.of(model, out)
    skeleton, weights = original.skeleton, original.weights
    if (settings := quantization(skeleton)) is not None:
        method = settings.get("quant_method", "by an unknown method")
        raise ModelError(f"model: {original.path} is quantized already ({method}); give the original model")
    stored = unwrapped(weights.sources, tensors_of(skeleton))
    found = match(skeleton, weights)
    if asked.plan is not None and asked.plan.model != type(skeleton).__name__:
        raise ConfigError(
            f"plan: it was made for a {asked.plan.model}, but this is a {type(skeleton).__name__}; make a plan for "
            "this model with --auto"
        )
    plan = _Plan(skeleton, stored, found, asked)
    run = None
    if asked.calibrates:
        device = asked.torch_device
        tokens = read_windows(asked.calibration, load_tokenizer(model), original.config)
        run = plan.calibrated(found, device, tokens)

    def write_beside(folder: Path) -> None:
        original.beside(folder)
        set_entries(folder / CONFIG, quantization_config=quantization_config(plan.schemes, plan.ignore))
        if asked.dtype is not None:
            set_entries(folder / CONFIG, dtype=short(asked.dtype))
        if plan.unties:
            set_entries(folder / CONFIG, tie_word_embeddings=False)
        if asked.plan is not None:
            write_plan(asked.plan, folder / PLAN)

    return write_quantized(
        plan.items,
        out,
        beside=write_beside,
        unchanged=original.unchanged,
        run=run,
        force=force,
        progress=progress,
    )


class _Plan:
    """Decides what each tensor of the checkpoint becomes, under its stored name."""

    def __init__(
        self, model: PreTrainedModel, stored: Mapping[str, Source], found: Mapping[str, Source], asked: Asked
    ) -> None:
        self._model, self._asked, self._wanted = model, asked, tensors_of(model)
        self._names: dict[int, list[str]] = {}
        """id of a stored tensor's source -> its names in the model."""
        for name, source in found.items():
            self._names.setdefault(id(source), []).append(name)
        output = model.get_output_embeddings()
        self._head = next((path for path, module in model.named_modules() if module is output), None)
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
        """Linears that are not quantized."""

    def calibrated(self, found: Mapping[str, Source], device: torch.device, tokens: Tensor) -> Run:
        """A function that quantizes linears while the model runs on these tokens."""
        named = {name: item for item in self.items for name in self._names_of(item.name, item.source)}
        linears = {_module(name): item for name, item in named.items() if item.scheme and _module(name) != self._head}
        reached = {item.name for item in linears.values()} | {f"{self._head}.weight"}
        if missed := [item.name for item in self.items if item.scheme is not None and item.name not in reached]:
            raise NotSupported(
                f"method: {missed[0]} belongs to an expert, and weights of experts cannot be calibrated yet; give "
                "--exclude experts, or remove --method and --smooth"
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
        """Untie a head from the embedding if it is quantized; returns whether it is."""
        name = f"{self._head}.weight"
        if not self._asked.has_head or (name not in found and self._asked.plan is not None):
            return False
        if name not in found:
            raise ModelError("head: this model has no head; remove it")
        scheme = self._asked.of(name, found[name].shape, self._scales, head=True)
        if name not in stored and scheme is not None:
            source = found[name]
            self.items.append(Item(name, source, source.dtype, scheme))
        return scheme is not None

    def _names_of(self, name: str, source: Source) -> Sequence[str]:
        """The model's names of a stored tensor; empty if it is merged with others."""
        return self._names.get(id(source)) or ([name] if name in self._wanted else [])

    def _scheme(self, name: str, source: Source) -> Scheme | None:
        if not self._is_able(name, source) or any(part in name for part in self._asked.exclude):
            return None
        if self._is_stack(name, source):
            raise NotSupported(
                f"scheme: {name} holds all experts of a layer in one tensor, which the format that is written "
                "(compressed-tensors) does not support; give --exclude experts to keep them unquantized"
            )
        head = self._head is not None and f"{self._head}.weight" in self._names_of(name, source)
        known = name if self._asked.plan is None else next(iter(self._names_of(name, source)), name)
        return self._asked.of(known, source.shape, self._scales, head=head)

    def _is_able(self, name: str, source: Source) -> bool:
        """Whether it would be quantized without exclusions, in a format that supports it."""
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
        """Whether it is a linear of one expert, which the model merges into a stack."""
        parts = name.split(".")
        numbered = any(first == "experts" and second.isdecimal() for first, second in pairwise(parts))
        return numbered and parts[-1] == "weight" and len(source.shape) == 2 and not self._names_of(name, source)

    def _is_stack(self, name: str, source: Source) -> bool:
        return len(source.shape) == 3 and "experts" in name.split(".")

    def _is_product(self, name: str, source: Source) -> bool:
        """Whether programs that read the folder may treat it as a linear."""
        modules = [self._model.get_submodule(_module(each)) for each in self._names_of(name, source)]
        return (
            name.endswith(".weight")
            and len(source.shape) == 2
            and not any(isinstance(module, nn.Embedding) for module in modules)
        )

    def _check(self, stored: Mapping[str, Source]) -> None:
        """Refuse options without effect, and folders that could not be loaded."""
        if self._asked.plan is not None:
            self._check_plan(self._asked.plan)
        able = [name for name, source in stored.items() if self._is_able(name, source)]
        for part in self._asked.exclude:
            if not any(part in name for name in able):
                raise ConfigError(
                    f"exclude: {part!r} is in no name of a linear's weight; names are {', '.join(able[:2])} and others"
                )
        if not self.schemes:
            raise ModelError(
                f"model: {type(self._model).__name__} has no linear that can be quantized (the format does not "
                "support the transposed weights of Conv1D), or all are excluded; quantize it at load time"
            )
        for together in TOGETHER:
            self._check_together(together)

    def _check_plan(self, plan: QuantPlan) -> None:
        """Check that all weights that the plan quantizes are quantized."""
        for weight in plan.weights:
            for name in weight.names if weight.scheme is not None else ():
                if _module(name) not in self.schemes:
                    raise ConfigError(
                        f"plan: {name} is not a stored linear of this model; make a plan for it with --auto, or "
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
                    f"exclude: {', '.join(together)} of {owner} are joined into one layer when the folder is loaded; "
                    "exclude all of them or none"
                )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _dtype_of(model: PreTrainedModel, stored: Mapping[str, Source]) -> torch.dtype:
    """The model's dtype: that of its config, else the most frequent one of its weights."""
    said = getattr(model.config, "dtype", None)
    if said in FLOATS:
        return said
    counts = Counter(source.dtype for source in stored.values() if source.dtype in FLOATS)
    return counts.most_common(1)[0][0] if counts else torch.float32
