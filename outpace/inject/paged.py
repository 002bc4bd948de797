"""The paged form of a model with fused layers: batches of flattened sequences, keys and values in pages."""

from collections.abc import Hashable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.cache.kv_cache import Pages
from outpace.errors import ModelError, NotSupported
from outpace.inject.apply import Injected
from outpace.inject.make import make_norm
from outpace.inject.modules import Embedding, FusedLayer, Linear
from outpace.inject.parts import Parts
from outpace.inject.policy import ModelRoles, Policy
from outpace.inject.rope import Table, alibi_slopes, check_length, rope_tables
from outpace.inject.staged import Blank, width
from outpace.kernels.attention_torch import causal_attention
from outpace.kernels.decode_plan import DecodePlans
from outpace.kernels.dispatch import Kernels
from outpace.kernels.rotary import QKV, split_qkv
from outpace.parallel.group import ALONE, Group
from outpace.parallel.pipeline import ONLY, Stage
from outpace.parallel.stages import parts_of
from outpace.parallel.vocabulary import ALL, Vocabulary

if TYPE_CHECKING:
    from outpace.offload.streaming import Streaming


@dataclass(frozen=True)
class Batch:
    """The tokens of several sequences one after another, and where their keys and values are."""

    ids: Tensor
    """[T] token ids."""
    positions: Tensor
    """[T] position of each token in its sequence."""
    slots: Tensor
    """[T] slot of its key and value: page * block_size + offset; -1: none."""
    block_table: Tensor
    """[B, M] pages of each sequence."""
    seq_lens: Tensor
    """[B] keys of each sequence, with those of this batch."""
    cu_q: Tensor
    """[B + 1] first token of each sequence."""
    max_q: int
    """Most tokens of one sequence."""
    max_len: int
    """Upper bound of seq_lens, also for later replays of a graph."""
    fresh: bool = False
    """One sequence from its first token on, and padding after it. Attention needs no pages then, unless they are
    quantized: every step has to see the same rounded keys."""
    mixed: bool = False
    """Decodes and prefills may be mixed; the kernel finds out which is which."""

    def part(self, rows: slice) -> "Batch":
        """Some of the tokens as a batch, to run after the parts before it: their keys must be in the pages."""
        cu_q, end = self.cu_q, rows.stop
        later = (cu_q[1:] - cu_q[:-1].clamp(min=end)).clamp(min=0)  # tokens of each sequence after these
        return replace(
            self, ids=self.ids[rows], positions=self.positions[rows], slots=self.slots[rows],
            seq_lens=self.seq_lens - later, cu_q=cu_q.clamp(rows.start, end) - rows.start,
            max_q=min(self.max_q, end - rows.start), fresh=False,
        )  # fmt: skip


MICRO_TOKENS = 8192  # tokens that a layer computes at once: more are not faster, and take more memory
MAX_TOKENS = 8 * MICRO_TOKENS  # of a step with streamed layers: each layer is loaded once for all tokens


def micro_batches(tokens: int) -> list[slice]:
    """Split into parts of about equal size."""
    return [slice(*part) for part in parts_of(tokens, -(-tokens // MICRO_TOKENS))]


class BatchModel(Protocol):
    """A causal model that runs batches with keys and values in pages."""

    kv_heads: list[tuple[int, int, int]]
    """For each layer (kv heads, size of a key, size of a value)."""
    dtype: torch.dtype
    """dtype of the pages."""
    device: torch.device
    capturable: bool
    """Whether forward can be captured in a CUDA graph."""
    reentrant: bool
    """Whether several threads may call forward at once."""
    gives_hidden: bool
    """Whether `hidden` works."""
    ranks: Group
    """Ranks that run the same batches, each with its part of every layer."""
    stage: Stage
    """The pipeline stage that these layers are."""
    hidden_size: int
    """Width of what a stage sends to the next one."""
    vocab_size: int
    """Logits of all ranks together."""
    vocabulary: Vocabulary
    """The tokens whose logits `forward` returns."""
    streaming: "Streaming | None"
    """Layers that are streamed from host memory; None: all stay on the device."""
    max_tokens: int
    """Most useful tokens of a step."""
    kernels: Kernels
    """The kernels of its layers."""

    def forward(self, batch: Batch, pages: Pages, rows: Tensor | None = None, given: Tensor | None = None) -> Tensor:
        """Logits [T, V], or [R, V] of the chosen rows; writes keys and values to the pages.

        V: the tokens of this rank (see `vocabulary`). given: the output [T, H] of the stage before, which may be
        overwritten. A stage before the last returns the output of its last layer [T, H].
        """

    def hidden(self, batch: Batch, pages: Pages, given: Tensor | None = None) -> Tensor:
        """Input of the head [T, hidden_size], Hugging Face's last_hidden_state. Writes keys and values to the pages."""

    def sketch(self) -> "BatchModel":
        """A model with fewer layers that launches the same kernels, to compile them. Its results mean nothing."""


class PagedModel:
    """Runs batches through the fused layers of a causal model. Has no weights of its own."""

    def __init__(self, model: nn.Module, injected: Injected, max_positions: int) -> None:
        config: Any = injected.config
        roles, kernels = check_paged(model, injected.policy, config, max_positions), injected.layers[0].kernels
        part, self._layers = Parts(model), injected.layers
        self.stage = ONLY if injected.shard is None else injected.shard.mesh.stage
        embedding, head = part(roles.embed), part(roles.head)
        if not isinstance(embedding, Embedding | Blank) or not isinstance(head, Linear | Blank):
            raise NotSupported(
                "pages: embedding or head was replaced after injection; Hugging Face's loop can run the model"
            )
        self._embedding: Any = embedding
        self._head: Any = head
        self._scale = roles.embed_scale(config)
        self._positions: Any = None if roles.positions is None else part(roles.positions).weight
        self._offset = roles.position_offset
        before = [part.optional(path) for path in (roles.embed_norm, roles.project_in)]
        self._before = [module for module in before if module is not None]
        norm = part.optional(roles.norm)
        self._norm = None if norm is None else make_norm(norm, injected.policy, kernels)
        self._after = part.optional(roles.project_out)
        self._softcap, self._logit_scale = roles.logit_softcap(config), roles.logit_scale(config)
        self._tables = rope_tables(model, injected, max_positions)
        self.dtype, self.device = embedding.dtype, next(model.parameters()).device
        self._slopes = [alibi_slopes(layer, max_positions, self.device) for layer in injected.layers]
        sizes = [(layer.settings.num_kv_heads, layer.settings.head_dim) for layer in injected.layers]
        self.kv_heads = [(count, size, size) for count, size in sizes]
        self.gives_hidden = True
        self.ranks: Group = ALONE if injected.shard is None else injected.shard.ranks
        self.vocabulary = head.vocabulary if isinstance(head, Linear) else ALL
        self.hidden_size, self.vocab_size = injected.layers[0].qkv.in_features, width(head)
        self.capturable, self.reentrant = self.ranks.capturable, self.ranks.size == 1
        self.streaming: Streaming | None = None
        self.max_tokens = MICRO_TOKENS
        self.kernels = kernels

    def forward(self, batch: Batch, pages: Pages, rows: Tensor | None = None, given: Tensor | None = None) -> Tensor:
        x = self.blocks(self.embed(batch) if given is None else given, batch, pages, self._layers)
        return self.head(x, rows) if self.stage.is_last else x

    def hidden(self, batch: Batch, pages: Pages, given: Tensor | None = None) -> Tensor:
        x = self.blocks(self.embed(batch) if given is None else given, batch, pages, self._layers)
        if not self.stage.is_last:
            return x
        x = x if self._norm is None else self._norm(x)
        return x if self._after is None else self._after(x)

    def sketch(self) -> "PagedModel":
        """See `BatchModel`: the first layer of each kind."""
        layers = zip(self._layers, self._tables, self._slopes, strict=True)
        kinds: dict[Hashable, int] = {}
        for place, each in enumerate(layers):
            kinds.setdefault(_kind(*each), place)
        places, made = [*kinds.values()], copy(self)
        for name in ("_layers", "_tables", "_slopes", "kv_heads"):
            setattr(made, name, [getattr(self, name)[place] for place in places])
        return made

    def embed(self, batch: Batch) -> Tensor:
        """Input of the first layer [T, H]."""
        learned = {"positions": batch.positions, "position_table": self._positions, "position_offset": self._offset}
        if not self._before:
            return self._embedding.rows(batch.ids, scale=self._scale, **learned)
        x = self._embedding.rows(batch.ids, scale=self._scale)
        for module in self._before:
            x = module(x)
        return x if self._positions is None else x + F.embedding(batch.positions + self._offset, self._positions)

    def blocks(self, x: Tensor, batch: Batch, pages: Pages, layers: Iterable[FusedLayer]) -> Tensor:
        """All layers of this model, in order, over rows x [T, H], which may be overwritten.

        The place among these layers selects pages and tables, not the number in the whole model. Many rows go through
        one layer in micro-batches before the next layer, so that a streamed layer is loaded once.
        """
        slices = micro_batches(len(x)) if len(x) > MICRO_TOKENS else []
        parts, plans = [(rows, batch.part(rows), DecodePlans()) for rows in slices], DecodePlans()
        for place, layer in enumerate(layers):
            own = *pages.at_hand(place, batch.max_q), self._tables[place], self._slopes[place]
            attend = [(rows, _FusedAttention(part, some, *own)) for rows, part, some in parts]
            x = layer.run(x, attend or _FusedAttention(batch, plans, *own), reuse=True)
            pages.put_back(place, batch.max_q, batch.slots)
        return x

    def head(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logits of the last layer's output [T, H], or of some rows of it."""
        if rows is not None:
            x = x.index_select(0, rows)
        if self._after is not None:
            x = self._after(x if self._norm is None else self._norm(x))
        x = self._head(x, norm=self._norm if self._after is None else None)
        x = x if self._logit_scale == 1.0 else x * self._logit_scale
        return self._softcap * torch.tanh(x / self._softcap) if self._softcap else x


def _kind(layer: FusedLayer, table: Table, slopes: Tensor | None) -> Hashable:
    """Equal for layers that launch the same kernels."""
    parts = tuple(
        (name, type(part).__name__, tuple((each.shape, each.dtype) for each in part.parameters(recurse=False)))
        for name, part in layer.named_modules()
    )
    return layer.settings, parts, None if table[0] is None else table[0].shape[1], slopes is None


def check_paged(model: nn.Module, policy: Policy, config: Any, max_positions: int) -> ModelRoles:
    """Raise for a model that cannot run over pages with this many positions. Does not read weights."""
    roles = policy.model
    if roles is None:
        raise ModelError("injection: this family has no paged form")
    if reason := roles.refuses(config):
        raise NotSupported(f"pages: {type(model).__name__} {reason}; Hugging Face's own loop can run it")
    if roles.rotary is not None and policy.rotary_table is None:
        check_length(config, max_positions)
    return roles


@dataclass(frozen=True, slots=True)
class _FusedAttention:
    """Attention of a batch over the pages of one layer."""

    batch: Batch
    plans: DecodePlans
    keys: Tensor
    values: Tensor
    scales: Tensor | None
    table: Table
    slopes: Tensor | None

    @property
    def slots(self) -> Tensor:
        return self.batch.slots

    def __call__(self, layer: FusedLayer, qkv: Tensor) -> Tensor:
        batch, keys, values, settings = self.batch, self.keys, self.values, layer.settings
        cos, sin = self.table
        q, k, v = layer.kernels.rotary(
            _layer_normed(layer, qkv), cos, sin, batch.positions, batch.slots, keys, values,
            num_heads=settings.num_heads, num_kv_heads=settings.num_kv_heads, head_dim=settings.head_dim,
            rotary_dim=0 if cos is None else 2 * cos.shape[1], interleaved=layer.policy.interleaved,
            scales=self.scales, **_qk_norms(layer),
        )  # fmt: skip
        plain = not (settings.window or settings.softcap or settings.alibi or layer.sinks is not None)
        if batch.fresh and plain and self.scales is None:
            return causal_attention(q, k, v, settings.scale).flatten(1)
        attended: Tensor = layer.kernels.attention(
            q, keys, values, batch.block_table, batch.seq_lens, batch.cu_q, batch.max_q,
            scale=settings.scale, window=settings.window, softcap=settings.softcap,
            alibi_slopes=self.slopes, sinks=layer.sinks, scales=self.scales, max_len=batch.max_len, mixed=batch.mixed,
            plans=self.plans,
        )  # fmt: skip
        return attended.reshape(qkv.shape[0], -1)


def _layer_normed(layer: FusedLayer, qkv: Tensor) -> QKV:
    """q, k and v after layer norms, which the rotary kernel does not compute."""
    if layer.q_norm is None or layer.k_norm is None or layer.q_norm.kind == "rms" or layer.policy.qk_norm_over == "all":
        return qkv
    settings = layer.settings
    q, k, v = split_qkv(qkv, settings.num_heads, settings.num_kv_heads, settings.head_dim)
    return layer.q_norm(q), layer.k_norm(k), v


def _qk_norms(layer: FusedLayer) -> dict[str, Any]:
    q, k = layer.q_norm, layer.k_norm
    if q is None or k is None or q.kind == "layer" or layer.policy.qk_norm_over == "all":
        return {}
    return {
        "q_norm_weight": q.weight, "k_norm_weight": k.weight, "eps": q.eps,
        "weight_offset": q.offset, "round_before_weight": q.round_before_weight,
    }  # fmt: skip
