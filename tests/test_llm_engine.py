"""The engine driven by hand: requests added, stepped and aborted, and what is left when something goes wrong."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import LLM, ConfigError, FinishReason, InputError, RequestOutput, SamplingParams, StateError
from outpace.errors import Overloaded
from outpace.inject.paged import PagedModel
from outpace.llm_engine import LLMEngine
from outpace.runner.runner import Runner
from outpace.scheduler import Scheduler
from outpace.types import Step, StepOutput, TokenLogprobs
from tests.exactness import hugging_face, watched
from tests.models import VOCAB, byte_tokenizer, chain_model, prompts, tiny
from tests.patience import PATIENCE

BLOCK = 16
POSITIONS = 512
AHEAD = pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in-turn"])


def make(**options: Any) -> LLM:
    """An LLM of a tiny Llama with room for 512 tokens."""
    model = tiny("llama", max_position_embeddings=POSITIONS)
    return LLM(model, **{"device": "cpu", "block_size": BLOCK, "num_blocks": 100, "max_num_seqs": 16, **options})


def greedy(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **changes)


def sampled(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 2.0, "max_tokens": max_tokens, "seed": 7, **changes})


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in prompts(length, seed=seed)[0]]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [each.token_ids for each in output.outputs]


def finish(engine: LLMEngine) -> None:
    """Step until nothing is left to do."""
    while engine.has_unfinished_requests:
        engine.step()


def assert_nothing_is_held(engine: LLMEngine) -> None:
    finish(engine)
    scheduler = engine.scheduler
    scheduler.assert_consistent()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert scheduler.tiers.host.num_free == scheduler.tiers.host.num_blocks
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def blocks_held(engine: LLMEngine) -> int:
    return engine.scheduler.pool.num_blocks - engine.scheduler.pool.num_free


@pytest.fixture(scope="module")
def plain() -> Any:
    """What Hugging Face makes of the same weights."""
    return tiny("llama", max_position_embeddings=POSITIONS)


@pytest.fixture(scope="module")
def shared() -> LLM:
    """For tests that leave nothing behind."""
    return make()


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert_nothing_is_held(shared.engine)


# steps


def test_an_engine_without_requests_has_nothing_to_do(llm: LLM) -> None:
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.step() == []
    assert not llm.engine.has_unfinished_requests


@AHEAD
def test_a_step_gives_the_outputs_that_changed(ahead: bool, plain: Any) -> None:
    engine = make(async_scheduling=ahead, max_num_batched_tokens=16).engine
    first, second = engine.add_request("a", prompt(3), greedy(6)), engine.add_request("b", prompt(40), greedy(2))
    grown: dict[str, list[int]] = {"a": [], "b": []}
    while engine.has_unfinished_requests:
        for output in engine.step():
            grown[output.request_id].append(output.num_tokens)
    assert grown == {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2]}, "a step passed over a request or named it without need"
    assert tokens_of(first) == [hugging_face(plain, prompt(3), 6)]
    assert tokens_of(second) == [hugging_face(plain, prompt(40), 2)]


def test_the_facts_of_an_output(llm: LLM) -> None:
    output = llm.engine.add_request("a", (5, 6, 7), greedy(3), prompt="as text")
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("a", "as text", [5, 6, 7])
    assert (output.finished, output.metrics.first_token_time, output.prompt_logprobs) == (False, None, None)
    finish(llm.engine)
    metrics = output.metrics
    assert output.finished
    assert metrics.first_token_time is not None
    assert metrics.last_token_time is not None
    assert metrics.arrival_time < metrics.first_token_time < metrics.last_token_time
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


# aborts


@AHEAD
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 6, 7, 10], ids=lambda steps: f"after-{steps}")
def test_an_aborted_request_leaves_at_once_and_nobody_notices(ahead: bool, steps: int, plain: Any) -> None:
    """40 tokens in chunks of 8: it is waiting, in its prompt, or decoding, with a step in flight or without one."""
    engine = make(async_scheduling=ahead, max_num_batched_tokens=8, max_num_seqs=4).engine
    other = engine.add_request("other", prompt(5, seed=1), greedy(20))
    output = engine.add_request("gone", prompt(40), greedy(20))
    for _ in range(steps):
        engine.step()
    assert engine.abort("gone")
    assert (output.finished, output.outputs[0].finish_reason) == (True, FinishReason.ABORT)
    before = list(output.outputs[0].token_ids)
    assert not engine.abort("gone")
    assert all(changed.request_id == "other" for changed in engine.step())
    finish(engine)
    assert output.outputs[0].token_ids == before == hugging_face(plain, prompt(40), 20)[: len(before)]
    assert tokens_of(other) == [hugging_face(plain, prompt(5, seed=1), 20)]
    assert_nothing_is_held(engine)


def test_an_unknown_name_cannot_be_aborted(llm: LLM) -> None:
    assert not llm.engine.abort("nobody")


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["held", "flying", "running"])
def test_all_answers_of_an_aborted_prompt_end(llm: LLM, steps: int) -> None:
    output = llm.engine.add_request("a", prompt(20), sampled(n=3))
    for _ in range(steps):
        llm.engine.step()
    assert llm.engine.abort("a")
    assert output.finished
    assert [each.finish_reason for each in output.outputs] == [FinishReason.ABORT] * 3
    counts = [len(each) for each in tokens_of(output)]
    finish(llm.engine)
    assert [len(each) for each in tokens_of(output)] == counts


def test_an_answer_that_has_ended_stays_as_it_is_when_the_rest_is_aborted(llm: LLM) -> None:
    whole = tokens_of(llm.generate(prompt(20), sampled(n=3))[0])
    stop = next(token for token in whole[1][:6] if token not in whole[0] and token not in whole[2])
    output = llm.engine.add_request("a", prompt(20), sampled(n=3, stop_token_ids=[stop]))
    while output.outputs[1].finish_reason is None:
        llm.engine.step()
    assert not output.finished
    assert llm.engine.abort("a")
    reasons = [each.finish_reason for each in output.outputs]
    assert reasons == [FinishReason.ABORT, FinishReason.STOP, FinishReason.ABORT]
    assert output.outputs[1].stop_reason == output.outputs[1].token_ids[-1] == stop


# several answers


def test_the_answers_share_the_pages_of_the_prompt() -> None:
    held = []
    for caching in (True, False):
        engine = make(enable_prefix_caching=caching).engine
        engine.add_request("a", prompt(3 * BLOCK + 2), greedy(10, n=4))
        while engine.scheduler.num_running < 4:
            engine.step()
        held.append(blocks_held(engine))
        assert_nothing_is_held(engine)
    assert held == [3 + 4, 4 * 4]


def test_the_answers_share_pages_also_where_the_prompt_is_asked_for_log_probabilities() -> None:
    engine = make().engine
    output = engine.add_request("a", prompt(3 * BLOCK + 2), greedy(10, n=4, prompt_logprobs=1))
    while engine.scheduler.num_running < 4:
        engine.step()
    assert blocks_held(engine) == 3 + 4
    assert output.prompt_logprobs is not None
    assert [entry is None for entry in output.prompt_logprobs] == [True] + [False] * (3 * BLOCK + 1)
    assert_nothing_is_held(engine)


def test_answers_differ_and_repeat_with_a_seed(llm: LLM) -> None:
    first, again, other = (tokens_of(llm.generate(prompt(20), sampled(n=4, seed=seed))[0]) for seed in (1, 1, 99))
    assert len({tuple(each) for each in first}) == 4
    assert first == again
    assert first != other
    assert first[0] == tokens_of(llm.generate(prompt(20), sampled(seed=1))[0])[0], "the first answer is that of n=1"


def test_answers_without_a_seed_differ(llm: LLM) -> None:
    found = [tokens_of(llm.generate(prompt(20), sampled(n=3, seed=None))[0]) for _ in range(2)]
    assert len({tuple(each) for answers in found for each in answers}) == 6


def test_greedy_answers_are_alike_and_finish_together_or_not_at_all(llm: LLM, plain: Any) -> None:
    (output,) = llm.generate([prompt(20)], greedy(5, n=3))
    assert tokens_of(output) == [hugging_face(plain, prompt(20), 5)] * 3
    assert [each.index for each in output.outputs] == [0, 1, 2]
    (single,) = llm.generate([prompt(20)], greedy(1, n=3))
    assert tokens_of(single) == [hugging_face(plain, prompt(20), 1)] * 3


# names, order, limits


def test_a_name_can_be_used_again_when_its_request_has_ended(llm: LLM, plain: Any) -> None:
    first = llm.engine.add_request("a", prompt(6), greedy(4))
    with pytest.raises(InputError, match="request_id: 'a' is in use"):
        llm.engine.add_request("a", prompt(7), greedy(4))
    finish(llm.engine)
    second = llm.engine.add_request("a", prompt(7), greedy(4))
    finish(llm.engine)
    assert tokens_of(first) == [hugging_face(plain, prompt(6), 4)]
    assert tokens_of(second) == [hugging_face(plain, prompt(7), 4)]


def test_a_smaller_priority_goes_first(plain: Any) -> None:
    engine = make(max_num_seqs=1).engine
    names = {"late": 5, "soon": 0, "first": -3}
    outputs = [engine.add_request(name, prompt(10), greedy(3), priority=value) for name, value in names.items()]
    order = []
    while engine.has_unfinished_requests:
        order += [output.request_id for output in engine.step() if output.finished]
    assert order == ["first", "soon", "late"]
    assert all(tokens_of(output) == [hugging_face(plain, prompt(10), 3)] for output in outputs)


def test_a_larger_priority_gives_way(plain: Any) -> None:
    engine = make(num_blocks=4, enable_prefix_caching=False).engine
    low = engine.add_request("low", prompt(30), greedy(24), priority=1)
    engine.step()
    high = engine.add_request("high", prompt(28), greedy(24), priority=0)
    with watched(engine) as seen:
        finish(engine)
    assert sum(seen.preempted.values()) > 0
    assert high.metrics.last_token_time is not None
    assert low.metrics.last_token_time is not None
    assert high.metrics.last_token_time < low.metrics.last_token_time
    assert tokens_of(low) == [hugging_face(plain, prompt(30), 24)]
    assert tokens_of(high) == [hugging_face(plain, prompt(28), 24)]


def test_prefixes_are_shared_only_under_the_same_salt() -> None:
    cached = []
    for salts in (("", ""), ("x", "x"), ("x", "y")):
        engine = make().engine
        with watched(engine) as seen:
            for number, salt in enumerate(salts):
                engine.add_request(str(number), prompt(3 * BLOCK + 1), greedy(1), cache_salt=salt)
                finish(engine)
        cached.append(seen.cached_tokens)
    assert cached == [3 * BLOCK, 3 * BLOCK, 0]


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([5, VOCAB], {}, f"prompt_token_ids: token id {VOCAB} is outside"),
        ([5, -1], {}, "prompt_token_ids: expected one or more token ids"),
        ([], {}, "prompt_token_ids: expected one or more token ids"),
        ([5], {"stop_token_ids": [200]}, "stop_token_ids: token id 200"),
        ([5], {"logit_bias": {200: 1.0}}, "logit_bias: token id 200"),
        ([5], {"allowed_token_ids": [3, 200]}, "allowed_token_ids: token id 200"),
        ([5], {"logprob_token_ids": [VOCAB, 3]}, f"logprob_token_ids: token id {VOCAB} is outside"),
        ([5] * 512, {"max_tokens": 13}, "prompt: its 512 tokens leave no room for an answer in max_model_len=512"),
        ([5] * 500, {"max_tokens": 13}, "500 prompt tokens and max_tokens=12 do not fit the cache of 400 tokens"),
        ([5] * 400, {"max_tokens": 3}, "400 prompt tokens and max_tokens=3 do not fit the cache of 400 tokens"),
    ],
)
def test_what_can_never_run_is_refused_at_once(ids: list[int], params: dict[str, Any], message: str) -> None:
    engine = make(num_blocks=25).engine
    with pytest.raises(InputError, match=message):
        engine.add_request("a", ids, greedy(**params))
    assert not engine.has_unfinished_requests
    engine.add_request("a", [5], greedy(2))
    assert_nothing_is_held(engine)


def test_what_just_fits_runs(plain: Any) -> None:
    engine = make(num_blocks=2).engine
    output = engine.add_request("a", prompt(30), greedy(3))  # the key of the last token is never needed
    finish(engine)
    assert tokens_of(output) == [hugging_face(plain, prompt(30), 3)]
    engine = make(max_model_len=33).engine
    output = engine.add_request("a", prompt(30), greedy(3))
    finish(engine)
    assert tokens_of(output) == [hugging_face(plain, prompt(30), 3)]


def test_more_prompts_than_may_wait(plain: Any) -> None:
    llm = make(max_waiting=2, max_num_seqs=2)
    outputs = llm.generate([prompt(3 + number) for number in range(9)], greedy(3), use_tqdm=False)
    assert [tokens_of(output)[0] for output in outputs] == [
        hugging_face(plain, prompt(3 + number), 3) for number in range(9)
    ]
    for number in range(2):
        llm.engine.add_request(f"waits {number}", prompt(4), greedy(2))
    with pytest.raises(Overloaded, match=r"2 requests are waiting \(max_waiting=2\); try later"):
        llm.engine.add_request("too many", prompt(4), greedy(2))
    with pytest.raises(Overloaded):
        next(llm.stream(prompt(4), greedy(2)))
    assert_nothing_is_held(llm.engine)


def test_all_prompts_are_checked_before_any_runs(llm: LLM) -> None:
    with pytest.raises(InputError, match="max_model_len=512"):
        llm.generate([prompt(3), [5] * 600], greedy(4))
    assert not llm.engine.has_unfinished_requests


# errors


class Broken:
    """A forward that fails once, when `when` says so of a batch."""

    def __init__(self, when: Callable[[Any], bool] = lambda batch: True) -> None:
        self._when = when
        self._forward = PagedModel.forward
        self.times = 0

    def into(self, patch: pytest.MonkeyPatch) -> "Broken":
        def forward(model: PagedModel, batch: Any, *more: Any) -> Tensor:
            if self.times == 0 and self._when(batch):
                self.times += 1
                raise ZeroDivisionError("inside the model")
            return self._forward(model, batch, *more)

        patch.setattr(PagedModel, "forward", forward)
        return self


@AHEAD
@pytest.mark.parametrize("swap_space", [0.0, 0.001], ids=["recompute", "swap"])
def test_an_error_in_the_model_reaches_the_caller_and_the_engine_works_afterwards(
    ahead: bool, swap_space: float, monkeypatch: pytest.MonkeyPatch, plain: Any
) -> None:
    llm = make(async_scheduling=ahead, max_num_batched_tokens=32, num_blocks=8, swap_space=swap_space)
    broken = Broken(lambda batch: int(batch.positions.max()) == 24).into(monkeypatch)
    with pytest.raises(ZeroDivisionError, match="inside the model"):
        llm.generate([prompt(20), prompt(19)], greedy(12), use_tqdm=False)
    assert broken.times == 1
    assert not llm.engine.has_unfinished_requests
    assert_nothing_is_held(llm.engine)
    outputs = llm.generate([prompt(20), prompt(19)], greedy(12), use_tqdm=False)
    assert [tokens_of(each)[0] for each in outputs] == [hugging_face(plain, prompt(n), 12) for n in (20, 19)]


def test_requests_of_others_are_lost_with_a_step_that_fails(monkeypatch: pytest.MonkeyPatch, plain: Any) -> None:
    llm = make()
    stream = llm.stream(prompt(5), greedy())
    next(stream)
    waiting = llm.stream(prompt(6), greedy())  # has not begun, so nothing of it is lost
    with monkeypatch.context() as patch:
        Broken().into(patch)
        with pytest.raises(ZeroDivisionError):
            llm.generate(prompt(7), greedy())
    with pytest.raises(StateError, match="the request was lost, because a step failed in another thread"):
        next(stream)
    assert tokens_of(list(waiting)[-1]) == [hugging_face(plain, prompt(6), 12)]
    assert_nothing_is_held(llm.engine)


def test_threads_whose_requests_are_lost_are_told(monkeypatch: pytest.MonkeyPatch, plain: Any) -> None:
    llm = make()
    results: list[Any] = [None] * 4

    def ask(number: int) -> None:
        try:
            results[number] = llm.generate(prompt(5 + number), greedy(300), use_tqdm=False)
        except Exception as error:
            results[number] = error

    broken = Broken(lambda batch: len(batch.seq_lens) == 4).into(monkeypatch)  # all four are in it
    in_threads(ask, 4)
    assert broken.times == 1
    assert sorted(type(result).__name__ for result in results) == ["StateError"] * 3 + ["ZeroDivisionError"]
    assert tokens_of(llm.generate(prompt(9), greedy())[0]) == [hugging_face(plain, prompt(9), 12)]
    assert_nothing_is_held(llm.engine)


@AHEAD
@pytest.mark.parametrize("where", ["launch", "read"])
def test_an_interrupt_in_the_middle_of_a_step(
    where: str, ahead: bool, monkeypatch: pytest.MonkeyPatch, plain: Any
) -> None:
    llm = make(async_scheduling=ahead)
    launch, steps = Runner.launch, list[int]()

    def interrupted() -> StepOutput:
        raise KeyboardInterrupt

    def launched(runner: Runner, step: Step) -> Callable[[], StepOutput]:
        steps.append(step.step_id)
        if len(steps) == 4:
            return interrupted() if where == "launch" else interrupted  # type: ignore[return-value]
        return launch(runner, step)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "launch", launched)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt(5), prompt(6)], greedy(), use_tqdm=False)
    assert_nothing_is_held(llm.engine)
    assert tokens_of(llm.generate(prompt(5), greedy())[0]) == [hugging_face(plain, prompt(5), 12)]


def test_an_interrupt_between_steps_ends_only_its_own_requests(monkeypatch: pytest.MonkeyPatch, plain: Any) -> None:
    llm = make()
    stream = llm.stream(prompt(5), greedy())
    next(stream)
    step, times = llm.engine.step, list[int]()

    def interrupted() -> list[RequestOutput]:
        times.append(1)
        if len(times) == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt(20), greedy(50))
    assert tokens_of(list(stream)[-1]) == [hugging_face(plain, prompt(5), 12)]
    assert_nothing_is_held(llm.engine)


def test_after_shutdown_nothing_runs() -> None:
    with make() as llm:
        stream = llm.stream(prompt(5), greedy())
        next(stream)
    with pytest.raises(StateError, match="the LLM is shut down; make a new one"):
        llm.generate(prompt(5))
    with pytest.raises(StateError, match="shut down"):
        next(stream)


# log-probabilities


def assert_entry(entry: TokenLogprobs, row: Tensor, token: int, count: int) -> None:
    """An entry is what `row` [V] of log-probabilities says of the token and of the likeliest."""
    top = row.topk(count)
    assert set(entry) == {token, *top.indices.tolist()}
    for each, found in entry.items():
        assert found.logprob == pytest.approx(float(row[each]), abs=1e-4)
        assert found.rank == 1 + int((row > row[each]).sum())


def assert_logprobs(plain: Any, output: RequestOutput, count: int) -> None:
    """All that a request was told is what the model of Hugging Face says."""
    given = output.prompt_token_ids
    for answer in output.outputs:
        text = [*given, *answer.token_ids]
        with torch.no_grad():
            rows = plain(torch.tensor([text])).logits[0].log_softmax(-1)  # [L, V]
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
        for place, entry in enumerate(answer.logprobs, len(given)):
            assert_entry(entry, rows[place - 1], text[place], count)
        own = sum(float(rows[place - 1, text[place]]) for place in range(len(given), len(text)))
        assert answer.cumulative_logprob == pytest.approx(own, abs=1e-3)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(given)
        for place, prompt_entry in enumerate(output.prompt_logprobs[1:], 1):
            assert prompt_entry is not None
            assert_entry(prompt_entry, rows[place - 1], text[place], count)


SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in-turn": {"async_scheduling": False},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "recompute": {"num_blocks": 5},
    "swap": {"num_blocks": 5, "swap_space": 0.001},
}


@pytest.mark.parametrize("setup", SETUPS)
def test_log_probabilities_are_those_of_hugging_face(setup: str, plain: Any) -> None:
    llm = make(**SETUPS[setup])
    params = [
        greedy(20, logprobs=3, prompt_logprobs=3),
        sampled(20, logprobs=3, prompt_logprobs=3),
        greedy(20),  # beside them one that wants nothing
        sampled(20, logprobs=0, prompt_logprobs=0),
    ]
    asked = [prompt(20), prompt(30), prompt(18, seed=1), prompt(19, seed=2)]
    with watched(llm.engine) as seen:
        outputs = llm.generate(asked, params, use_tqdm=False)
    for output, count in zip(outputs, (3, 3, None, 0), strict=True):
        if count is not None:
            assert_logprobs(plain, output, count)
    assert tokens_of(outputs[2]) == [hugging_face(plain, asked[2], 20)]
    assert (outputs[2].prompt_logprobs, outputs[2].outputs[0].logprobs) == (None, None)
    assert (sum(seen.preempted.values()) > 0) == (setup in ("recompute", "swap"))


def test_log_probabilities_of_a_prompt_whose_pages_are_cached(llm: LLM, plain: Any) -> None:
    asked = prompt(3 * BLOCK + 3)
    llm.generate(asked, greedy(4))
    for _ in range(2):
        assert_logprobs(plain, llm.generate(asked, greedy(4, logprobs=2, prompt_logprobs=2))[0], 2)


def test_log_probabilities_of_a_prompt_too_long_for_one_look(llm: LLM, plain: Any) -> None:
    asked = [prompt(300), prompt(4)]
    params = [greedy(3, logprobs=1, prompt_logprobs=1), greedy(3)]
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert_logprobs(plain, outputs[0], 1)
    assert tokens_of(outputs[1]) == [hugging_face(plain, asked[1], 3)]


def test_log_probabilities_of_several_answers(llm: LLM, plain: Any) -> None:
    assert_logprobs(plain, llm.generate(prompt(20), sampled(6, n=3, logprobs=2, prompt_logprobs=2))[0], 2)


def test_a_prompt_of_one_token_has_no_log_probability(llm: LLM) -> None:
    assert llm.generate([5], greedy(2, prompt_logprobs=2))[0].prompt_logprobs == [None]


def test_log_probabilities_that_arrive_after_an_abort_are_left_out() -> None:
    llm = make(async_scheduling=True)
    output = llm.engine.add_request("a", prompt(20), greedy(prompt_logprobs=1))
    llm.engine.step()  # it is in flight
    assert llm.engine.abort("a")
    finish(llm.engine)
    assert output.prompt_logprobs == [None] * 20


def test_log_probabilities_are_the_models_own_whatever_is_sampled_from(llm: LLM, plain: Any) -> None:
    params = sampled(8, logprobs=2, prompt_logprobs=2, logit_bias={7: 3.0}, repetition_penalty=1.3, top_k=20)
    assert_logprobs(plain, llm.generate(prompt(20), params)[0], 2)


@pytest.mark.parametrize(("asked", "count"), [(40, 40), (-1, VOCAB)])
def test_item_24_more_log_probabilities_where_an_option_allows_them(asked: int, count: int, plain: Any) -> None:
    llm = make(max_logprobs=-1)
    params = [greedy(3, logprobs=asked, prompt_logprobs=asked), greedy(3, logprobs=1, prompt_logprobs=1)]
    outputs = llm.generate([prompt(9), prompt(5)], params, use_tqdm=False)
    for output, each in zip(outputs, (count, 1), strict=True):
        assert_logprobs(plain, output, each)


@pytest.mark.parametrize(
    "asked", [{"logprobs": 21}, {"logprobs": -1}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}]
)
def test_item_24_more_log_probabilities_than_the_option_allows(asked: dict[str, int], llm: LLM) -> None:
    with pytest.raises(InputError, match=f"{min(asked)}: .* is more than max_logprobs=20; ask for fewer, or start"):
        llm.generate(prompt(5), greedy(3, **asked))


@torch.no_grad()
def test_item_24_log_probabilities_of_named_tokens(llm: LLM, plain: Any) -> None:
    output = llm.generate(prompt(9), sampled(4, n=2, logprob_token_ids=[11, 3]), use_tqdm=False)[0]
    for answer in output.outputs:
        text = [*output.prompt_token_ids, *answer.token_ids]
        rows = plain(torch.tensor([text])).logits[0].log_softmax(-1)
        assert answer.logprobs is not None
        for place, entry in enumerate(answer.logprobs, 9):
            assert list(entry) == list(dict.fromkeys([text[place], 11, 3]))
            for token, found in entry.items():
                assert found.logprob == pytest.approx(float(rows[place - 1, token]), abs=1e-4)
                assert found.rank == 1 + int((rows[place - 1] > rows[place - 1, token]).sum())
        assert answer.cumulative_logprob is not None


def test_a_request_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(Scheduler, "check", lambda scheduler, request: checked.append(request.request_id))
    make().generate(prompt(9), sampled(4, n=3), use_tqdm=False)
    assert len(checked) == 1


def test_item_24_tokens_of_the_prompt_that_were_cached() -> None:
    llm = make()
    asked = prompt(3 * BLOCK + 5)
    waiting = llm.engine.add_request("a", asked, greedy(2))
    before = waiting.num_cached_tokens
    finish(llm.engine)
    assert (before, waiting.num_cached_tokens) == (None, 0)
    outputs = llm.generate([asked, asked[: 2 * BLOCK + 1], prompt(9, seed=3)], greedy(2, n=2), use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [3 * BLOCK, 2 * BLOCK, 0]
    uncached = make(enable_prefix_caching=False)
    assert [uncached.generate(asked, greedy(2))[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_equals_share_a_rank_and_tokens_have_texts() -> None:
    tokenizer = byte_tokenizer()
    chain = LLM(chain_model(tokenizer), tokenizer=tokenizer, device="cpu")
    (entry,) = chain.generate("E", greedy(1, logprobs=4))[0].outputs[0].logprobs or []
    assert [found.rank for found in entry.values()] == [1, 2, 2, 2]
    assert [found.decoded_token for found in entry.values()][:1] == ["N"]


# streams


@pytest.mark.parametrize("leave", ["close", "del", "break"])
def test_a_stream_that_is_left_gives_its_pages_back(llm: LLM, leave: str) -> None:
    stream = llm.stream(prompt(40), greedy(60))
    for _ in range(3):
        next(stream)
    assert blocks_held(llm.engine) > 0
    if leave == "close":
        stream.close()  # type: ignore[attr-defined]
    elif leave == "break":
        for _ in stream:
            break
    del stream
    assert llm.engine.scheduler.num_running == 0
    assert_nothing_is_held(llm.engine)


def test_a_stream_shows_its_last_tokens_also_when_others_took_the_steps(llm: LLM, plain: Any) -> None:
    short, long = llm.stream(prompt(5), greedy(4)), llm.stream(prompt(6), greedy(12))
    assert next(short).num_tokens == 1
    assert list(long)[-1].num_tokens == 12
    assert [(output.num_tokens, output.finished) for output in short] == [(4, True)]


def in_threads(ask: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


def test_eight_threads_stream_at_once(llm: LLM, plain: Any) -> None:
    found: list[list[int]] = [[] for _ in range(8)]
    counts: list[list[int]] = [[] for _ in range(8)]

    def ask(number: int) -> None:
        for output in llm.stream(prompt(5 + 9 * number), greedy(10 + 3 * number)):
            counts[number].append(output.num_tokens)
            found[number] = output.outputs[0].token_ids

    in_threads(ask, 8)
    assert found == [hugging_face(plain, prompt(5 + 9 * number), 10 + 3 * number) for number in range(8)]
    assert all(seen == sorted(seen) and seen[-1] == 10 + 3 * number for number, seen in enumerate(counts))


# sampling


def crowd(llm: LLM, mine: SamplingParams, others: Sequence[SamplingParams]) -> list[int]:
    """The answer to one request among others."""
    asked = [prompt(9 + 7 * number, seed=number) for number in range(len(others))]
    outputs = llm.generate([*asked, prompt(21), prompt(21)], [*others, mine, greedy()], use_tqdm=False)
    return outputs[-2].outputs[0].token_ids


@pytest.mark.parametrize("setup", SETUPS)
def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(setup: str, llm: LLM) -> None:
    mine = sampled(20, top_p=0.9, frequency_penalty=0.3)
    alone = llm.generate(prompt(21), mine)[0].outputs[0].token_ids
    others = [greedy(18), sampled(15, seed=None), sampled(9, seed=1, top_k=5), sampled(20)]
    assert crowd(make(**SETUPS[setup]), mine, others) == alone
    assert alone != llm.generate(prompt(21), greedy(20))[0].outputs[0].token_ids


def test_requests_without_a_seed_are_not_alike(llm: LLM) -> None:
    outputs = llm.generate([prompt(5)] * 3, sampled(seed=None), use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3


def test_only_allowed_tokens(llm: LLM) -> None:
    for params in (greedy(allowed_token_ids=[4, 9]), sampled(allowed_token_ids=[4, 9])):
        assert set(llm.generate(prompt(5), params)[0].outputs[0].token_ids) <= {4, 9}


def test_a_bias_decides(llm: LLM) -> None:
    assert llm.generate(prompt(5), greedy(3, logit_bias={42: 100.0}))[0].outputs[0].token_ids == [42] * 3
    first = llm.generate(prompt(5), greedy(1))[0].outputs[0].token_ids[0]
    assert llm.generate(prompt(5), greedy(1, logit_bias={first: -100.0}))[0].outputs[0].token_ids != [first]


def test_penalties_count_tokens_that_a_step_in_flight_has_chosen() -> None:
    """Tokens stay on the device: the step after must see them before the host does."""
    found = []
    for ahead in (True, False):
        llm = make(async_scheduling=ahead)
        found.append(llm.generate(prompt(5), greedy(30, frequency_penalty=2.0, presence_penalty=2.0))[0])
    assert tokens_of(found[0]) == tokens_of(found[1])
    assert tokens_of(found[0]) != tokens_of(make().generate(prompt(5), greedy(30))[0])


# what one request must not do to others


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_id": 5}, "request_id: expected a string"),
        ({"request_id": "a\0b"}, "request_id: expected a string without NUL"),
        ({"priority": "high"}, "priority: expected an integer, got 'high'"),
        ({"priority": float("nan")}, "priority: expected an integer"),
        ({"cache_salt": 7}, "cache_salt: expected a string"),
        ({"params": {"n": 2}}, "sampling_params: expected SamplingParams"),
        ({"params": 0}, "sampling_params: expected SamplingParams"),
        ({"prompt_token_ids": None}, "prompt_token_ids: expected a list"),
    ],
)
def test_requests_of_wrong_types_leave_nothing_behind(llm: LLM, options: dict[str, Any], message: str) -> None:
    given = {"request_id": "x", "prompt_token_ids": [3, 4], "params": None, **options}
    with pytest.raises(InputError, match=message):
        llm.engine.add_request(**given)
    assert not llm.engine.has_unfinished_requests


def test_any_text_is_a_name(llm: LLM) -> None:
    first = llm.engine.add_request("good", prompt(5), sampled(4))
    second = llm.engine.add_request("\ud800", prompt(5), sampled(4))
    finish(llm.engine)
    assert first.finished
    assert second.finished


def test_requests_that_a_failed_step_lost_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    output = llm.engine.add_request("a", prompt(5), greedy())
    Broken(lambda batch: True).into(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        finish(llm.engine)
    assert output.finished
    assert output.outputs[0].finish_reason is FinishReason.ABORT


def test_names_of_generate_do_not_clash_with_those_given_by_hand(llm: LLM) -> None:
    output = llm.engine.add_request("0", prompt(5), greedy(4))
    llm.generate(prompt(6), greedy(4))
    finish(llm.engine)
    assert output.finished


def test_a_refused_module_is_as_it_was() -> None:
    module = tiny("llama")
    with pytest.raises(ConfigError, match="max_model_len: 65 is more than the 64 positions"):
        LLM(module, device="cpu", max_model_len=65)
    assert LLM(module, device="cpu").generate([3, 4], greedy(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 10**12}, "num_blocks=1000000000000: .* GiB, and there are"),
        ({"swap_space": 1e7}, "swap_space=1e.07: .* give less"),
        ({"swap_space": 1e-9}, "swap_space=1e-09: less than one page"),
    ],
)
def test_memory_that_is_not_there(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)
