"""The options in `quant`, and which of them cannot be combined."""

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from outpace.config.base import ConfigModel
from outpace.config.values import CalibrationText, NamedPath, PathOrDict, Size


class BaseQuantConfig(ConfigModel):
    """How one kind of tensor is quantized."""

    enabled: bool = True
    """Quantize this kind of tensor."""
    num_bits: Literal[4, 8] = 8
    """Bits per value."""
    q_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Symmetric stores no zero points."""
    q_groups: int = Field(default=1, ge=1)
    """Number of groups in a row, each with its own scale; 1: one scale for each row."""


class GroupQuantConfig(ConfigModel):
    """A rule of DeepSpeed's weight-only quantization."""

    num_bits: Literal[4, 8] = 8
    """Bits per value."""
    group_size: int | None = Field(default=None, ge=8)
    """Columns of a row that share a scale. None: the whole row for 8 bits; for 4 bits 128 columns or fewer, if 128 do
    not divide the row."""
    group_dim: Literal[1, -1] = 1
    """Grouping is along the columns."""
    symmetric: bool = False
    """Symmetric stores no zero points."""


class WeightQuantConfig(BaseQuantConfig):
    """How weights are quantized."""

    group_size: int | None = Field(default=None, ge=8)
    """Columns of a row that share a scale, instead of `q_groups`."""
    per_tensor: bool = False
    """One scale for each tensor of the model: q, k and v have one each, even in a fused layer."""
    quantized_initialization: GroupQuantConfig | None = None
    """How all weights are quantized, in the form of DeepSpeed's ZeRO-Inference."""
    post_init_quant: dict[str, GroupQuantConfig] | None = None
    """Part of a weight's name -> how these weights are quantized; other weights stay as they are."""


class QKVQuantConfig(ConfigModel):
    """Whether the attention projections are quantized too."""

    enabled: bool = True
    """Quantize the attention projections."""


class CalibrationConfig(ConfigModel):
    """The text on which the model runs to choose or make quantized weights."""

    text: CalibrationText | None = None
    """The path of a text file in UTF-8, or token ids; None: the built-in text."""
    tokens: int = Field(default=2048, ge=16)
    """Number of tokens that are used, from the beginning of the text."""


class AutoQuantConfig(ConfigModel):
    """A scheme for each weight, chosen by measuring: the smallest model within a loss, or the least loss within a
    size."""

    max_perplexity_increase: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Maximum relative increase of the perplexity on the calibration text: 0.01 is 1 %."""
    max_bytes: Size | None = None
    """Maximum bytes of all weights of the model in memory: a number, or text such as "4GB"."""
    bits_per_weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Maximum bits for each weight, averaged over all linears, including their scales."""
    schemes: tuple[Literal["int4", "int8", "fp8", "w8a8"], ...] = ("int4", "int8")
    """Schemes to choose from; a weight may also stay as it is."""
    out: NamedPath | None = None
    """A .json file to write the plan to; its table (.md) and its picture (.png) are written next to it."""


class QuantizationConfig(ConfigModel):
    """Weight and activation quantization."""

    keeps_auto: ClassVar[frozenset[str]] = frozenset({"kv_cache_dtype", "scheme"})

    enabled: bool = True
    """False: as if `quant` were not given. Cannot be combined with `scheme` or `kv_cache_dtype`."""
    scheme: Literal["int8", "int4", "fp8", "w8a8", "stored", "none"] | None = None
    """A common combination: int8 weights, int4 weights in groups, fp8 or int8 (w8a8) weights and activations. stored:
    run weights that the checkpoint stores quantized without conversion, the default on a GPU. none: convert them to the
    model's dtype, the default on a CPU."""
    activation: BaseQuantConfig | None = None
    """How activations are quantized; None: not at all."""
    weight: WeightQuantConfig = WeightQuantConfig()
    """How weights are quantized."""
    qkv: QKVQuantConfig = QKVQuantConfig()
    """Whether the attention projections are quantized too."""
    kv_cache_dtype: Literal["auto", "int8", "fp8", "fp8_e4m3"] = "auto"
    """How keys and values are stored in pages: int8 or fp8 (e4m3, the same as fp8_e4m3), with a scale for each token
    and head; auto: in the model's dtype."""
    method: Literal["rtn", "gptq"] = "rtn"
    """How weights are rounded: to nearest, or by GPTQ, which `outpace quantize` does ahead of time."""
    smooth: float | None = Field(default=None, ge=0, le=1)
    """SmoothQuant's alpha, which `outpace quantize` takes; None: no smoothing."""
    calibration: CalibrationConfig = CalibrationConfig()
    """The calibration text."""
    auto: AutoQuantConfig | None = None
    """A scheme for each weight, chosen by measuring on the calibration text."""
    plan: PathOrDict | None = None
    """A plan that `auto` wrote earlier: the path of its JSON file, or its content. Nothing is measured."""

    @field_validator("scheme", mode="before")
    @classmethod
    def _no_scheme(cls, value: object) -> object:
        if value == "auto":
            raise ValueError(
                "'auto' is not a scheme; to measure a scheme for each weight, give "
                'quant={"auto": {"max_perplexity_increase": 0.01}}, or remove it'
            )
        return value

    @property
    def reads_text(self) -> bool:
        """Whether a calibration text has to be tokenized."""
        return self.auto is not None and not isinstance(self.calibration.text, tuple)

    @property
    def only_cache(self) -> bool:
        """Whether only the cache is to be quantized."""
        given = {name for name, value in self.given().items() if value is not None}
        return given - {"enabled"} == {"kv_cache_dtype"}


def changed(config: ConfigModel, *names: str) -> bool:
    """Whether one of the fields is not at its default."""
    return any(getattr(config, name) != type(config).model_fields[name].default for name in names)


def weighs_int8(weight: WeightQuantConfig) -> bool:
    """Whether `dtype="int8"` can be combined with this section."""
    rules = (weight, weight.quantized_initialization, *(weight.post_init_quant or {}).values())
    return weight.enabled and {rule.num_bits for rule in rules if rule is not None} == {8}


def chooses(quant: QuantizationConfig) -> bool:
    """Whether each weight has its own scheme, chosen by measuring now (`auto`) or earlier (`plan`)."""
    return quant.auto is not None or quant.plan is not None


def activates(quant: QuantizationConfig) -> bool:
    """Whether `activation` asks for quantized activations."""
    return quant.activation is not None and quant.activation.enabled


def _several(config: ConfigModel, *names: str) -> bool:
    return sum(changed(config, name) for name in names) > 1


_SCALES = ("q_groups", "group_size", "per_tensor")
_WHOLE_RULES = ("quantized_initialization", "post_init_quant")
_BOUNDS = ("max_perplexity_increase", "max_bytes", "bits_per_weight")
_SINGLE = ("num_bits", "q_type", *_SCALES)

QUANT_COMPOSITIONS: Mapping[str, Callable[[QuantizationConfig], bool]] = {
    "quant.scheme with quant.weight or quant.activation: both say how weights are quantized; give one": lambda q: (
        q.scheme is not None and changed(q, "weight", "activation")
    ),
    "quant.qkv.enabled=False with quant.scheme stored or none: neither quantizes anything; "
    "remove quant.qkv": lambda q: q.scheme in ("stored", "none") and not q.qkv.enabled,
    "quant.weight.q_groups, quant.weight.group_size and quant.weight.per_tensor: each says how many scales a weight "
    "has; give one": lambda q: _several(q.weight, *_SCALES),
    "quant.weight.quantized_initialization or quant.weight.post_init_quant with another field of quant.weight: each "
    "of them is a complete rule; give one": lambda q: (
        changed(q.weight, *_WHOLE_RULES) and _several(q.weight, *_WHOLE_RULES, *_SINGLE)
    ),
    "quant.weight.post_init_quant has no rules: give some, or remove it": lambda q: q.weight.post_init_quant == {},
    "quant.qkv.enabled=False with quant.weight.post_init_quant: the rules alone say which weights are quantized; "
    "remove quant.qkv, and name no projections": lambda q: not q.qkv.enabled and q.weight.post_init_quant is not None,
    "quant.weight.enabled=False with quant.activation or another field of quant.weight: activations are quantized "
    "together with weights; enable quant.weight, or remove the others": lambda q: (
        not q.weight.enabled and (activates(q) or changed(q.weight, *_WHOLE_RULES, *_SINGLE))
    ),
    "quant.calibration: nothing that was asked for is calibrated; give quant.auto, or remove it": lambda q: (
        changed(q, "calibration") and q.auto is None
    ),
    "quant.method gptq and quant.smooth: weights are calibrated ahead of time; run `outpace quantize MODEL "
    "--scheme S --method gptq --out DIR`, or with --smooth 0.5, and load DIR": lambda q: changed(q, "method", "smooth"),
    "quant.auto or quant.plan with each other, or with quant.scheme, quant.weight or quant.activation: each says "
    "how weights are quantized; give one": lambda q: (
        _several(q, "auto", "plan") or (chooses(q) and changed(q, "scheme", "weight", "activation"))
    ),
    "quant.plan with quant.qkv: the plan has a scheme for each weight; remove quant.qkv": lambda q: (
        q.plan is not None and not q.qkv.enabled
    ),
    f"quant.auto: it needs one bound, of {', '.join(f'quant.auto.{name}' for name in _BOUNDS)}; give one": lambda q: (
        q.auto is not None and sum(changed(q.auto, name) for name in _BOUNDS) != 1
    ),
    "quant.auto.schemes is empty: name the schemes to choose from, or remove it": lambda q: (
        q.auto is not None and not q.auto.schemes
    ),
    "quant.auto.out: the plan is written as JSON; give a name that ends in .json": lambda q: (
        q.auto is not None and q.auto.out is not None and not q.auto.out.endswith(".json")
    ),
    "quant.activation: activations are quantized to 8 bits, symmetric, with one scale for each token; remove num_bits, "
    "q_type and q_groups": lambda q: (
        q.activation is not None and changed(q.activation, "num_bits", "q_type", "q_groups")
    ),
}
"""Error message -> whether a config is wrong in this way."""
