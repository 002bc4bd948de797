"""The engine process and the client of its socket, in one process: a thread serves what the process would."""

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.config import LLMConfig
from outpace.errors import ConfigError, EngineDead, InputError, ModelError, Overloaded
from outpace.llm import LLM
from outpace.llm_engine import LLMEngine
from outpace.load_paged import load_paged
from outpace.server import unsent, worker
from outpace.server.admission import Admission, Load
from outpace.server.channel import Channel
from outpace.server.client import EMBEDDED_AT_ONCE, EngineClient
from outpace.server.engine import Delta, EngineRequest
from outpace.server.engine_main import load_and_work
from outpace.server.messages import (
    MAX_FRAME,
    Add,
    Cancel,
    Frames,
    FromWorker,
    News,
    Start,
    ToWorker,
    add,
    frame,
    prompt_entry,
)
from outpace.server.worker import Worker
from outpace.types import FinishReason, SamplingParams
from tests.models import VOCAB, tiny
from tests.patience import PATIENCE

OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "block_size": 16, "num_blocks": 64}
PROMPT = [5, 6, 7, 8, 9]


def greedy(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)


def request(prompt: list[int] | None = None, params: SamplingParams | None = None, **changes: Any) -> EngineRequest:
    return EngineRequest(request_id="r", prompt_token_ids=prompt or PROMPT, params=params or greedy(), **changes)


def vector_of(ids: list[int], pooling: Any = "mean") -> EngineRequest:
    return replace(request(params=SamplingParams(max_tokens=0), pooling=pooling), prompt_token_ids=ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny("llama"), **OPTIONS)


def expected(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return [answer.token_ids for answer in output.outputs]


@asynccontextmanager
async def engine(
    folder: Path, admission: Admission | None = None, codes: list[int] | None = None, **options: Any
) -> AsyncIterator[EngineClient]:
    """A client of an engine that a thread serves."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(
        target=lambda: (codes if codes is not None else []).append(load_and_work(Channel(theirs)))
    )
    thread.start()
    client = EngineClient(admission)
    try:
        await client.open(ours, Start(str(folder), OPTIONS | options, 30), since=time.monotonic())
        yield client
    finally:
        client.lose("the test ends")
        await asyncio.to_thread(thread.join)
        theirs.close()


def run(work: Awaitable[Any], seconds: float = PATIENCE) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(limited())


async def answers(client: EngineClient, asked: EngineRequest) -> list[list[int]]:
    """The tokens of each answer, put together from deltas."""
    found: list[list[int]] = [[] for _ in range(asked.params.n)]
    ended = [0] * asked.params.n
    async for delta in client.generate(asked):
        found[delta.index] += delta.token_ids
        ended[delta.index] += delta.finish_reason is not None
    assert ended == [1] * asked.params.n
    return found


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


# What is asked and what comes back


@pytest.mark.parametrize(
    "params",
    [
        greedy(),
        greedy(1),
        SamplingParams(max_tokens=9, n=3, seed=7, top_k=5, temperature=1.5),
        greedy(logit_bias={11: 100.0}, presence_penalty=2.0),
        greedy(allowed_token_ids=[3, 4]),
    ],
)
def test_answers_are_those_of_the_engine_in_process(folder: Path, llm: LLM, params: SamplingParams) -> None:
    async def ask() -> list[list[int]]:
        async with engine(folder) as client:
            return await answers(client, request(params=params))

    assert run(ask()) == expected(llm, PROMPT, params)


def test_requests_run_together_and_the_numbers_count_them(folder: Path, llm: LLM) -> None:
    prompts = [[10 + number] * (3 + number) for number in range(6)]

    async def ask() -> Any:
        async with engine(folder) as client:
            before = client.status()
            found = await asyncio.gather(*(answers(client, request(prompt)) for prompt in prompts))
            await until(lambda: client.status().running == 0 and client.status().generated_tokens == 72)
            return before, found, client.status(), client.card

    before, found, status, card = run(ask())
    assert found == [expected(llm, prompt, greedy()) for prompt in prompts]
    assert (before.ready, before.free_blocks, before.num_blocks) == (True, 64, 64)
    assert (status.prompt_tokens, status.prefix_queries, status.free_blocks) == (33, 33, 64)
    assert status.steps < 6 * 12, "requests were not batched"
    assert sum(record.prefill_tokens for record in status.last_steps) == 33
    assert sum(record.decode_tokens for record in status.last_steps) == 6 * 11
    assert {"load", "all"} <= status.startup_seconds.keys()
    assert (card.name, card.vocab_size, card.max_model_len, card.device) == ("tiny", VOCAB, 64, "cpu")


def test_log_probabilities_cross_the_socket(folder: Path, llm: LLM) -> None:
    params = greedy(4, logprobs=2, prompt_logprobs=1)

    async def ask() -> list[Delta]:
        async with engine(folder) as client:
            return [delta async for delta in client.generate(request(params=params))]

    deltas = run(ask())
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs is not None
    found = [entry for delta in deltas for entry in delta.logprobs or []]
    told = [prompt_entry(entry) for entry in deltas[0].prompt_logprobs or []]
    assert told[0] is None is output.prompt_logprobs[0]
    for ours, theirs in zip(found + told[1:], output.outputs[0].logprobs + output.prompt_logprobs[1:], strict=True):
        assert ours is not None
        assert theirs is not None
        assert {token: (pytest.approx(entry.logprob, abs=1e-4), entry.rank) for token, entry in theirs.items()} == {
            token: (logprob, rank) for token, logprob, rank in ours
        }
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


def test_item_24_cached_tokens_and_many_log_probabilities_cross_the_socket(folder: Path) -> None:
    prompt = PROMPT * 7  # two blocks and three tokens

    async def ask(**changes: Any) -> list[Delta]:
        async with engine(folder, max_logprobs=-1) as client:
            assert client.card.max_logprobs == VOCAB
            params = [greedy(4), greedy(4, n=2, logprobs=-1), greedy(4, logprob_token_ids=[9, 1])]
            return [delta for each in params async for delta in client.generate(request(prompt, each))]

    deltas = run(ask())
    assert [delta.num_cached_tokens for delta in deltas if delta.num_cached_tokens is not None] == [0, 32, 32]
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert {len(entry) for entry in entries[:8]} == {VOCAB}
    assert all({9, 1} <= {token for token, _, _ in entry} and len(entry) <= 3 for entry in entries[8:])


def test_a_stop_token_is_told(folder: Path, llm: LLM) -> None:
    ((first, second, *_),) = expected(llm, PROMPT, greedy())
    assert first != second

    async def ask() -> list[Delta]:
        async with engine(folder) as client:
            return [delta async for delta in client.generate(request(params=greedy(stop_token_ids=[second])))]

    deltas = run(ask())
    assert [token for delta in deltas for token in delta.token_ids] == [first, second]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, second)


def test_bad_words_are_token_ids_here(folder: Path, llm: LLM) -> None:
    ((first, *_),) = expected(llm, PROMPT, greedy())

    async def ask() -> list[list[int]]:
        async with engine(folder) as client:
            with pytest.raises(InputError, match="bad_words"):
                await answers(client, request(bad_words=((VOCAB,),)))
            return await answers(client, request(bad_words=((first,),)))

    ((*tokens,),) = run(ask())
    assert first not in tokens


def test_stop_strings_stay_on_this_side() -> None:
    sent = add(1, request(params=greedy(3, stop="x", bad_words=["y"])))
    assert sent.params == {"max_tokens": 3, "temperature": 0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": [VOCAB]}, "vocabulary"),
        ({"prompt": [-1]}, "prompt_token_ids"),
        ({"prompt": [2**70]}, "out of range"),
        ({"prompt": [5] * 64}, "max_model_len"),
        ({"params": greedy(logit_bias={VOCAB: 1.0})}, "logit_bias"),
    ],
)
def test_a_bad_request_fails_alone(folder: Path, llm: LLM, changes: dict[str, Any], message: str) -> None:
    async def ask() -> list[list[int]]:
        async with engine(folder) as client:
            good = asyncio.create_task(answers(client, request(params=greedy(40))))
            with pytest.raises(InputError, match=message):
                await answers(client, request(**changes))
            found = await good
            await until(lambda: client.in_flight == 0)
            return found

    assert run(ask()) == expected(llm, PROMPT, greedy(40))


def test_any_text_is_a_salt(folder: Path, llm: LLM) -> None:
    async def ask() -> Any:
        async with engine(folder) as client:
            return [await answers(client, request(cache_salt=salt)) for salt in ("\ud800", "\0", "a")]

    assert run(ask()) == [expected(llm, PROMPT, greedy())] * 3


def test_what_cannot_be_loaded_is_said(folder: Path, tmp_path: Path) -> None:
    async def start(path: Path, **options: Any) -> None:
        async with engine(path, **options):
            pass

    with pytest.raises(ConfigError, match="no_such_option"):
        run(start(folder, no_such_option=1))
    with pytest.raises(ModelError, match="model"):
        run(start(tmp_path))


# Admission, cancelling, slow readers


def test_too_many_requests_are_refused_at_once(folder: Path) -> None:
    async def ask() -> None:
        async with engine(folder, Admission(max_waiting=1), max_num_seqs=1) as client:
            streams = [client.generate(request(params=greedy(50))) for _ in range(3)]
            first = asyncio.ensure_future(anext(streams[0]))
            second = asyncio.ensure_future(anext(streams[1]))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="max_waiting=1"):
                await anext(streams[2])
            await first
            await streams[0].aclose()
            await second
            await streams[1].aclose()
            await until(lambda: client.in_flight == 0)
            assert len((await answers(client, request()))[0]) == 12

    run(ask())


def test_prompt_tokens_that_wait_are_bounded(folder: Path) -> None:
    async def ask() -> None:
        async with engine(folder, Admission(max_waiting_tokens=20)) as client:
            long = client.generate(request([3] * 30))  # nothing waits: it may come in
            entered = asyncio.ensure_future(anext(long))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="30 prompt tokens are waiting"):
                await answers(client, request())
            await entered
            await answers(client, request())  # the long one runs
            await long.aclose()

    run(ask())


def test_a_reader_that_does_not_read_gets_one_delta_later(folder: Path, llm: LLM) -> None:
    async def ask() -> list[Delta]:
        async with engine(folder) as client:
            stream = client.generate(request(params=greedy(40)))
            first = await anext(stream)
            await until(lambda: client.in_flight == 0)
            return [first] + [delta async for delta in stream]

    first, *rest = run(ask())
    assert len(rest) == 1, "deltas were queued"
    assert [first.token_ids + rest[0].token_ids] == expected(llm, PROMPT, greedy(40))
    assert rest[0].finish_reason is FinishReason.LENGTH


def test_closing_the_client_ends_the_worker_and_fails_requests(folder: Path) -> None:
    codes: list[int] = []

    async def ask() -> None:
        async with engine(folder, codes=codes) as client:
            stream = client.generate(request(params=greedy(50)))
            await anext(stream)
            client.lose("the test ends")
            with pytest.raises(EngineDead, match="the test ends"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDead, match="not running"):
                await answers(client, request())

    run(ask())
    assert codes == [0]


class Driven:
    """A worker that takes its turns when it is told, and the other end of its socket."""

    def __init__(self, **options: Any) -> None:
        parts = load_paged(tiny("llama"), LLMConfig.of(OPTIONS | options))
        self.engine = LLMEngine(parts)
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.channel = Channel(self.theirs)
        self.worker = Worker(self.engine, parts, self.channel)
        self._frames = Frames()

    def send(self, *messages: ToWorker) -> None:
        for message in messages:
            self.ours.sendall(frame(message))

    def ask(self, number: int, prompt: list[int], max_tokens: int, **params: Any) -> None:
        self.send(add(number, request(prompt, greedy(max_tokens, **params))))

    def turns(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_unfinished_requests or self._has_mail():
                self.worker.turn()

    def news(self) -> list[News]:
        """What has been sent so far."""
        found: list[News] = []
        decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        while True:
            try:
                data = self.ours.recv(1 << 16)
            except BlockingIOError:
                return found
            for body in self._frames.feed(data):
                message = decoder.decode(body)
                assert isinstance(message, News)
                found.append(message)

    def _has_mail(self) -> bool:
        try:
            return bool(self.theirs.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False

    def assert_nothing_is_held(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.assert_consistent()
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
        assert scheduler.pool.num_free == scheduler.pool.num_blocks


Drive = Callable[..., Driven]


@pytest.fixture
def drive() -> Iterator[Drive]:
    """Makes workers, and closes their sockets behind the test."""
    made: list[Driven] = []

    def make(**options: Any) -> Driven:
        made.append(Driven(**options))
        return made[-1]

    yield make
    for driven in made:
        driven.ours.close()
        driven.theirs.close()


@pytest.mark.parametrize("before", range(12))
@pytest.mark.parametrize("n", [1, 2])
def test_f8_a_cancel_at_any_stage_frees_its_blocks_within_two_steps(drive: Drive, before: int, n: int) -> None:
    driven = drive(max_num_batched_tokens=8, max_num_seqs=2)
    driven.ask(1, [5] * 20, 6, n=n)  # three steps of prefill, then decodes
    driven.turns(before)
    driven.send(Cancel(1))
    driven.turns(1)  # the message comes in
    driven.turns(2)
    driven.assert_nothing_is_held()
    news = driven.news()
    told = [number for each in news for number in each.cancelled]
    ended = sum(delta.finish_reason is not None for each in news for delta in each.deltas)
    assert told == [1] or ended == n


def limit_logprobs(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    for module in (worker, unsent):
        monkeypatch.setattr(module, "MAX_LOGPROBS", most)


def test_item_24_many_log_probabilities_go_in_several_frames(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_logprobs(monkeypatch, 3 * VOCAB)
    driven = drive(max_logprobs=-1)
    driven.ask(1, PROMPT[:1], 10, logprobs=-1, ignore_eos=True)
    driven.ask(2, PROMPT[:2], 10, logprobs=-1, prompt_logprobs=1, ignore_eos=True)
    driven.ask(3, PROMPT[:4], 10, prompt_logprobs=-1)  # four times the vocabulary in one frame
    monkeypatch.setattr(Channel, "free", False)
    driven.turns(30)  # nothing is sent meanwhile
    monkeypatch.undo()
    limit_logprobs(monkeypatch, 3 * VOCAB)
    while driven.worker._unsent.changed:
        driven.worker.turn()
    news = driven.news()
    assert [failure.message[:17] for each in news for failure in each.failures] == ["prompt_logprobs: "]
    sizes = [sum(len(entry) for delta in each.deltas for entry in delta.logprobs or ()) for each in news]
    assert max(sizes) <= 4 * VOCAB
    assert sum(sizes) == 20 * VOCAB
    found = [delta for each in news for delta in each.deltas]
    for number in (1, 2):
        parts = [delta for delta in found if delta.number == number]
        assert sum(len(part.token_ids) for part in parts) == 10
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [FinishReason.LENGTH]
    driven.assert_nothing_is_held()


def test_item_1_log_probabilities_of_prompts_count_in_a_frame(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many prompts that end together do not make a frame that the other side refuses; nor do vectors."""
    assert 2 * unsent.MAX_LOGPROBS * 20 < MAX_FRAME * 3 // 4  # 20 bytes each
    limit_logprobs(monkeypatch, 4 * (1 + VOCAB))
    driven = drive(max_logprobs=-1)
    for number in range(6):
        driven.ask(number, [7 + number] * 4, number % 2, prompt_logprobs=-1, n=1 + number % 3)
    for number in range(6, 12):
        driven.send(add(number, vector_of([5] * number)))
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "free", False)
        driven.turns(30)  # nothing is sent meanwhile
    while driven.worker._unsent.changed:
        driven.worker.turn()
    news = driven.news()
    for each in news:
        raw = [entry for delta in each.deltas for entry in delta.prompt_logprobs or ()]
        prompts = [len(entry) for entry in map(prompt_entry, raw) if entry]
        assert sum(prompts) + sum(len(vector) for _, vector in each.vectors) <= 2 * unsent.MAX_LOGPROBS
    found = [delta for each in news for delta in each.deltas]
    ends = Counter(delta.number for delta in found if delta.finish_reason is not None)
    assert ends == {number: 1 + number % 3 for number in range(6)}
    assert [delta.number for delta in found if delta.prompt_logprobs] == list(range(6))
    assert sorted(number for each in news for number, _ in each.vectors) == list(range(6, 12))
    driven.assert_nothing_is_held()


def test_item_4_the_scheduler_refuses_nothing_that_was_admitted(drive: Drive) -> None:
    """Its max_waiting knows no callers: the other side of the socket has counted them."""
    driven = drive(max_num_seqs=1, max_waiting=1)
    for number in range(4):
        driven.ask(number, PROMPT, 2)
    driven.turns(30)
    news = driven.news()
    assert [failure for each in news for failure in each.failures] == []
    assert {delta.number for each in news for delta in each.deltas if delta.finish_reason} == set(range(4))


def test_a_cancel_of_one_that_waits_lets_others_go_on(drive: Drive) -> None:
    driven = drive(max_num_seqs=1, max_num_batched_tokens=8)
    driven.ask(1, PROMPT, 4)
    driven.ask(2, PROMPT, 4)
    driven.turns(1)
    driven.send(Cancel(2), Cancel(77))
    driven.turns(20)
    news = driven.news()
    assert [number for each in news for number in each.cancelled] == [2]
    assert {delta.number for each in news for delta in each.deltas} == {1}
    driven.assert_nothing_is_held()


def test_a_worker_holds_one_frame_for_a_reader_that_does_not_read(drive: Drive) -> None:
    driven = drive()
    driven.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for number in range(6):
        driven.ask(number, [5 + number] * 4, 50, logprobs=20)
    driven.turns(200)
    assert not driven.channel.free, "the socket took everything: the test shows nothing"
    held = len(driven.channel._unsent)
    driven.assert_nothing_is_held()  # the engine did not wait
    found: dict[int, list[int]] = {number: [] for number in range(6)}
    frames = 0
    while sum(map(len, found.values())) < 6 * 50:
        for each in driven.news():
            frames += 1
            for delta in each.deltas:
                assert len(delta.logprobs or []) == len(delta.token_ids)
                found[delta.number] += delta.token_ids
        if not driven.channel.free:
            driven.worker.turn()  # idle: it sends what is left
    assert held < 64 << 10
    assert frames < 20, "frames were queued"


def test_prefixes_and_preemptions_are_counted(drive: Drive) -> None:
    driven = drive(num_blocks=5)
    driven.ask(1, [7] * 40, 2)
    driven.turns(10)
    driven.ask(2, [7] * 40, 2)
    driven.turns(10)
    totals = driven.engine.totals
    assert (totals.prefix_queries, totals.prefix_hits, totals.preemptions) == (80, 32, 0)
    assert (totals.prefill_tokens, totals.decode_tokens) == (40 + 8, 2)
    driven.ask(3, [8] * 20, 40)
    driven.ask(4, [9] * 20, 40)  # both grow to four blocks of the five
    driven.turns(150)
    assert totals.preemptions > 0
    driven.assert_nothing_is_held()


def test_an_idle_worker_sleeps(drive: Drive) -> None:
    driven = drive()
    driven.ask(1, PROMPT, 3)
    driven.turns(20)
    thread = threading.Thread(target=driven.worker.turn)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "it took a turn with nothing to do"
    driven.ours.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert driven.worker.run() == 0


# Steps that fail


class Faulty:
    """Makes steps fail; the number says which, counted from now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: LLMEngine, failing: set[int]) -> None:
        launch, self.count = engine._runner.launch, 0

        def broken(step: Any) -> Any:
            self.count += 1
            if self.count in failing:
                raise ZeroDivisionError("a kernel failed")
            return launch(step)

        monkeypatch.setattr(engine._runner, "launch", broken)


@pytest.mark.parametrize("step", range(1, 9))
def test_f3_a_step_that_fails_loses_its_requests_alone(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, llm: LLM, step: int
) -> None:
    driven = drive()
    Faulty(monkeypatch, driven.engine, {step})
    driven.ask(1, PROMPT, 12)
    driven.ask(2, PROMPT, 3)
    driven.turns(30)
    news = driven.news()
    failed = {failure.number: failure.kind for each in news for failure in each.failures}
    finished = {delta.number for each in news for delta in each.deltas if delta.finish_reason}
    assert failed.keys() | finished == {1, 2}
    assert not failed.keys() & finished
    assert set(failed.values()) == {"dead"}
    driven.assert_nothing_is_held()
    driven.ask(3, PROMPT, 12)
    driven.turns(30)
    assert [[token for each in driven.news() for delta in each.deltas for token in delta.token_ids]] == expected(
        llm, PROMPT, greedy()
    )


def test_a_worker_whose_steps_keep_failing_gives_up(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = drive()
    Faulty(monkeypatch, driven.engine, {2, 3})
    driven.ask(1, PROMPT, 12)
    driven.turns(2)
    assert [failure.number for each in driven.news() for failure in each.failures] == [1]
    driven.ask(2, PROMPT, 12)
    assert driven.worker.run() == 1
    assert [failure.number for each in driven.news() for failure in each.failures] == [2]


def test_a_broken_device_is_given_up_at_once(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = drive()

    def broken(step: Any) -> Any:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(driven.engine._runner, "launch", broken)
    driven.ask(1, PROMPT, 12)
    assert driven.worker.run() == 1
    assert [failure.kind for each in driven.news() for failure in each.failures] == ["dead"]


@pytest.mark.parametrize("where", ["step", "catch_up", "_status"])
def test_what_is_complete_is_told_before_a_broken_worker_ends(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Even if it takes several frames, and wherever the error comes from."""
    limit_logprobs(monkeypatch, 3 * VOCAB)
    driven = drive(max_logprobs=-1)
    driven.ask(1, PROMPT[:1], 10, logprobs=-1, ignore_eos=True)
    driven.ask(2, PROMPT[:2], 10, logprobs=-1, ignore_eos=True)
    with monkeypatch.context() as held:
        held.setattr(Channel, "free", False)
        driven.turns(30)  # both are complete, and nothing is sent
    driven.ask(3, PROMPT, 2)

    def broken(*_: Any) -> Any:
        monkeypatch.undo()
        limit_logprobs(monkeypatch, 3 * VOCAB)
        raise torch.AcceleratorError("an illegal memory access was encountered")

    if where == "catch_up":
        monkeypatch.setattr(LLMEngine, "is_behind", True)
    monkeypatch.setattr(driven.worker if where == "_status" else driven.engine, where, broken)
    assert driven.worker.run() == 1
    news = driven.news()
    found = [delta for each in news for delta in each.deltas]
    for number in (1, 2):
        parts = [delta for delta in found if delta.number == number]
        assert sum(len(part.token_ids) for part in parts) == 10
        assert parts[-1].finish_reason is FinishReason.LENGTH
    assert [each.last for each in news] == [False] * (len(news) - 1) + [True]


def test_errors_of_a_broken_worker_come_with_its_last_frame(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that got one of them would find the server ready until the last frame came."""
    limit_logprobs(monkeypatch, 3 * VOCAB)
    driven = drive(max_logprobs=-1)
    driven.ask(1, PROMPT[:1], 10, logprobs=-1, ignore_eos=True)
    with monkeypatch.context() as held:
        held.setattr(Channel, "free", False)
        driven.turns(20)  # it is complete, and nothing is sent

    def broken(step: Any) -> Any:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(driven.engine._runner, "launch", broken)
    driven.ask(2, PROMPT, 2)
    assert driven.worker.run() == 1
    news = driven.news()
    assert len(news) > 1
    assert [[failure.number for failure in each.failures] for each in news] == [[]] * (len(news) - 1) + [[2]]
    assert news[-1].last


def test_an_error_while_queueing_fails_the_request_alone(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = drive()
    monkeypatch.setattr(driven.engine, "submit", lambda group: 1 / 0)
    driven.ask(1, PROMPT, 2)
    driven.send(Add(2, PROMPT, {"max_tokens": -1}, [], 0, b""))
    driven.worker.turn()
    monkeypatch.undo()
    driven.ask(3, PROMPT, 2)
    driven.turns(10)
    news = driven.news()
    assert [(failure.number, failure.kind) for each in news for failure in each.failures] == [(1, "dead"), (2, "input")]
    assert {delta.number for each in news for delta in each.deltas} == {3}


# Embeddings


def test_embeddings_run_beside_requests_and_fail_alone(folder: Path, llm: LLM) -> None:
    async def ask() -> Any:
        async with engine(folder) as client:
            text = asyncio.create_task(answers(client, request(params=greedy(40))))
            vectors = await client.embed([vector_of(ids) for ids in (PROMPT, [9, 8], PROMPT)])
            for wrong, pooling, message in (
                ([], "mean", "one or more"),
                ([1] * 65, "mean", "max_model_len=64"),
                ([VOCAB], "last", "vocabulary of 97"),
                (PROMPT, "max", "pooling"),
            ):
                with pytest.raises(InputError, match=message):
                    await client.embed([vector_of(PROMPT), vector_of(wrong, pooling)])
            found = await text
            await until(lambda: client.in_flight == 0)
            return vectors, found

    vectors, found = run(ask())
    assert found == expected(llm, PROMPT, greedy(40))
    assert [len(vector) for vector in vectors] == [32] * 3
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-4) != vectors[1]  # of another batch, maybe


def test_item_24_a_prompt_is_scored_without_an_answer(folder: Path, llm: LLM) -> None:
    async def ask() -> list[Delta]:
        async with engine(folder) as client:
            asked = request(params=SamplingParams(max_tokens=0, prompt_logprobs=2, n=2))
            return [delta async for delta in client.generate(asked)]

    found = run(ask())
    (right,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    assert [(delta.index, delta.token_ids, delta.finish_reason) for delta in found] == [
        *((0, [], FinishReason.LENGTH), (1, [], FinishReason.LENGTH))
    ]
    assert found[0].prompt_logprobs is not None
    assert right.prompt_logprobs is not None
    told = [entry and {token for token, _, _ in entry} for entry in map(prompt_entry, found[0].prompt_logprobs)]
    assert told == [entry and entry.keys() for entry in right.prompt_logprobs]


def test_item_1_many_vectors_are_computed_some_at_a_time(folder: Path) -> None:
    async def ask() -> list[list[float]]:
        async with engine(folder, Admission(max_waiting=EMBEDDED_AT_ONCE)) as client:
            return await client.embed([vector_of([5 + number % 7]) for number in range(100)])

    found = run(ask())
    assert len(found) == 100
    vectors = torch.tensor(found)
    torch.testing.assert_close(vectors[:7], vectors[7:14], atol=1e-4, rtol=1e-4)  # their batches may differ
    assert not torch.allclose(vectors[:7], vectors[1:8], atol=1e-2)


def test_a_cancelled_embedding_is_forgotten(folder: Path) -> None:
    async def ask() -> None:
        async with engine(folder) as client:
            work = asyncio.create_task(client.embed([vector_of(PROMPT)] * 100))
            await asyncio.sleep(0)
            assert client.in_flight == EMBEDDED_AT_ONCE
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await until(lambda: client.in_flight == 0)
            assert (client._loads._all, client._loads._of) == (Load(), {})

    run(ask())


# Frames


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 50), max_size=40))
def test_frames_come_out_as_they_went_in_however_they_are_cut(salts: list[bytes], cuts: list[int]) -> None:
    sent = [Add(number, [1], {}, [], 0, salt) for number, salt in enumerate(salts)]
    data = b"".join(map(frame, sent))
    frames, found, at = Frames(), [], 0
    decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
    for cut in [*cuts, len(data)]:
        found += [decoder.decode(body) for body in frames.feed(data[at : at + cut])]
        at += cut
    assert found == sent


def test_a_length_that_no_frame_has_is_an_error() -> None:
    with pytest.raises(EngineDead, match="out of step"):
        list(Frames().feed(b"\xff\xff\xff\xff"))
