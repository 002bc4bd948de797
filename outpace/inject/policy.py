"""A policy is data: which module of a layer has which role, and how the layer computes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from outpace.errors import ConfigError
from outpace.kernels.routing import Routing

Reader = Callable[[Any, int], Any]
"""(model's config, number of a layer) -> a setting of this layer."""

Refusal = Callable[[Any], str | None]
"""Why a model with this config cannot be run; None: it can."""


def _named(*names: str) -> Reader:
    """The first of these config entries that is set."""

    def read(config: Any, index: int) -> Any:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    return read


def _head_dim(config: Any, index: int) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _window(config: Any, index: int) -> int:
    types = getattr(config, "layer_types", None)
    slides = types is None or types[index] == "sliding_attention"
    return (getattr(config, "sliding_window", None) or 0) if slides else 0


def looks_ahead(config: Any) -> str | None:
    """Why paged attention, which is causal, cannot run a model: its tokens see later ones; None: they do not."""
    for name, ahead in (("use_bidirectional_attention", True), ("is_causal", False)):
        if getattr(config, name, None) is ahead:
            return f"sees later tokens ({name}={ahead})"
    return None


READERS: Mapping[str, Reader] = {
    "num_heads": _named("num_attention_heads"),
    "num_kv_heads": _named("num_key_value_heads", "num_attention_heads"),
    "head_dim": _head_dim,
    "scale": lambda config, index: _head_dim(config, index) ** -0.5,
    "window": _window,
    "softcap": lambda config, index: getattr(config, "attn_logit_softcapping", None) or 0.0,
    "activation": _named("hidden_act", "hidden_activation", "activation_function", "activation"),
    "rotary": lambda config, index: True,
    "alibi": lambda config, index: False,
    "residual": lambda config, index: getattr(config, "residual_multiplier", None) or 1.0,
    "clip": lambda config, index: getattr(config, "clip_qkv", None) or 0.0,
}
"""How to read each setting of a layer, for most families."""


@dataclass(frozen=True)
class LayerSettings:
    """The numbers of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    """Keys a query sees, itself included; 0: all."""
    softcap: float
    activation: str
    rotary: bool
    alibi: bool
    residual: float
    """Factor on the result of a block before it is added, with placement "scaled"."""
    clip: float
    """q, k and v are clamped to plus and minus this; 0: they are not."""


Slopes = Callable[[LayerSettings, int], list[float]]
"""(settings, number of positions) -> ALiBi's slope of each head."""


def power_slopes(settings: LayerSettings, positions: int) -> list[float]:
    """The paper's slopes: powers of 2 ** (-8 / heads), with values between them if heads is not a power of two."""
    heads = settings.num_heads
    power = 2 ** math.floor(math.log2(heads))
    base, extra = (2 ** (-(2 ** -(math.log2(n) - 3))) for n in (power, 2 * power))
    return [base**i for i in range(1, power + 1)] + [extra**i for i in range(1, 2 * (heads - power) + 1, 2)]


@dataclass(frozen=True, kw_only=True)
class ModelRoles:
    """The parts around the layers, as dotted paths from the model with its head."""

    embed: str
    layers: str
    norm: str | None
    head: str = "lm_head"
    rotary: str | None = None
    """The module that makes cos and sin for all layers."""
    positions: str | None = None
    position_offset: int = 0
    embed_norm: str | None = None
    embed_scale: Callable[[Any], float] = lambda config: 1.0
    project_in: str | None = None
    project_out: str | None = None
    logit_softcap: Callable[[Any], float] = lambda config: getattr(config, "final_logit_softcapping", None) or 0.0
    logit_scale: Callable[[Any], float] = lambda config: 1.0
    refuses: Refusal = looks_ahead
    """Why a config needs Hugging Face's own generation loop; None: pages can run it."""


@dataclass(frozen=True, kw_only=True)
class MoERoles:
    """The parts of a mixture of experts, as dotted paths inside the layer, and how it computes."""

    block: str
    """The module of the whole mixture."""
    router: str
    """A module with a weight [experts, hidden]."""
    correction: str | None = None
    """A parameter or buffer [experts] added to the scores to choose experts, but not to weight them."""
    experts: str
    """A module with stacked weights, or a list with a module for each expert."""
    up: str | tuple[str, str] = "gate_up_proj"
    """Stacked: gate and up of all experts. Listed: as `Policy.up`."""
    down: str = "down_proj"
    gated: bool = True
    transposed: bool = False
    """Weights are stored [experts, in, out], or [in, out] in each expert."""
    paired: bool = False
    """Gate and up rows alternate in a stack: gate, up, gate, up, .. (GPT-OSS)."""
    shared: str | None = None
    """The shared expert: an MLP for every token."""
    shared_up: str | tuple[str, str] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_gate: str | None = None
    """A linear: the sigmoid of its output is the weight of the shared MLP."""
    coefficient: str | None = None
    """A linear: the softmax of its output weights experts and shared MLP (DeepSpeed's residual experts)."""
    routing: Callable[[Any], Routing]
    in_float32: bool = False
    """The router computes its logits in float32 for any dtype of the model."""
    clamp: Callable[[Any], tuple[float, float] | None] = lambda config: None
    """(limit, alpha) of GPT-OSS's activation; None: the layer's activation."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How the layer of a family maps to the fused layer. Paths are dotted names inside the layer."""

    layers: tuple[str, ...]
    """Class names of the layers; an ambiguous one has the module's name before it."""
    placement: Literal["pre", "post", "sandwich", "parallel", "normed", "scaled"] = "pre"
    """pre: x += f(norm(x)) · post: x = norm(x + f(x)) · sandwich: x += norm(f(norm(x))) · parallel: both from one x ·
    normed: x = n + f(n) with n = norm(x) · scaled: x += residual * f(norm(x))."""
    norm: Literal["rms", "layer"] = "rms"
    """Of all norms of the layer and the last one of the model."""
    norm_offset: float = 0.0
    """Added to the weights of RMS norms: Gemma stores weight - 1."""
    round_before_weight: bool = True
    """Llama rounds the normed value to the model's dtype before the weight; Gemma after it."""
    norm_eps: float | None = None
    """None: read from the norms."""
    attn_norm: str
    """The norm before attention; with placement "post" the one after its sum."""
    mlp_norm: str | None = None
    """Likewise of the MLP. None with placement "parallel": attention and MLP share a norm."""
    attn_out_norm: str | None = None
    """With placement "sandwich": the norm of what attention adds."""
    mlp_out_norm: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    qk_norm_over: Literal["head", "all"] = "head"
    """Norm each head of q and k by itself, or all heads together."""
    qkv: str | tuple[str, str, str]
    qkv_layout: Literal["rows", "heads", "groups", "quarters"] = "rows"
    """Rows of a fused qkv. rows: all q, all k, all v · heads: q, k, v of each head · groups: q's, k, v of each group ·
    quarters: q's, v's, k's of each quarter of the heads."""
    out: str
    up: str | tuple[str, str] | None = None
    """(gate, up), a fused gate_up, or the first projection of a plain MLP."""
    gated: bool = True
    down: str | None = None
    mlp: str | None = None
    """The MLP module, if it is kept as it is."""
    moe: MoERoles | None = None
    """Experts. A layer of the family without experts is dense, with `up` and `down`."""
    transposed: bool = False
    """Weights are stored [in, out]."""
    interleaved: bool = False
    """Rotary pairs are neighbours (GPT-J), not halves of the head, and so they are in the model's cos and sin."""
    rotary_twice: bool = True
    """The model's cos and sin hold each value twice, for both of a pair; GPT-OSS holds it once."""
    rotary_table: str | None = None
    """A buffer of each layer [positions, R]: sin in the first half, cos in the second."""
    own_window: bool = False
    """The layer applies its window itself: Hugging Face's mask does not contain it."""
    mask_forbids: bool = False
    """True in Hugging Face's mask means masked out."""
    alibi_in_mask: bool = False
    """Hugging Face's mask contains the biases of ALiBi."""
    slopes: Slopes = power_slopes
    """Of the heads, if the setting `alibi` is true."""
    sinks: str | None = None
    """Attention sinks: a parameter with one more logit for each head, without a value."""
    causal: bool = True
    """False: an encoder's layer."""
    returns_tuple: bool = False
    """Hugging Face's layer returns a tuple."""
    readers: Mapping[str, Reader] = field(default_factory=dict)
    """How to read the settings that this family keeps in another place."""
    variant: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    """Fields of this policy that depend on the config."""
    model: ModelRoles | None = None
    """None: an encoder, without paged decoding."""
    refuses: Refusal = lambda config: None
    """Why a config cannot be fused; None: it can."""

    def __post_init__(self) -> None:
        if self.norm == "layer" and self.norm_offset:
            raise ConfigError(
                f"policy: norm_offset={self.norm_offset} is for norm='rms'; layer norms have no offset here, "
                "so leave such a model without a policy"
            )

    def once(self, table: Tensor) -> Tensor:
        """cos or sin of the model [..., R] with each value once [..., R / 2]."""
        if not self.rotary_twice:
            return table
        return table[..., ::2] if self.interleaved else table[..., : table.shape[-1] // 2]

    def of(self, config: Any) -> "Policy":
        return replace(self, **self.variant(config))

    def settings(self, config: Any, index: int) -> LayerSettings:
        readers = {**READERS, **self.readers}
        return LayerSettings(**{name: read(config, index) for name, read in readers.items()})
