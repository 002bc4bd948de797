"""Matches stored tensors to the tensors of a model by name; mismatches are errors before anything is allocated."""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.errors import ModelError
from outpace.loading import conversion
from outpace.loading.dtypes import short
from outpace.loading.foreign.plain import plain_weights
from outpace.loading.read_source import same
from outpace.loading.weights import Source, Weights
from outpace.log import chosen, logger

_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to all names."""
_OLD_BUFFERS = re.compile(r"(^|\.)((\w+_)?inv_freq|position_ids|_extra_state)$")
"""Buffers that older versions of models stored and newer ones compute."""
_OLD_MASKS = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$")
_OTHER_HEADS = re.compile(
    r"((^|.*\.)pooler|cls\.\w+|lm_head|embed_out|proj_out|score|classifier|qa_outputs|v_head)(\..*|$)"
)
"""Heads of other model classes with the same base model."""


def match(model: nn.Module, weights: Weights, dtype: torch.dtype = torch.float32) -> dict[str, Source]:
    """A source for every parameter and persistent buffer of a model on the meta device, by the model's names.

    All names of one Parameter get the same source. Tied weights become one Parameter, unless the checkpoint has
    different values for them. Weights that a checkpoint may omit are computed by the model's class; such buffers have
    no source and keep their value. dtype: the dtype to which quantized weights are converted.
    """
    wanted = tensors_of(model)
    settings = conversion.quantization(model) if weights.quantization is None else weights.quantization
    if settings:
        weights = plain_weights(weights, settings, wanted, dtype)
        conversion.forget_quantization(model)
    stored = unwrapped(weights.sources, wanted)
    if isinstance(model, PreTrainedModel):
        found, extra = conversion.convert(model, wanted, stored)
    else:
        found = {name: source for name, source in stored.items() if name in wanted}
        extra = {name: name for name in stored if name not in wanted}
    groups = _tied(model)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    lost = [names[0] for names in groups if not _filled(model, names, found, buffers)]
    made = {name: source for name in lost if (source := conversion.computed(model, name)) is not None}
    found, lost = found | made, [name for name in lost if name not in made]
    unknown = _really_extra(model, wanted, stored, extra, buffers)
    _check(model, weights, lost, unknown, _misfits(wanted, found, weights))
    for names in groups:
        if len(names) > 1:
            _share(model, names, found)
    return {name: found[name] for name in wanted if name in found}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, the original objects."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if not name.endswith("_extra_state")}


def unwrapped(stored: Mapping[str, Source], wanted: Mapping[str, Tensor]) -> Mapping[str, Source]:
    """The stored tensors without a wrapper's prefix, if all of them have it and no name of the model has."""
    for prefix in _WRAPPERS:
        if stored and all(name.startswith(prefix) for name in stored):
            if any(name.startswith(prefix) for name in wanted):
                return stored
            chosen(
                "weights", f"names without {prefix}", "all stored names begin with it, and no name of the model does"
            )
            return unwrapped({name.removeprefix(prefix): source for name, source in stored.items()}, wanted)
    return stored


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each weight, after tied weights were made one Parameter."""
    wanted = tensors_of(model)
    ties = conversion.ties(model)
    for target, source in ties.items():
        if target in wanted and source in wanted and wanted[target] is not wanted[source]:
            _put(model, target, wanted[source])
    groups: dict[int, list[str]] = {}
    for name, value in sorted(tensors_of(model).items(), key=lambda item: item[0] in ties):
        groups.setdefault(id(value), []).append(name)
    return list(groups.values())


def _filled(model: nn.Module, names: list[str], found: Mapping[str, Source], buffers: set[str]) -> bool:
    if any(name in found for name in names):
        return True
    return any(name in buffers and conversion.may_miss(model, name) for name in names)


def _share(model: nn.Module, names: list[str], found: dict[str, Source]) -> None:
    """Give all names of a weight the same source; a name with other stored values gets a separate Parameter."""
    first = next((name for name in names if name in found), None)
    if first is None:  # a buffer that keeps its value
        return
    for name in names:
        source = found.setdefault(name, found[first])
        if same(found[first], source, _at(model, name).dtype):
            found[name] = found[first]
        else:
            _untie(model, name, first)


def _untie(model: nn.Module, name: str, first: str) -> None:
    shared = _at(model, name)
    _put(model, name, nn.Parameter(torch.empty_like(shared), requires_grad=shared.requires_grad))
    if _at(model, first) is not shared:  # both names are the same module
        raise ModelError(f"model: {name} and {first} are one weight, but are stored with different values")
    conversion.ties(model).pop(name, None)
    logger.warning("%s is not tied to %s: they are stored with different values", name, first)


def _at(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, value)


def _really_extra(
    model: nn.Module,
    wanted: Mapping[str, Tensor],
    stored: Mapping[str, Source],
    extra: Mapping[str, str],
    buffers: set[str],
) -> list[str]:
    """The stored names that have no place in the model and cannot be ignored."""
    heads = [name for name in extra if isinstance(model, PreTrainedModel) and _other_head(name, wanted)]
    if heads:
        logger.warning("weights of parts that this model does not have: %s (%d)", ", ".join(heads[:5]), len(heads))
    return [
        name
        for name, renamed in extra.items()
        if name not in heads
        and not {name, renamed} & buffers
        and not _OLD_BUFFERS.search(name)
        and not (_OLD_MASKS.search(name) and _is_mask(stored[name].shape))
        and not conversion.may_have(model, name)
        and not conversion.may_have(model, renamed)
    ]


def _other_head(name: str, wanted: Iterable[str]) -> bool:
    """Whether it belongs to a head that this model does not have."""
    part = _OTHER_HEADS.fullmatch(name)
    return part is not None and not any(other.startswith(f"{part[1]}.") for other in wanted)


def _is_mask(shape: tuple[int, ...]) -> bool:
    return not shape or (len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3])


def _misfits(wanted: Mapping[str, Tensor], found: Mapping[str, Source], weights: Weights) -> list[str]:
    """Descriptions of tensors whose shape or kind differs from the model's."""
    misfits = []
    for name, source in found.items():
        want = wanted[name]
        if want.is_floating_point() and source.dtype.itemsize == 1 and source.dtype is not torch.bool:
            raise _quantized(weights, f"{name} is stored as {short(source.dtype)}")
        if source.shape != tuple(want.shape):
            misfits.append(f"{name}: {list(source.shape)} instead of {list(want.shape)}")
        elif source.dtype.is_floating_point != want.is_floating_point() or source.dtype.is_complex:
            misfits.append(f"{name}: {short(source.dtype)} instead of {short(want.dtype)}")
    return misfits


def _check(model: nn.Module, weights: Weights, lost: list[str], extra: list[str], misfits: list[str]) -> None:
    problems = [
        f"{what}: {len(names)} ({', '.join(names[:5])}{', ..' if len(names) > 5 else ''})"
        for what, names in (("missing", lost), ("extra", extra), ("of another shape or kind", misfits))
        if names
    ]
    if problems:
        raise ModelError(
            f"model: the weights in {weights.origin} do not fit {type(model).__name__}; tensors "
            f"{'; '.join(problems)}; use the config and the weights of one model"
        )


def _quantized(weights: Weights, why: str) -> ModelError:
    return ModelError(
        f"model: {weights.origin} is quantized ({why}), and its config.json does not say how; put the "
        "quantization_config of the model there, or use weights in float16, bfloat16 or float32"
    )
