"""A policy is data: which module of somebody's layer plays which role, and how that layer computes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from outpace.kernels.routing import Routing

Reader = Callable[[Any, int], Any]
"""Reads a setting of layer number `int` from the model's config."""

Refusal = Callable[[Any], str | None]
"""Why a model with this config cannot be run this way; None: it can."""


def _named(*names: str) -> Reader:
    """The first of these entries of the config that is there."""

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
    """Pages hold what came before a token; a model that also sees what comes after it needs Hugging Face's masks."""
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
"""Settings of a layer, and where most families keep them."""


@dataclass(frozen=True)
class Settings:
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
    """What a block's result is multiplied with before it is added, where the placement says so."""
    clip: float
    """Bound of what q, k and v may be; 0: none."""


Slopes = Callable[[Settings, int], list[float]]
"""ALiBi's slope of each head of a layer, for that many positions."""


def power_slopes(settings: Settings, positions: int) -> list[float]:
    """The paper's slopes: powers of 2 ** (-8 / heads), and between them where the heads are no power of two."""
    heads = settings.num_heads
    power = 2 ** math.floor(math.log2(heads))
    base, extra = (2 ** (-(2 ** -(math.log2(n) - 3))) for n in (power, 2 * power))
    return [base**i for i in range(1, power + 1)] + [extra**i for i in range(1, 2 * (heads - power) + 1, 2)]


@dataclass(frozen=True, kw_only=True)
class ModelRoles:
    """Where the parts around the layers are, as dotted paths from the model with its head."""

    embed: str
    layers: str
    norm: str | None
    head: str = "lm_head"
    rotary: str | None = None
    """The module that makes cos and sin of all layers."""
    positions: str | None = None
    position_offset: int = 0
    embed_norm: str | None = None
    embed_scale: Callable[[Any], float] = lambda config: 1.0
    project_in: str | None = None
    project_out: str | None = None
    logit_softcap: Callable[[Any], float] = lambda config: getattr(config, "final_logit_softcapping", None) or 0.0
    logit_scale: Callable[[Any], float] = lambda config: 1.0
    refuses: Refusal = looks_ahead
    """What Hugging Face's loop can do and pages cannot."""


@dataclass(frozen=True, kw_only=True)
class MoERoles:
    """Where the parts of a mixture of experts are, as dotted paths inside the layer, and how it computes."""

    block: str
    """The module that is the mixture, as a whole."""
    router: str
    """A module with a weight [experts, hidden]."""
    correction: str | None = None
    """A parameter or buffer [experts] that counts for the choice of experts and not for their weights."""
    experts: str
    """A module with stacks of weights, or a list of modules, each an expert."""
    up: str | tuple[str, str] = "gate_up_proj"
    """In a stack: gate and up of all experts. In an expert: as `Policy.up`."""
    down: str = "down_proj"
    gated: bool = True
    transposed: bool = False
    """Weights are stored [experts, in, out], or [in, out] in each expert."""
    paired: bool = False
    """Gate and up of a stack are neighbours: gate, up, gate, up, .. (GPT-OSS)."""
    shared: str | None = None
    """An MLP that every token runs through."""
    shared_up: str | tuple[str, str] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_gate: str | None = None
    """A linear whose sigmoid says how much of the shared MLP is added."""
    coefficient: str | None = None
    """A linear whose softmax gives the shares of experts and shared MLP (DeepSpeed's residual experts)."""
    routing: Callable[[Any], Routing]
    in_float32: bool = False
    """Whether the router computes its logits in float32 whatever the model's dtype."""
    clamp: Callable[[Any], tuple[float, float] | None] = lambda config: None
    """(limit, alpha) of GPT-OSS's activation; None: the layer's activation."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How one family's layer maps to the fused layer. Paths are dotted names inside the layer."""

    layers: tuple[str, ...]
    """Class names of the layers; with their module's name where the class name alone says too little."""
    placement: Literal["pre", "post", "sandwich", "parallel", "normed", "scaled"] = "pre"
    """pre: x += f(norm(x)) · post: x = norm(x + f(x)) · sandwich: x += norm(f(norm(x))) · parallel: both from one x ·
    normed: x = n + f(n) with n = norm(x) · scaled: x += residual * f(norm(x))."""
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    """Added to the norms' weights: Gemma stores weight - 1."""
    round_before_weight: bool = True
    """Llama rounds the normed value to the model's dtype before the weight; Gemma after it."""
    norm_eps: float | None = None
    """None: the norms say it."""
    attn_norm: str
    mlp_norm: str | None = None
    """None with parallel placement: attention and MLP share a norm."""
    attn_out_norm: str | None = None
    mlp_out_norm: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    qk_norm_over: Literal["head", "all"] = "head"
    """Whether q and k are normed head by head, or all heads together."""
    qkv: str | tuple[str, str, str]
    qkv_layout: Literal["rows", "heads", "groups", "quarters"] = "rows"
    """Rows of a fused qkv: all q, all k, all v · q, k, v of each head · the q's, k and v of each group · the q's, v's
    and k's of each quarter of the heads."""
    out: str
    up: str | tuple[str, str] | None = None
    """(gate, up), a fused gate_up, or the one projection of a plain MLP."""
    gated: bool = True
    down: str | None = None
    mlp: str | None = None
    """A module left as it is."""
    moe: MoERoles | None = None
    """Experts. A layer that has none is a dense one, by `up` and `down`."""
    transposed: bool = False
    """Weights are stored [in, out]."""
    interleaved: bool = False
    """Rotary pairs are neighbours (GPT-J) and not halves."""
    rotary_twice: bool = True
    """The model's cos and sin hold each value twice, once for each of a pair; GPT-OSS's hold it once."""
    rotary_table: str | None = None
    """A buffer in each layer [positions, R], sin in its first half and cos in its second."""
    own_window: bool = False
    """The layer keeps to its window by itself: Hugging Face's mask knows of none."""
    mask_forbids: bool = False
    """True in Hugging Face's mask is a key that a query must not see."""
    alibi_in_mask: bool = False
    """Hugging Face's mask brings the biases of ALiBi."""
    slopes: Slopes = power_slopes
    """Of the heads, where `alibi` is set."""
    sinks: str | None = None
    """A logit for each head that takes probability and has no value."""
    causal: bool = True
    returns_tuple: bool = False
    readers: Mapping[str, Reader] = field(default_factory=dict)
    """Settings this family keeps elsewhere than most."""
    variant: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    """Fields of the policy that depend on the config."""
    model: ModelRoles | None = None
    """None: an encoder, which needs no paged decoding."""
    refuses: Refusal = lambda config: None

    def once(self, table: Tensor) -> Tensor:
        """The model's cos or sin [..., R] with each value once: [..., R / 2]."""
        if not self.rotary_twice:
            return table
        return table[..., ::2] if self.interleaved else table[..., : table.shape[-1] // 2]

    def of(self, config: Any) -> "Policy":
        """This policy for one config."""
        return replace(self, **self.variant(config))

    def settings(self, config: Any, index: int) -> Settings:
        """The numbers of layer `index`."""
        readers = {**READERS, **self.readers}
        return Settings(**{name: read(config, index) for name, read in readers.items()})
