"""Fields of `quant` that cannot be combined."""

from collections.abc import Callable

from outpace.config.base import ConfigModel
from outpace.config.sections import QuantizationConfig

_SCALES = ("q_groups", "group_size", "per_tensor")
_WHOLE_RULES = ("quantized_initialization", "post_init_quant")
_BOUNDS = ("max_perplexity_increase", "max_bytes", "bits_per_weight")
_SINGLE = ("num_bits", "q_type", *_SCALES)


def changed(config: ConfigModel, *names: str) -> bool:
    """Whether one of the fields is not at its default."""
    return any(getattr(config, name) != type(config).model_fields[name].default for name in names)


def says_int8(quant: QuantizationConfig) -> bool:
    """Whether a section leaves room for int8 weights."""
    weight = quant.weight
    rules = (weight, weight.quantized_initialization, *(weight.post_init_quant or {}).values())
    bits = {rule.num_bits for rule in rules if rule is not None}
    return quant.scheme in (None, "int8", "w8a8") and weight.enabled and bits == {8} and not chooses(quant)


def chooses(quant: QuantizationConfig) -> bool:
    """Whether each weight has a scheme of its own: chosen by measuring, now or before."""
    return quant.auto is not None or quant.plan is not None


def activates(quant: QuantizationConfig) -> bool:
    """Whether `activation` asks for quantized activations."""
    return quant.activation is not None and quant.activation.enabled


def _several(config: ConfigModel, *names: str) -> bool:
    return sum(changed(config, name) for name in names) > 1


QUANT_COMPOSITIONS: tuple[tuple[Callable[[QuantizationConfig], bool], str], ...] = (
    (
        lambda q: q.scheme is not None and changed(q, "weight", "activation"),
        "quant.scheme with quant.weight or quant.activation: both say how weights are quantized; give one",
    ),
    (
        lambda q: q.scheme in ("stored", "none") and not q.qkv.enabled,
        "quant.qkv.enabled=False with quant.scheme stored or none: neither quantizes anything; leave quant.qkv out",
    ),
    (
        lambda q: _several(q.weight, *_SCALES),
        "quant.weight.q_groups, quant.weight.group_size and quant.weight.per_tensor: each says how many scales a "
        "weight has; give one",
    ),
    (
        lambda q: changed(q.weight, *_WHOLE_RULES) and _several(q.weight, *_WHOLE_RULES, *_SINGLE),
        "quant.weight.quantized_initialization or quant.weight.post_init_quant with another field of quant.weight: "
        "each of them is a whole rule; give one",
    ),
    (
        lambda q: q.weight.post_init_quant == {},
        "quant.weight.post_init_quant has no rules: give some, or leave it out",
    ),
    (
        lambda q: not q.qkv.enabled and q.weight.post_init_quant is not None,
        "quant.qkv.enabled=False with quant.weight.post_init_quant: the rules alone say which weights are quantized; "
        "leave quant.qkv out, and name no projections",
    ),
    (
        lambda q: not q.weight.enabled and (activates(q) or changed(q.weight, *_WHOLE_RULES, *_SINGLE)),
        "quant.weight.enabled=False with quant.activation or another field of quant.weight: activations are quantized "
        "together with weights; enable quant.weight, or leave the others out",
    ),
    (
        lambda q: changed(q, "calibration") and q.auto is None,
        "quant.calibration: nothing that was asked for is calibrated; give quant.auto, or leave it out",
    ),
    (
        lambda q: changed(q, "method", "smooth"),
        "quant.method gptq and quant.smooth: weights are calibrated ahead of time; run `outpace quantize MODEL "
        "--scheme S --method gptq --out DIR`, or with --smooth 0.5, and load DIR",
    ),
    (
        lambda q: _several(q, "auto", "plan") or (chooses(q) and changed(q, "scheme", "weight", "activation")),
        "quant.auto or quant.plan with each other, or with quant.scheme, quant.weight or quant.activation: each says "
        "what weights become; give one",
    ),
    (
        lambda q: q.plan is not None and not q.qkv.enabled,
        "quant.plan with quant.qkv: the plan says what becomes of each weight; leave quant.qkv out",
    ),
    (
        lambda q: q.auto is not None and sum(changed(q.auto, name) for name in _BOUNDS) != 1,
        f"quant.auto: it needs one bound, of {', '.join(f'quant.auto.{name}' for name in _BOUNDS)}; give one",
    ),
    (
        lambda q: q.auto is not None and not q.auto.schemes,
        "quant.auto.schemes is empty: name what weights may become, or leave it out",
    ),
    (
        lambda q: q.auto is not None and q.auto.out is not None and not q.auto.out.endswith(".json"),
        "quant.auto.out: the plan is written as JSON; give a name that ends in .json",
    ),
    (
        lambda q: q.activation is not None and changed(q.activation, "num_bits", "q_type", "q_groups"),
        "quant.activation: activations are quantized to 8 bits, symmetric, with one scale a token; leave num_bits, "
        "q_type and q_groups out",
    ),
)
"""(is it wrong?, what to say)."""
