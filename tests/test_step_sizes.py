"""How large steps are: where somebody reads tokens as they come, where nobody does, and longest first."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import LLM, InputError, SamplingParams
from outpace.cache.block_pool import BlockPool
from outpace.scheduler import Scheduler
from outpace.sequence import WINDOW
from outpace.types import Request
from tests.models import tiny
from tests.simulation import Simulation


def offline(**more: Any) -> Simulation:
    return Simulation(num_blocks=400, **{"budget": 64, "streamed_budget": 16, **more})


# Streamed or not


def test_prompts_go_whole_beside_decodes_that_nobody_reads_as_they_come() -> None:
    sim = offline()
    decode = sim.add(1, max_tokens=40, streamed=False)
    sim.step()
    long = sim.add(100, streamed=False)
    assert sim.shape(sim.step()) == {decode: (1, 1, True), long: (0, 63, False)}
    assert sim.shape(sim.step()) == {decode: (2, 1, True), long: (63, 37, True)}
    sim.drain()


@pytest.mark.parametrize("waits", [True, False])
def test_one_request_that_is_streamed_bounds_the_steps_of_all(waits: bool) -> None:
    """From its arrival on, also while it waits for a slot, and until its end."""
    sim = offline(max_num_seqs=3 if waits else 8)
    decodes = [sim.add(1, max_tokens=60, streamed=False) for _ in range(2)]
    long = sim.add(200, max_tokens=2, streamed=False)
    assert sim.shape(sim.step())[long] == (0, 62, False)
    reader = sim.add(8, max_tokens=4)
    steps = []
    while reader not in sim.reasons:
        steps.append(sim.shape(sim.step()))
    assert all(sum(tokens for _, tokens, _ in step.values()) <= 16 for step in steps)
    first = next(index for index, step in enumerate(steps) if reader in step)
    assert (first > 0) == waits
    assert all(step[long][1] <= 4 for step in steps if long in step), "a quarter of 16, beside decodes"
    if not waits:
        assert sim.shape(sim.step())[long][1] == 62, "the reader is gone"
    assert all(name not in sim.reasons for name in decodes)
    sim.drain()


def test_a_prompt_that_is_streamed_goes_in_streamed_steps_though_nobody_decodes() -> None:
    """One that arrives meanwhile does not wait longer than for such a step."""
    sim = offline()
    sim.add(40)
    assert [step.num_tokens for step in (sim.step() for _ in range(3))] == [16, 16, 8]
    sim.drain()


def test_a_chunk_that_is_asked_for_counts_beside_all_decodes() -> None:
    sim = offline(chunk=5)
    decode = sim.add(1, max_tokens=40, streamed=False)
    sim.step()
    long = sim.add(100, streamed=False)
    assert sim.shape(sim.step()) == {decode: (1, 1, True), long: (0, 5, False)}
    sim.drain()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (2048, 2048, 384)),
        ({"max_streamed_tokens": 1024}, (2048, 1024, 256)),
        ({"max_streamed_tokens": 9999}, (2048, 2048, 384)),
        ({"max_streamed_tokens": 1}, (2048, 4, 1)),
        ({"streamed_chunk": 480}, (2048, 2048, 480)),
        ({"streamed_chunk": 480, "max_chunk_beside_decodes": 7}, (2048, 2048, 7)),
    ],
)
def test_sizes_that_are_not_given(given: dict[str, Any], expected: tuple[int, int, int]) -> None:
    sizes = Scheduler(
        BlockPool(4, 4), max_num_seqs=4, max_num_batched_tokens=2048, max_model_len=9, max_waiting=9, **given
    ).sizes
    assert (sizes.max_num_batched_tokens, sizes.max_streamed_tokens, sizes.max_chunk_beside_decodes) == expected


def test_generate_does_not_stream_and_stream_does() -> None:
    llm, asked = LLM(tiny("llama"), device="cpu", num_blocks=64), list[bool]()
    add = llm.engine.scheduler.add

    def noted(request: Request, **options: Any) -> int:
        asked.append(request.streamed)
        return add(request, **options)

    llm.engine.scheduler.add = noted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=2)
    llm.generate([[1, 2], [3]], params, use_tqdm=False)
    llm.embed([[1, 2]], use_tqdm=False)
    assert asked == [False] * 3
    assert len(list(llm.stream([1, 2], params))) == 2
    llm.engine.add_request("a", [1, 2], params)
    llm.engine.add_request("b", [1, 2], params, streamed=False)
    assert asked[3:] == [True, True, False]
    with pytest.raises(InputError, match="streamed: expected True or False, got 1"):
        llm.engine.add_request("c", [1, 2], params, streamed=1)


# Longest first


def starts(sim: Simulation) -> list[str]:
    return [entry.request_id for step in sim.steps for entry in step.sequences if entry.request is not None]


def test_the_longest_come_first_and_equal_ones_in_order() -> None:
    sim = Simulation(max_num_seqs=1, longest_first=True)
    lengths = [3, 9, 1, 9, 5]
    names = [sim.add(2, max_tokens=length, streamed=False) for length in lengths]
    sim.drain()
    assert starts(sim) == [names[index] for index in (1, 3, 4, 0, 2)]


def test_priorities_come_before_lengths() -> None:
    sim = Simulation(max_num_seqs=1, longest_first=True)
    names = [sim.add(2, max_tokens=length, priority=rank) for length, rank in ((9, 1), (2, 0), (3, 0), (20, 1))]
    sim.drain()
    assert starts(sim) == [names[index] for index in (2, 1, 3, 0)]


def test_a_short_request_is_overtaken_by_no_more_than_a_window_of_long_ones() -> None:
    sim = Simulation(max_num_seqs=1, longest_first=True, max_waiting=2 * WINDOW)
    short = sim.add(1, max_tokens=1)
    for _ in range(WINDOW):
        sim.add(1, max_tokens=2)
    for name in list(sim.requests)[1:-1]:
        sim.abort(name)
    sim.drain()
    assert starts(sim) == [short, list(sim.requests)[-1]]


def test_the_last_of_the_order_gives_way_and_comes_back() -> None:
    sim = Simulation(num_blocks=12, budget=48, longest_first=True)
    names = [sim.add(15, max_tokens=length, streamed=False) for length in (18, 20, 19)]
    while not any(step.preempted for step in sim.steps):
        sim.step()
    assert list(sim.steps[-1].preempted) == [names[0]]
    sim.drain()


def test_generate_has_the_longest_first_though_few_may_wait() -> None:
    params = [SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in (2, 5, 9, 3, 7)]
    prompts = [[number + 1, 2, 3] for number in range(5)]
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "max_num_seqs": 1, "max_waiting": 2}
    plain = LLM(tiny("llama"), **options).generate(prompts, params, use_tqdm=False)
    outputs = LLM(tiny("llama"), **options, policy="longest_first").generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in plain]
    begun = sorted(range(5), key=lambda number: outputs[number].metrics.first_token_time or 0.0)
    assert begun == [2, 4, 1, 3, 0]


def paced(lengths: list[tuple[int, int]], **more: Any) -> Simulation:
    sim = Simulation(num_blocks=4000, block_size=16, budget=512, max_num_seqs=64, longest_first=True, **more)
    for prompt, new in lengths:
        sim.add(prompt, max_tokens=new, streamed=False)
    return sim


def test_prompts_are_spread_over_the_steps_that_the_longest_request_takes() -> None:
    lengths = [(60, 10 + 4 * number) for number in range(30)]
    sim = paced(lengths)
    sim.drain()
    longest = max(new for _, new in lengths)
    assert longest <= len(sim.steps) <= 1.1 * longest
    sizes = [step.num_tokens for step in sim.steps]
    assert max(sizes) < 120, "and not all 1,800 tokens at once"
    prompts = [sum(entry.num_new_tokens for entry in step.sequences if entry.num_new_tokens > 1) for step in sim.steps]
    assert sum(map(bool, prompts)) > longest // 2


def test_paced_steps_are_as_large_as_what_they_are_padded_to() -> None:
    sim = paced([(60, 10 + 4 * number) for number in range(30)], padded=(32, 64, 96, 128))
    first = [sim.step().num_tokens for _ in range(20)]
    assert set(first) <= {32, 64, 96, 128}
    sim.drain()


def test_an_urgent_prompt_is_not_spread_over_the_steps_of_others() -> None:
    sim = paced([(60, 400)] * 4)
    for _ in range(20):
        sim.step()
    urgent = sim.add(600, max_tokens=10, priority=-1, streamed=False)
    steps = [sim.step() for _ in range(3)]
    computed = [entry.num_new_tokens for step in steps for entry in step.sequences if entry.request_id == urgent]
    assert sum(computed) > 600
    sim.drain()


@pytest.mark.parametrize(
    ("why", "more"),
    [
        ("all have as many tokens to produce", {"lengths": [(60, 20)] * 12}),
        ("there are more than slots", {"lengths": [(60, 10 + number) for number in range(80)]}),
        ("somebody streams", {"reader": True}),
        ("several callers share the steps", {"caller": "another"}),
        ("there are several stages", {"depth": 2, "overlap": 1}),
    ],
)
def test_prompts_are_not_spread_where(why: str, more: dict[str, Any]) -> None:
    lengths, reader, caller = more.pop("lengths", None), more.pop("reader", False), more.pop("caller", None)
    sim = paced(lengths or [(60, 10 + 4 * number) for number in range(30)], **more)
    if reader or caller:
        sim.add(1, max_tokens=200, streamed=reader, caller=caller or "")
    assert [sim.step().num_tokens for _ in range(2)] == [512, 720 - 512 + 8 if lengths == [(60, 20)] * 12 else 512], why
    sim.drain()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40), st.integers(0, 1)), min_size=1, max_size=30),
    seqs=st.integers(1, 12),
    spare=st.integers(0, 40),
    num_blocks=st.integers(25, 60),
    overlap=st.integers(0, 1),
    padded=st.sampled_from([(), (8, 16, 24, 32)]),
)
def test_offline_all_end_in_order_whatever_the_sizes(
    lengths: list[tuple[int, int, int]], seqs: int, spare: int, num_blocks: int, overlap: int, padded: tuple[int, ...]
) -> None:
    """`Simulation` checks budget, order and answers in every step."""
    sim = Simulation(
        num_blocks=num_blocks,
        max_num_seqs=seqs,
        budget=seqs + spare,
        overlap=overlap,
        longest_first=True,
        padded=padded,
    )
    for prompt, new, priority in lengths:
        sim.add(prompt, max_tokens=new, priority=priority, streamed=False)
    sim.drain()
    assert len(sim.reasons) == len(lengths)
