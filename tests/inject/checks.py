"""Whether an injected model is still the model it was: logits, hidden states and tokens against plain Hugging Face."""

import copy
import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from outpace.cache.kv_cache import allocate
from outpace.inject.apply import Injected, inject
from outpace.inject.paged import Batch, PagedModel
from outpace.inject.plan import make_plan
from outpace.inject.policies import by_class
from outpace.kernels.dispatch import choose_kernels
from outpace.loading.fill import settle
from outpace.loading.targets import Before
from outpace.runner.decode import PagedDecoder

CPU = torch.device("cpu")
NEW_TOKENS = 24
LONG = 56
"""Tokens of a prompt that, with `NEW_TOKENS` behind it, does not fit in one page."""


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights large enough that every part matters: the usual 0.02 lets a wrong one pass unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * 0.3 if parameter.dim() > 1 else parameter.data + noise * 0.1
    return model.eval()


def injected_copy(model: nn.Module) -> tuple[nn.Module, Injected]:
    """A copy of the model with fused layers."""
    fused = copy.deepcopy(model)
    plan = make_plan(fused, by_class())
    assert plan.layers, f"no policy for {type(model).__name__}"
    before = Before.of(fused, next(model.parameters()).dtype)
    injected = inject(fused, plan, choose_kernels(CPU))
    settle(fused, before)
    return fused, injected


class Pair(NamedTuple):
    """A model as it is, and a copy of it with fused layers."""

    model: Any
    fused: Any
    injected: Injected
    tolerance: float


def pair_of(model: nn.Module, tolerance: float = 1e-4) -> Pair:
    return Pair(model, *injected_copy(model), tolerance)


def padded_prompts(vocab: int, batch: int = 3, length: int = 12, seed: int = 1) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    ids = torch.randint(3, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 3 * row - 1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def same_forward(pair: Pair, inputs: dict[str, Any]) -> None:
    """Every hidden state and the logits agree wherever a token stands."""
    with torch.no_grad():
        expected, found = (item(**inputs, output_hidden_states=True) for item in (pair.model, pair.fused))
    real = inputs["attention_mask"].bool()
    assert len(found.hidden_states) == len(expected.hidden_states)
    states = [*zip(expected.hidden_states, found.hidden_states, strict=True)]
    if "logits" in expected:
        states.append((expected.logits, found.logits))
    for index, (want, got) in enumerate(states):
        rows = real if want.shape[:2] == real.shape else torch.ones(want.shape[:1], dtype=torch.bool)
        worst = (want[rows] - got[rows]).abs().max().item()
        assert worst <= pair.tolerance * max(1.0, want[rows].abs().max().item()), (index, worst)


def same_tokens(pair: Pair, inputs: dict[str, torch.Tensor], new_tokens: int = NEW_TOKENS) -> None:
    """Greedy tokens agree: through Hugging Face's loop with its cache, and through pages."""
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    expected = pair.model.generate(**inputs, **options)
    assert torch.equal(pair.fused.generate(**inputs, **options), expected)
    most = inputs["input_ids"].shape[1] + new_tokens
    decoder = PagedDecoder(PagedModel(pair.fused, pair.injected, most), most, graphs=False)
    paged = pair.fused.generate(**inputs, **options, custom_generate=functools.partial(decoder, streamer=None))
    assert torch.equal(paged, expected)


def same_paged_logits(pair: Pair, vocab: int, length: int = 12) -> None:
    """Logits after every token of a prompt agree through pages: greedy tokens do not see what keeps the order."""
    paged = PagedModel(pair.fused, pair.injected, length)
    ids = torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(2))
    places = torch.arange(length)
    ends, table = torch.tensor([0, length], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    batch = Batch(ids[0], places, places, table, ends[1:], ends, max_q=length, max_len=length)
    with torch.no_grad():
        expected = pair.model(input_ids=ids).logits[0]
        found = paged.forward(batch, allocate(paged.kv_heads, 1, paged.dtype, CPU))
    worst = (expected - found).abs().max().item()
    assert worst <= pair.tolerance * max(1.0, expected.abs().max().item()), worst
