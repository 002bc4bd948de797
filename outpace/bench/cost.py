"""What a piece of work costs a model at the least: weights and cache to read, products to compute."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from outpace.bench.limits import Speed
from outpace.bench.workload import Item
from outpace.inject.interface import InterfaceModel
from outpace.inject.modules import FusedLayer
from outpace.kernels.dispatch import choose_kernels
from outpace.loading.inspect import describe


class Attention(NamedTuple):
    """The attention of one layer, per token that is looked at."""

    kv_bytes: int
    """A key and a value of every kv head."""
    flops: int
    """Of one query, for scores and values."""
    window: int
    """Tokens that a query sees; 0: all."""


@dataclass(frozen=True)
class Cost:
    """The numbers of a model."""

    weight_bytes: int
    """Read by every step: all weights but the embedding table, of which a step reads a few rows."""
    token_flops: int
    """Of one token in all layers, attention left out."""
    head_flops: int
    """Of one choice of a token."""
    attention: tuple[tuple[Attention, int], ...]
    """Each kind of attention, and how many layers have it."""

    def kv_bytes(self, begin: int, end: int) -> int:
        """Read by decodes that see begin, begin + 1, .. end - 1 tokens."""
        return sum(count * kind.kv_bytes * _seen(begin, end, kind.window) for kind, count in self.attention)

    def prompt_flops(self, length: int) -> int:
        """Of a prompt up to its first new token."""
        pairs = sum(count * kind.flops * _seen(1, length + 1, kind.window) for kind, count in self.attention)
        return length * self.token_flops + pairs + self.head_flops

    def work_seconds(self, items: Sequence[Item], max_num_seqs: int, speed: Speed) -> float:
        """The limit of a batch of requests: max(products, weights read in every step) + cache read by decodes.

        There are at least as many steps as the longest output has tokens.
        """
        outputs = [item.output_len for item in items]
        flops = sum(self.prompt_flops(len(item.prompt)) for item in items)
        flops += (sum(outputs) - len(items)) * (self.token_flops + self.head_flops)
        steps = max(*outputs, -(-sum(outputs) // max_num_seqs), 1)
        reads = sum(self.kv_bytes(len(item.prompt) + 1, len(item.prompt) + item.output_len) for item in items)
        return max(flops / speed.flops, steps * self.weight_bytes / speed.bandwidth) + reads / speed.bandwidth

    def decode_seconds(self, batch: int, context: float, speed: Speed) -> float:
        """The limit of one step of `batch` sequences, each of which sees so many tokens."""
        flops = batch * (self.token_flops + self.head_flops)
        reads = batch * self.kv_bytes(round(context), round(context) + 1)
        return max(flops / speed.flops, self.weight_bytes / speed.bandwidth) + reads / speed.bandwidth

    def prompt_seconds(self, batch: int, length: int, speed: Speed) -> float:
        """The limit of the first token of prompts that come together."""
        return max(batch * self.prompt_flops(length) / speed.flops, self.weight_bytes / speed.bandwidth)


def cost_of(module: nn.Module) -> Cost | None:
    """The numbers of a model that has been started; None for experts, of which a token reads a few."""
    if describe(module).num_experts:
        return None
    model: Any = module
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = embedding.data_ptr() == head.data_ptr()
    total = {parameter.data_ptr(): parameter for parameter in module.parameters()}.values()
    unread = 0 if tied else embedding.nbytes
    weights = sum(weight.numel() for weight in total) - head.numel() - (0 if tied else embedding.numel())
    return Cost(
        weight_bytes=sum(weight.nbytes for weight in total) - unread,
        token_flops=2 * weights,
        head_flops=2 * head.numel(),
        attention=tuple(Counter(_attention(module)).items()),
    )


def _attention(module: nn.Module) -> list[Attention]:
    fused = [each.settings for each in module.modules() if isinstance(each, FusedLayer)]
    first = next(module.parameters())
    if fused:
        size = first.dtype.itemsize
        return [
            Attention(2 * s.num_kv_heads * s.head_dim * size, 4 * s.num_heads * s.head_dim, s.window) for s in fused
        ]
    paged, config = InterfaceModel(module, choose_kernels(first.device)), _config(module)
    heads, size = config.num_attention_heads, paged.dtype.itemsize
    return [
        Attention(count * (key + value) * size, 2 * heads * (key + value), 0) for count, key, value in paged.kv_heads
    ]


def _config(module: Any) -> Any:
    return module.config


def _seen(begin: int, end: int, window: int) -> int:
    """begin + (begin + 1) + .. + (end - 1), where none counts for more than the window."""
    if end <= begin:
        return 0
    if not window or end - 1 <= window:
        return (begin + end - 1) * (end - begin) // 2
    if begin >= window:
        return window * (end - begin)
    return _seen(begin, window, 0) + window * (end - window)
