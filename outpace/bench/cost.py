"""The minimal cost of work on a model: bytes of weights and cache to read, and operations to compute."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from outpace.bench.workload import Item
from outpace.cache.kv_cache import block_bytes, page_dtype
from outpace.inject.experts import MixtureOfExperts
from outpace.inject.interface import InterfaceModel
from outpace.inject.modules import FusedLayer, Made
from outpace.kernels.dispatch import choose_kernels
from outpace.kernels.limits import Speed
from outpace.loading.inspect import describe


class Attention(NamedTuple):
    """The attention of one layer, per token of context."""

    kv_bytes: int
    """Bytes of a key and a value for every key head."""
    flops: int
    """Operations of one query: scores and values."""
    window: int
    """Tokens that a query attends to; 0: all."""


Touches = Sequence[tuple[float, float]]
"""Tokens of a step, and how many experts of a layer they used."""


class Experts(NamedTuple):
    """The experts of one layer."""

    total: int
    top_k: int
    """Experts that a token uses."""
    weight_bytes: int
    """Bytes of one expert."""
    counted: tuple[tuple[float, float], ...] = ()
    """Tokens and the experts that they used, both ascending; empty: all experts are equally likely."""

    def touched(self, tokens: float) -> float:
        """Number of experts that this many tokens use: counted (with linear interpolation), or else expected."""
        if not self.counted:
            return self.total * (1 - (1 - self.top_k / self.total) ** tokens)
        numbers, touched = zip((0.0, 0.0), (1.0, float(self.top_k)), *self.counted, strict=True)
        return float(np.interp(tokens, numbers, touched))

    def with_counts(self, touches: Touches) -> "Experts":
        """The same experts with mean counts; more tokens never use fewer experts."""
        found: dict[float, list[float]] = {}
        for tokens, touched in touches:
            if tokens > 1:
                found.setdefault(tokens, []).append(min(max(touched, self.top_k), self.total))
        numbers = sorted(found)
        means = accumulate((sum(found[number]) / len(found[number]) for number in numbers), max)
        return self._replace(counted=tuple(zip(numbers, means, strict=True)))


@dataclass(frozen=True)
class Cost:
    """Bytes and operations of a model."""

    weight_bytes: int
    """Bytes that every step reads: all weights except experts and the embedding table (a step reads few rows of it)."""
    token_flops: int
    """Operations of a token in all layers, with its experts, without attention."""
    head_flops: int
    """Operations to choose one token."""
    attention: tuple[tuple[Attention, int], ...]
    """Each kind of attention, and the number of layers that have it."""
    experts: tuple[tuple[Experts, int], ...] = ()
    """Each kind of experts, and the number of layers that have it."""

    def with_counts(self, touches: Touches) -> "Cost":
        """The same model, with experts used as they were counted (the mean of its layers)."""
        return replace(self, experts=tuple((kind.with_counts(touches), count) for kind, count in self.experts))

    def step_bytes(self, tokens: float) -> float:
        """Bytes of weights that a step of this many tokens reads."""
        touched = (count * kind.weight_bytes * kind.touched(tokens) for kind, count in self.experts)
        return self.weight_bytes + sum(touched)

    def touched(self, tokens: float) -> float | None:
        """Experts of a layer that this many tokens use, the mean of all layers with experts; None: there are none."""
        layers = sum(count for _, count in self.experts)
        return sum(count * kind.touched(tokens) for kind, count in self.experts) / layers if layers else None

    def kv_bytes(self, begin: int, end: int) -> int:
        """Bytes that decodes with contexts of begin, begin + 1, .. end - 1 tokens read."""
        return sum(count * kind.kv_bytes * _seen(begin, end, kind.window) for kind, count in self.attention)

    def prompt_flops(self, length: int) -> int:
        """Operations to prefill a prompt and choose its first new token."""
        pairs = sum(count * kind.flops * _seen(1, length + 1, kind.window) for kind, count in self.attention)
        return length * self.token_flops + pairs + self.head_flops

    def work_seconds(self, items: Sequence[Item], max_num_seqs: int, speed: Speed) -> float:
        """The limit of a batch of requests: max(products, weights read in every step) + cache read by decodes.

        There are at least as many steps as the longest output has tokens. The first step prefills all prompts.
        """
        outputs = [item.output_len for item in items]
        flops = sum(self.prompt_flops(len(item.prompt)) for item in items)
        flops += (sum(outputs) - len(items)) * (self.token_flops + self.head_flops)
        _, *decodes = ideal_steps(outputs, max_num_seqs)
        weights = self.step_bytes(sum(len(item.prompt) for item in items)) + sum(map(self.step_bytes, decodes))
        reads = sum(self.kv_bytes(len(item.prompt) + 1, len(item.prompt) + item.output_len) for item in items)
        return max(flops / speed.flops, weights / speed.bandwidth) + reads / speed.bandwidth

    def decode_seconds(self, batch: int, context: float, speed: Speed) -> float:
        """The limit of one decode step of `batch` sequences with this much context each."""
        flops = batch * (self.token_flops + self.head_flops)
        reads = batch * self.kv_bytes(round(context), round(context) + 1)
        return max(flops / speed.flops, self.step_bytes(batch) / speed.bandwidth) + reads / speed.bandwidth

    def prompt_seconds(self, batch: int, length: int, speed: Speed) -> float:
        """The limit of the first token of prompts that arrive together."""
        weights = self.step_bytes(batch * length) / speed.bandwidth
        return max(batch * self.prompt_flops(length) / speed.flops, weights)


def ideal_steps(outputs: Sequence[int], max_num_seqs: int) -> list[int]:
    """New tokens of each step, in the fewest steps: all requests begin at once and wait only for slots."""
    count = max(*outputs, -(-sum(outputs) // max_num_seqs), 1)
    wanted = [0] * count
    for length in outputs:
        wanted[length - 1] += 1
    live = list(accumulate(reversed(wanted)))[::-1]  # requests that have not ended
    steps = [min(number, max_num_seqs) for number in live]
    waiting = sum(live) - sum(steps)
    for number, tokens in enumerate(steps):
        more = min(waiting, max_num_seqs - tokens)
        steps[number], waiting = tokens + more, waiting - more
    return steps


def cost_of(module: nn.Module, kv_cache_dtype: str = "auto") -> Cost | None:
    """The cost of a started model; None: its config does not say how many experts a token uses."""
    model: Any = module
    stacks = _stacks(module)
    if stacks is None:
        return None
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = embedding.data_ptr() == head.data_ptr()
    stacked = {weight.data_ptr() for stack in stacks for weight in stack.weights}
    total = {weight.data_ptr(): weight for weight in module.parameters() if weight.data_ptr() not in stacked}.values()
    unread = 0 if tied else embedding.nbytes
    packed = _packed(module)

    def numbers(weight: nn.Parameter) -> int:
        return packed.get(weight.data_ptr(), weight.numel())

    weights = sum(map(numbers, total)) - numbers(head) - (0 if tied else embedding.numel())
    active = sum(stack.top_k * numbers(weight) // len(weight) for stack in stacks for weight in stack.weights)
    kinds = Counter(
        Experts(stack.total, stack.top_k, sum(weight[0].nbytes for weight in stack.weights)) for stack in stacks
    )
    return Cost(
        weight_bytes=sum(weight.nbytes for weight in total) - unread,
        token_flops=2 * (weights + active),
        head_flops=2 * numbers(head),
        attention=tuple(Counter(_attention(module, kv_cache_dtype)).items()),
        experts=tuple(kinds.items()),
    )


def _packed(module: nn.Module) -> dict[int, int]:
    """Number of weights in each quantized tensor, by address: two of 4 bits share a byte, and scales are no weights."""
    made = [each for each in module.modules() if isinstance(each, Made)]
    return {
        each.get_parameter(name + end).data_ptr(): 0 if end else math.prod(recipe.shape)
        for each in made
        for name, recipe in each.recipes.items()
        if recipe.scheme is not None
        for end in recipe.scheme.tensors(recipe.shape)
    }


class _Stack(NamedTuple):
    """Weights of the experts of one layer; the first dimension of each is the expert."""

    weights: list[nn.Parameter]
    total: int
    top_k: int


def _stacks(module: nn.Module) -> list[_Stack] | None:
    """Fused experts, or the model's own; None: its config does not say how many of them a token uses."""
    fused = [each for each in module.modules() if isinstance(each, MixtureOfExperts)]
    if fused:
        numbers = ((each.experts.num_experts, each.router.routing.top_k) for each in fused)
        return [_Stack(list(each.experts.parameters()), *pair) for each, pair in zip(fused, numbers, strict=True)]
    info, found = describe(module), []
    if info.num_experts and not info.experts_per_token:
        return None
    for each in module.modules():
        own = [weight for weight in each.parameters(recurse=False) if weight.dim() > 1]
        own = [weight for weight in own if len(weight) == info.num_experts]
        if any(weight.dim() == 3 for weight in own):
            found.append(_Stack(own, info.num_experts, info.experts_per_token))
    return found


def _attention(module: Any, kv_cache_dtype: str) -> list[Attention]:
    fused = [each.settings for each in module.modules() if isinstance(each, FusedLayer)]
    first = next(module.parameters())

    def token_bytes(heads: tuple[int, int, int], dtype: torch.dtype) -> int:
        return block_bytes([heads], page_dtype(kv_cache_dtype, dtype), block_size=1)

    if fused:
        sizes = [token_bytes((s.num_kv_heads, s.head_dim, s.head_dim), first.dtype) for s in fused]
        return [Attention(size, 4 * s.num_heads * s.head_dim, s.window) for size, s in zip(sizes, fused, strict=True)]
    paged, config = InterfaceModel(module, choose_kernels(first.device)), module.config
    return [
        Attention(token_bytes(each, paged.dtype), 2 * config.num_attention_heads * (each[1] + each[2]), 0)
        for each in paged.kv_heads
    ]


def _seen(begin: int, end: int, window: int) -> int:
    """begin + (begin + 1) + .. + (end - 1), with each term at most the window."""
    if end <= begin:
        return 0
    full = min(max(begin, window), end) if window else end  # from here on the window is full
    return (begin + full - 1) * (full - begin) // 2 + window * (end - full)
