"""Sampling: each parameter against the distribution it stands for, computed here in another way."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from outpace import sampling
from outpace.sampling import Sampled, SamplingBatch, is_plain, logprobs_of, sample
from outpace.types import Request, SamplingParams

DRAWS = 20_000
VOCAB = 30
EOS = 7
GARBAGE = 10**6  # stands in the history behind a request's tokens; no token at all
CPU = torch.device("cpu")
DEFAULT = SamplingParams()
Words = tuple[tuple[int, ...], ...]

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@dataclasses.dataclass(frozen=True)
class Row:
    """A request, what it has said so far, and the model's word on what comes next."""

    logits: tuple[float, ...]
    params: SamplingParams = DEFAULT
    prompt: tuple[int, ...] = (1, 2, 3, 2)
    answer: tuple[int, ...] = ()
    words: Words = ()
    name: str = "r"

    def request(self) -> Request:
        return Request(request_id=self.name, prompt_token_ids=self.prompt, params=self.params, eos_token_ids=(EOS,))


def row_with(answer: tuple[int, ...] = (), words: Words = (), name: str = "r", **params: Any) -> Row:
    logits = tuple(np.random.default_rng(5).normal(0, 1.5, VOCAB).tolist())
    return Row(logits, SamplingParams(**params), answer=answer, words=words, name=name)


def sampled(
    rows: Sequence[Row], device: torch.device = CPU, dtype: torch.dtype = torch.float32, salt: int = 0
) -> tuple[Sampled, SamplingBatch]:
    """Samples once for each row."""
    tokens = [row.prompt + row.answer for row in rows]
    longest = max(map(len, tokens)) + 3
    history = torch.tensor([[*each, *[GARBAGE] * (longest - len(each))] for each in tokens], dtype=torch.int32)
    lengths = torch.tensor([len(each) for each in tokens])
    logits = torch.tensor([row.logits for row in rows]).to(device, dtype)
    words = [row.words for row in rows]
    batch = SamplingBatch.of([row.request() for row in rows], logits.shape[1], device, words, salt=salt)
    before = logits.clone()
    found = sample(logits, batch, history.to(device), lengths.to(device))
    assert torch.equal(logits, before), "the logits were changed"
    assert found.token_ids.dtype == torch.int64
    return found, batch


def tokens_of(rows: Sequence[Row], device: torch.device = CPU, salt: int = 0) -> list[int]:
    return sampled(rows, device, salt=salt)[0].token_ids.tolist()


def ends_with(answer: tuple[int, ...], prefix: tuple[int, ...]) -> bool:
    return len(answer) >= len(prefix) and answer[len(answer) - len(prefix) :] == prefix


def exact(row: Row) -> np.ndarray:
    """The probability of each token, one rule after the other, in fp64."""
    p, x = row.params, np.array(row.logits, dtype=np.float64)
    if p.allowed_token_ids is not None:
        x = np.array([v if token in p.allowed_token_ids else -math.inf for token, v in enumerate(x)])
    for word in row.words:
        if ends_with(row.answer, word[:-1]):
            x[word[-1]] = -math.inf
    if len(row.answer) < p.min_tokens:
        x[[token for token in (*p.stop_token_ids, *(() if p.ignore_eos else (EOS,))) if token < len(x)]] = -math.inf
    for token, bias in dict(p.logit_bias or ()).items():
        x[token] += bias
    for token in range(len(x)):
        if token in row.prompt + row.answer:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        count = row.answer.count(token)
        x[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    if p.temperature == 0:
        return np.eye(len(x))[int(x.argmax())]
    return filtered(np.exp((x - x.max()) / p.temperature), p)


def filtered(weights: np.ndarray, p: SamplingParams) -> np.ndarray:
    weights = np.where(weights >= p.min_p * weights.max(), weights, 0)
    order = np.argsort(-weights)
    if p.top_k:
        weights[order[p.top_k :]] = 0
    weights /= weights.sum()
    if p.top_p < 1:
        needed = int((np.cumsum(weights[order]) < p.top_p).sum()) + 1
        weights[order[needed:]] = 0
    return weights / weights.sum()


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """How likely it is to be this far from the distribution or farther: chi-square, rare tokens taken together."""
    expected = counts.sum() * probabilities
    rare = expected < 10
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] == 0:
        assert seen[-1] == 0
        seen, wanted = seen[:-1], wanted[:-1]
    if len(seen) == 1:
        return 1.0
    distance = ((seen - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2.0), torch.tensor(distance / 2.0)))


CASES: dict[str, Row] = {
    "plain": row_with(),
    "cold": row_with(temperature=0.5),
    "hot": row_with(temperature=2.5),
    "top_k": row_with(top_k=5),
    "top_k of all": row_with(top_k=10**6),
    "top_p": row_with(top_p=0.8),
    "a small top_p": row_with(top_p=0.05),
    "min_p": row_with(min_p=0.1),
    "top_k, then top_p of what is left": row_with(top_k=6, top_p=0.7),
    "min_p, then top_k": row_with(min_p=0.15, top_k=3, temperature=1.3),
    "min_p, then top_p of what is left": row_with(min_p=0.2, top_p=0.8),
    "all filters": row_with(temperature=1.5, min_p=0.02, top_k=12, top_p=0.85),
    "repetition of prompt and answer": row_with((5, 5, 11), repetition_penalty=1.8),
    "wanted repetition": row_with((5, 5, 11), repetition_penalty=0.6),
    "presence in the answer": row_with((5, 5, 11), presence_penalty=1.5),
    "frequency in the answer": row_with((5, 5, 11, 5), frequency_penalty=0.9),
    "wanted frequency": row_with((5, 5, 11, 5), frequency_penalty=-0.5),
    "all penalties": row_with((5, 2), repetition_penalty=1.3, presence_penalty=-1.0, frequency_penalty=0.7, top_p=0.9),
    "logit_bias": row_with(logit_bias={3: 2.5, 9: -100, 0: 1}),
    "allowed_token_ids": row_with(allowed_token_ids=[4, 9, 9, 20, 29]),
    "a bad word of one token": row_with(words=((3,), (12,))),
    "a bad word that begins": row_with((8, 6, 4), words=((6, 4, 9), (4, 10), (6, 11), (1, 2, 3, 2, 8, 6, 4, 5))),
    "a bad word that begins in the prompt": row_with((), words=((3, 2, 9),)),
    "bad words longer than the answer": row_with((4,), words=((4, 4, 4, 9), (4, 21))),
    "ends before min_tokens": row_with((4,), min_tokens=2, stop_token_ids=[3, 10**6], temperature=2.0),
    "ends at min_tokens": row_with((4, 5), min_tokens=2, stop_token_ids=[3]),
    "ends before min_tokens without eos": row_with((4,), min_tokens=2, stop_token_ids=[3], ignore_eos=True),
    "everything": row_with(
        (8, 6, 8),
        words=((6, 8, 9), (10,)),
        min_tokens=9,
        logit_bias={11: 3, 9: 5},
        allowed_token_ids=list(range(4, 25)),
        presence_penalty=0.5,
        repetition_penalty=1.2,
        top_k=9,
        temperature=1.7,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_draws_have_the_exact_distribution(case: str, device: torch.device) -> None:
    row = CASES[case]
    drawn = tokens_of([dataclasses.replace(row, name=str(number)) for number in range(DRAWS)], device, salt=len(case))
    counts, probabilities = np.bincount(drawn, minlength=VOCAB), exact(row)
    assert not counts[probabilities == 0].any(), "a token that cannot be drawn"
    assert p_value(counts, probabilities) > 1e-4


def test_the_test_itself_sees_a_wrong_distribution() -> None:
    drawn = tokens_of([row_with(name=str(number), temperature=1.1) for number in range(DRAWS)])
    assert p_value(np.bincount(drawn, minlength=VOCAB), exact(row_with())) < 1e-4


@pytest.mark.parametrize("vary", ["seed", "number of tokens"])
def test_draws_over_seeds_and_over_steps(vary: str, device: torch.device) -> None:
    """The rows differ in nothing but their seed, or how many tokens they have."""
    if vary == "seed":
        rows = [row_with(seed=seed) for seed in range(5000)]
    else:
        rows = [row_with((4,) * count, seed=3) for count in range(1500)]
    drawn = tokens_of(rows, device)
    assert p_value(np.bincount(drawn, minlength=VOCAB), exact(row_with())) > 1e-4
    follow = np.array([exact(row_with())[token] for token in drawn])
    shuffled = np.corrcoef(follow[1:], follow[:-1])[0, 1]
    assert abs(shuffled) < 4 / math.sqrt(len(drawn)), "one draw tells of the next"


def test_a_row_draws_the_same_alone_and_among_others(device: torch.device) -> None:
    rows = [dataclasses.replace(row, name=name) for name, row in CASES.items()]
    rows += [row_with(seed=number, temperature=number % 3, top_k=number % 4) for number in range(20)]
    together = tokens_of(rows, device)
    assert together == [tokens_of([row], device)[0] for row in rows]
    assert tokens_of(rows[::-1], device) == together[::-1]


def test_seeds() -> None:
    def said(salt: int = 0, name: str = "r", **params: Any) -> list[int]:
        """A request's draws over 30 steps, whatever was drawn."""
        return tokens_of(
            [row_with((4,) * count, name=name, temperature=3.0, **params) for count in range(30)], salt=salt
        )

    assert said(seed=1) == said(seed=1, name="another", salt=5)
    assert len({tuple(said(seed=seed)) for seed in (0, 1, -1, 2**64 - 1, -(2**63))}) == 5
    assert said(salt=1) == said(salt=1)
    assert said(salt=1) != said(salt=2) != said(salt=2, name="another")


def test_fp16_and_bf16_logits_are_their_numbers(device: torch.device) -> None:
    rows = [dataclasses.replace(row, name=str(number)) for row in CASES.values() for number in range(5)]
    for dtype in (torch.float16, torch.bfloat16):
        rounded = [dataclasses.replace(row, logits=tuple(torch.tensor(row.logits).to(dtype).tolist())) for row in rows]
        assert sampled(rounded, device, dtype)[0].token_ids.tolist() == tokens_of(rounded, device)


@pytest.mark.parametrize(
    ("params", "words", "greedy"),
    [
        ({"temperature": 0}, (), True),
        ({"top_k": 1}, (), True),
        ({"temperature": 0, "min_tokens": 2, "ignore_eos": True, "top_p": 0.5, "min_p": 0.5}, (), True),
        ({"temperature": 0, "prompt_logprobs": 3, "seed": 4}, (), True),
        ({}, (), False),
        ({"temperature": 0, "min_tokens": 2}, (), False),
        ({"temperature": 0, "logprobs": 0}, (), False),
        ({"temperature": 0, "repetition_penalty": 1.1}, (), False),
        ({"temperature": 0, "presence_penalty": 0.1}, (), False),
        ({"temperature": 0, "frequency_penalty": 0.1}, (), False),
        ({"temperature": 0, "logit_bias": {1: 1.0}}, (), False),
        ({"temperature": 0, "allowed_token_ids": [1]}, (), False),
        ({"temperature": 0}, ((1,),), False),
        ({"temperature": 0}, ((1, 2),), False),
    ],
)
def test_plain_says_that_argmax_is_all(params: dict[str, Any], words: Words, greedy: bool) -> None:
    rows = [row_with(temperature=0), row_with(words=words, **params)]
    found, batch = sampled(rows)
    plain = [is_plain(dataclasses.replace(row.request(), bad_words=row.words)) for row in rows]
    assert plain == [True, greedy]
    if greedy:
        assert found.token_ids.tolist() == [int(np.argmax(row.logits)) for row in rows]
    assert not greedy or not batch.logprobs


def test_no_requests() -> None:
    batch = SamplingBatch.of([], VOCAB, CPU)
    nothing = torch.zeros(0, 5, dtype=torch.int32)
    assert sample(torch.zeros(0, VOCAB), batch, nothing, nothing[:, 0].long()).token_ids.shape == (0,)


def test_penalties_without_sampling_change_the_highest() -> None:
    logits = (1.0, 1.2, 0.9, 1.1, *[0.0] * 26)
    assert tokens_of([Row(logits, SamplingParams(temperature=0, repetition_penalty=1.2))]) == [0]  # prompt: 1, 2, 3
    assert tokens_of([Row(logits, SamplingParams(temperature=0, presence_penalty=0.15), answer=(1,))]) == [3]
    assert tokens_of([Row(logits, SamplingParams(temperature=0, presence_penalty=0.15))]) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_token_is_allowed_or_there(temperature: float, device: torch.device) -> None:
    assert tokens_of([row_with(temperature=temperature, allowed_token_ids=[13], top_p=0.3)] * 3, device) == [13] * 3
    lone = Row((0.3,), SamplingParams(temperature=temperature, logprobs=5), prompt=(0,))
    found, _ = sampled([lone, lone], device)
    assert found.token_ids.tolist() == [0, 0]
    ((rows, details),) = found.logprobs
    assert rows.places == (0, 1)
    assert details.token_logprobs.tolist() == [0.0, 0.0]
    assert details.top_ids.tolist() == [[0], [0]]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 100.0])
def test_where_all_is_banned_a_banned_token_that_is_allowed(temperature: float, device: torch.device) -> None:
    row = row_with(
        words=((EOS,), (20,)),
        min_tokens=3,
        allowed_token_ids=[EOS, 20, 21],
        stop_token_ids=[21],
        temperature=temperature,
        repetition_penalty=1000,
    )
    impossible = dataclasses.replace(row, logits=(-math.inf,) * VOCAB)
    assert set(tokens_of([row, impossible] * 20, device)) <= {EOS, 20, 21}
    never = row_with(words=tuple((token,) for token in range(VOCAB)), temperature=temperature)
    assert 0 <= tokens_of([never], device)[0] < VOCAB


@pytest.mark.parametrize(("rows", "chunk"), [(5, 2**28), (5, 2 * 4 * VOCAB * 2), (5, 1), (0, 2**28)])
def test_logprobs_are_of_the_raw_logits(
    rows: int, chunk: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_CHUNK_BYTES", chunk)
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    ids = torch.randint(0, VOCAB, (rows,), generator=torch.Generator().manual_seed(2)).to(device)
    found = logprobs_of(logits, ids, 4)
    want = logits.double().log_softmax(dim=1)
    own = want.gather(1, ids[:, None])
    assert found.token_logprobs.dtype == found.top_logprobs.dtype == torch.float32
    torch.testing.assert_close(found.token_logprobs, own[:, 0].float())
    torch.testing.assert_close(found.top_logprobs, want.topk(4, dim=1).values.float())
    torch.testing.assert_close(want.gather(1, found.top_ids).float(), found.top_logprobs)
    assert found.token_ranks.tolist() == [1 + sum(v > own[r, 0] for v in want[r]) for r in range(rows)]


def test_logprobs_of_a_batch(device: torch.device) -> None:
    rows = [
        row_with(temperature=0),
        row_with(logprobs=0, temperature=4.0, seed=2),
        row_with(logprobs=3, allowed_token_ids=[11], repetition_penalty=3.0),
    ]
    found, _ = sampled(rows, device)
    ((wanted, details),) = found.logprobs
    assert (wanted.places, wanted.num) == ((1, 2), 3)
    assert details.top_ids.shape == details.top_logprobs.shape == (2, 3)
    raw = torch.tensor(rows[0].logits, dtype=torch.float64).log_softmax(0)
    tokens = found.token_ids.tolist()
    assert tokens[2] == 11
    torch.testing.assert_close(details.token_logprobs.cpu().double(), raw[tokens[1:]], rtol=1e-5, atol=1e-5)
    assert details.token_ranks.tolist() == [int((raw > raw[token]).sum()) + 1 for token in tokens[1:]]
    assert sampled(rows[:1], device)[0].logprobs == ()


def test_item_24_who_wants_all_logprobs_costs_the_others_nothing(device: torch.device) -> None:
    rows = [
        row_with(logprobs=2),
        row_with(logprobs=-1),
        row_with(logprob_token_ids=[5, 1]),
        row_with(logprobs=1),
        row_with(logprob_token_ids=[7]),
    ]
    few, everything, named = sampled(rows, device)[0].logprobs
    raw = torch.tensor(rows[0].logits, dtype=torch.float64).log_softmax(0)
    assert [wanted.places for wanted, _ in (few, everything, named)] == [(0, 3), (1,), (2, 4)]
    assert few[1].top_ids.shape == (2, 2)
    torch.testing.assert_close(everything[1].top_logprobs[0].cpu().double(), raw.sort(descending=True).values)
    assert named[1].top_ids.tolist() == [[5, 1], [7, 7]]
    assert named[1].top_ranks is not None
    for found, ranks, ids in zip(named[1].top_logprobs, named[1].top_ranks.tolist(), ([5, 1], [7, 7]), strict=True):
        torch.testing.assert_close(found.cpu().double(), raw[ids], rtol=1e-5, atol=1e-5)
        assert ranks == [int((raw > raw[token]).sum()) + 1 for token in ids]


def test_bad_words_that_the_model_does_not_have_do_nothing() -> None:
    assert tokens_of([row_with(words=((99,), (1, 99), (99, 1)), temperature=0)]) == tokens_of([row_with(temperature=0)])


class Waits(TorchDispatchMode):
    """Fails where the host would have to wait for a device, and counts the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim"}, name
        self.count += not any(name == view for view in ("view", "slice", "select", "unsqueeze", "squeeze", "alias"))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_nothing(case: str) -> None:
    row = dataclasses.replace(CASES[case], params=dataclasses.replace(CASES[case].params, logprobs=2))
    batch = SamplingBatch.of([row.request()], VOCAB, CPU, [row.words])
    history = torch.tensor([row.prompt + row.answer], dtype=torch.int32)
    with Waits() as ran:
        sample(torch.tensor([row.logits]), batch, history, torch.tensor([history.shape[1]]))
    assert ran.count > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_not_waited_for() -> None:
    device = torch.device("cuda")
    rows = [dataclasses.replace(row, name=name) for name, row in CASES.items()]
    sampled(rows, device)  # compiles
    tokens = [row.prompt + row.answer + (0,) * (20 - len(row.prompt + row.answer)) for row in rows]
    history = torch.tensor(tokens, dtype=torch.int32, device=device)
    lengths = torch.tensor([len(row.prompt + row.answer) for row in rows], device=device)
    logits = torch.tensor([row.logits for row in rows], device=device)
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        batch = SamplingBatch.of([row.request() for row in rows], VOCAB, device, [row.words for row in rows])
        sample(logits, batch, history, lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")


ids = st.integers(0, VOCAB - 1)
any_params: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-5, 0.7, 1.0, 100.0]),
        "top_k": st.integers(0, VOCAB + 2),
        "top_p": st.floats(1e-9, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": st.sampled_from([1e-3, 0.5, 1.0, 1.5, 1e3]),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=5),
        "allowed_token_ids": st.none() | st.lists(ids, min_size=1, max_size=6),
        "min_tokens": st.integers(0, 5),
        "stop_token_ids": st.lists(ids, max_size=3),
        "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
        "logprobs": st.none() | st.integers(-1, 30),
    }
)


@st.composite
def any_row(draw: st.DrawFn) -> Row:
    few = st.lists(ids, max_size=6).map(tuple)
    return Row(
        logits=tuple(draw(st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB))),
        params=SamplingParams(**draw(any_params)),
        prompt=draw(st.lists(ids, min_size=1, max_size=6).map(tuple)),
        answer=draw(few),
        words=draw(st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)),
        name=draw(st.text(max_size=3)),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(any_row(), min_size=1, max_size=5))
def test_only_tokens_that_may_be_drawn_whatever_the_batch(rows: list[Row]) -> None:
    together = tokens_of(rows)
    for row, token in zip(rows, together, strict=True):
        assert tokens_of([row]) == [token]
        possible = set(row.params.allowed_token_ids or range(VOCAB))
        banned = {word[-1] for word in row.words if ends_with(row.answer, word[:-1])}
        if len(row.answer) < row.params.min_tokens:
            banned |= {*row.params.stop_token_ids, EOS}
        assert token in ((possible - banned) or possible)
