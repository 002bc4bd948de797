"""One caller must not hurt another: shares, places, priorities, limits and cached prefixes of API keys."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outpace.errors import ConfigError, Overloaded
from outpace.server.admission import Admission, Load, Loads, Size
from outpace.server.app import create_app
from outpace.server.client import EngineClient
from outpace.server.engine import Caller, EngineRequest
from outpace.server.options import ApiKey, ServerConfig
from outpace.types import SamplingParams
from tests.models import tiny
from tests.server.conftest import Serve, Served
from tests.server.fake import FakeEngine
from tests.server.test_worker import answers, engine, greedy, request, run, until, vector_of

pytestmark = pytest.mark.anyio
MANY, FEW = Caller("key-0"), Caller("key-1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny("llama", max_position_embeddings=2048).save_pretrained(path)
    return path


async def finished(client: EngineClient, name: str, asked: EngineRequest, ended: list[str]) -> None:
    """Read a request to its end and write its name down."""
    async for _ in client.generate(asked):
        pass
    ended.append(name)


def forever(**changes: Any) -> EngineRequest:
    return request(params=greedy(1900, ignore_eos=True), **changes)


# item 1: vectors


def test_item_1_streams_go_on_while_a_long_text_becomes_a_vector(folder: Path) -> None:
    """Between asking for the vector and having it, the stream gets tokens: in every step there is one of its own."""

    async def ask() -> tuple[int, int]:
        async with engine(folder, num_blocks=300, max_num_batched_tokens=64) as client:
            stream = client.generate(forever())
            await anext(stream)
            vector = asyncio.create_task(client.embed([vector_of([1] * 1600)]))
            tokens = 0
            async for delta in stream:
                tokens += len(delta.token_ids)
                if vector.done():
                    break
            await stream.aclose()
            return tokens, len((await vector)[0])

    tokens, width = run(ask())
    assert width == 32
    assert tokens >= 1600 // 64


def test_item_1_a_vector_that_nobody_waits_for_is_cancelled_between_its_chunks(folder: Path) -> None:
    async def ask() -> None:
        async with engine(folder, num_blocks=300, max_num_batched_tokens=8) as client:
            work = asyncio.create_task(client.embed([vector_of([1] * 1900)]))
            await until(lambda: client.status().steps > 2)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await until(lambda: client.in_flight == 0)
            await until(lambda: client.status().free_blocks == 300)
            assert client.status().steps < 1900 // 8

    run(ask())


# item 2: n answers


def test_item_2_n_answers_end_before_a_request_that_came_later(folder: Path) -> None:
    async def ask() -> list[str]:
        ended: list[str] = []
        async with engine(folder, max_num_seqs=2) as client:
            group = request(params=SamplingParams(max_tokens=24, n=6, seed=1, ignore_eos=True))
            later = [request([7 + n], greedy(24, ignore_eos=True)) for n in range(3)]
            asked = [("group", group), *((f"later{n}", each) for n, each in enumerate(later))]
            await asyncio.gather(*(finished(client, name, each, ended) for name, each in asked))
        return ended

    first, second, *others = run(ask())
    assert {first, second} == {"later0", "group"}, "one may run beside the first answer, if it comes before that ends"
    assert others == ["later1", "later2"], "the others run after all"


# item 4: shares


def test_item_4_a_key_with_one_request_is_answered_while_another_has_hundreds(folder: Path) -> None:
    """All slots are taken by long answers of one key, with a queue behind them; the other's short one is done first."""

    async def ask() -> list[str]:
        ended: list[str] = []
        async with engine(folder, max_num_seqs=2, num_blocks=400) as client:
            crowd = [asyncio.create_task(finished(client, "many", forever(caller=MANY), ended)) for _ in range(40)]
            await until(lambda: client.status().running == 2)
            await finished(client, "few", request(caller=FEW), ended)
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
        return ended

    assert run(ask()) == ["few"]


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        ({"max_sequences_per_caller": 8}, "max_sequences_per_key"),
        ({"max_waiting_tokens_per_caller": 8}, "tokens_per_key"),
    ],
)
def test_item_4_limits_count_the_sequences_and_tokens_of_a_key(folder: Path, limit: dict[str, int], named: str) -> None:
    async def ask() -> None:
        ended: list[str] = []
        async with engine(folder, Admission(**limit), max_num_seqs=1) as client:
            first = request(params=SamplingParams(max_tokens=200, n=6, seed=1, ignore_eos=True), caller=MANY)
            running = asyncio.create_task(finished(client, "first", first, ended))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match=named):
                await finished(client, "too many", request(params=greedy(2, n=3), caller=MANY), ended)
            await finished(client, "other", request(caller=FEW), ended)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await until(lambda: client.in_flight == 0)
            await finished(client, "again", request(caller=MANY), ended)
            assert ended == ["other", "again"]

    run(ask())


def let_in(loads: Loads, caller: str, sequences: int = 1, tokens: int = 1) -> int:
    """Requests of a caller until one is refused: how many were let in."""
    size = Size(caller, sequences, tokens)
    for count in range(999):
        try:
            loads.admit(size, 0)
        except Overloaded:
            return count
        loads.enter(size)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("limit", [{"max_waiting": 120}, {"max_waiting_tokens": 120}])
def test_item_4_at_a_limit_of_all_each_key_gets_its_fair_part(limit: dict[str, int]) -> None:
    loads = Loads(Admission(**limit))
    assert [let_in(loads, name) for name in "abca"] == [120, 60, 40, 0]
    assert let_in(loads, "d", *((200, 1) if "max_waiting" in limit else (1, 200))) == 1, "nothing of it waits"
    assert let_in(loads, "d") == 0


def test_item_4_a_key_that_fills_the_queue_shuts_no_other_out(folder: Path) -> None:
    async def ask() -> list[str]:
        ended: list[str] = []
        async with engine(folder, Admission(max_waiting=8), max_num_seqs=1) as client:
            crowd = [asyncio.create_task(finished(client, "many", forever(caller=MANY), ended)) for _ in range(20)]
            await until(lambda: any(task.done() for task in crowd))
            await finished(client, "few", request(caller=FEW), ended)
            for task in crowd:
                task.cancel()
            found = await asyncio.gather(*crowd, return_exceptions=True)
        assert sum(isinstance(each, Overloaded) for each in found) >= 10
        return ended

    assert run(ask()) == ["few"]


async def test_item_4_requests_of_one_key_leave_others_their_part_of_the_server(
    serve: Serve, tokenizer: PreTrainedTokenizerFast
) -> None:
    fake = FakeEngine(tokenizer, hold=asyncio.Event())
    server = serve(fake, api_keys=["many", "few"], max_concurrent_requests=4)

    async def ask(key: str) -> int:
        answer = await server.post("/v1/completions", {"prompt": "a"}, headers={"authorization": f"Bearer {key}"})
        return answer.status_code

    held = []
    for key, count in (("many", 4), ("few", 2)):
        held += [asyncio.create_task(ask(key)) for _ in range(count)]
        while len(fake.open) < len(held):
            await asyncio.sleep(0)
        assert await ask(key) == 429
    assert await ask("many") == 429
    assert fake.hold is not None
    fake.hold.set()
    assert [await task for task in held] == [200] * 6


def test_item_4_prompts_of_one_request_are_let_in_together(folder: Path) -> None:
    async def ask() -> None:
        async with engine(folder, Admission(max_sequences_per_caller=4)) as client:
            several = [replace(request(params=greedy(2, n=2)), request_id=str(number)) for number in range(3)]
            with pytest.raises(Overloaded, match="no room for 6"):
                client.room(several)
            with client.room(several[:2]):
                with pytest.raises(Overloaded, match="4 sequences of one caller"):
                    await answers(client, request())
                assert [len(await answers(client, each)) for each in several[:1]] == [2]
            assert await answers(client, request())
            assert (client._loads._all, client._loads._of) == (Load(), {})

    run(ask())


async def test_item_4_a_request_asks_for_room_for_all_its_prompts(serve: Serve) -> None:
    server = serve()
    for path, field in (("/v1/completions", "prompt"), ("/mii/fake", "prompts")):
        assert (await server.post(path, {field: ["a", "b", "c"]})).status_code == 200
    assert server.engine.rooms == [3, 3]


async def test_item_4_a_request_larger_than_its_keys_limit_says_so(serve: Serve) -> None:
    server = serve(max_sequences_per_key=8)
    assert (await server.post("/v1/completions", {"prompt": ["a", "b"], "n": 4})).status_code == 200
    answer = await server.post("/v1/completions", {"prompt": ["a", "b"], "n": 5})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert "10 sequences (prompts times n), max_sequences_per_key=8 is the limit" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 3}, "n"),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, "input"),
        ("/mii/fake", {"prompts": ["a", "b", "c"]}, "prompts"),
    ],
)
async def test_item_4_the_limit_of_a_key_names_the_field(
    serve: Serve, path: str, body: dict[str, Any], field: str
) -> None:
    answer = await serve(max_sequences_per_key=2).post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert "max_sequences_per_key=2 is the limit; send fewer" in error["message"]


async def test_item_4_requests_go_to_the_engine_under_their_key(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# two keys\nfirst weight=2.5\nsecond\n")
    server = serve(api_key_file=str(keys))
    callers = [await seen(server.engine, server, key, {"prompt": "a"}) for key in ("first", "second")]
    assert [each.caller for each in callers] == [Caller("key-0", 2.5), Caller("key-1", 1.0)]


async def seen(fake: FakeEngine, server: Any, key: str, body: dict[str, Any]) -> EngineRequest:
    """The request that reached the engine."""
    answer = await server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return fake.requests[-1]


# item 3: priorities


async def test_item_3_priority_is_refused_unless_allowed(serve: Serve) -> None:
    server = serve()
    answer = await server.post("/v1/completions", {"prompt": "a", "priority": -(2**31)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"
    assert "allow_priority" in answer.json()["error"]["message"]
    for neutral in (0, None):
        assert (await server.post("/v1/completions", {"prompt": "a", "priority": neutral})).status_code == 200


async def test_item_3_priorities_have_the_bounds_of_their_key(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("boss min_priority=-50\nbatch min_priority=1 max_priority=9\nplain\n")
    server = serve(api_key_file=str(keys), allow_priority=True, min_priority=-5, max_priority=5)
    for key, priority, status in (
        *(("boss", -50, 200), ("boss", -51, 400), ("boss", 5, 200), ("boss", 6, 400)),
        *(("batch", 1, 200), ("batch", -1, 400), ("batch", 9, 200), ("plain", -5, 200), ("plain", -6, 400)),
    ):
        body = {"prompt": "a", "priority": priority}
        answer = await server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status, (key, priority)


async def test_item_3_a_request_without_a_priority_stays_within_the_bounds(serve: Serve, tmp_path: Path) -> None:
    """A key for batches cannot pass others by leaving the field out, on any route."""
    keys = tmp_path / "keys"
    keys.write_text("batch min_priority=1\nboss max_priority=-3\nplain\n")
    server = serve(api_key_file=str(keys), allow_priority=True)
    asked = (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "priority": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/mii/fake", {"prompts": ["a"]}),
    )
    for key, priority in (("batch", 1), ("boss", -3), ("plain", 0)):
        for path, body in asked:
            answer = await server.post(path, body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            assert server.engine.requests[-1].priority == priority, (key, path)


# item 5: cached prefixes


def test_item_5_the_engine_shares_no_cached_blocks_between_keys(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    async def ask() -> list[int]:
        async with engine(folder) as client:
            app = create_app(client, ServerConfig(api_keys=("one", "two")), tokenizer)
            server = Served(app, FakeEngine(tokenizer))
            body = {"prompt": [5] * 40, "max_tokens": 1}
            try:
                found = [
                    await server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
                    for key in ("one", "one", "two", "two")
                ]
            finally:
                app.state.services.close()
            return [each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found]

    assert run(ask()) == [0, 32, 0, 32]


@pytest.mark.parametrize("shared", [False, True])
async def test_item_5_keys_do_not_share_prefixes_unless_told_so(serve: Serve, shared: bool) -> None:
    server = serve(api_keys=["one", "two"], share_prefix_cache=shared)
    salts = []
    for key in ("one", "two", "one"):
        for path, body in (("completions", {"prompt": "a"}), ("embeddings", {"input": "a", "pooling": "last"})):
            answer = await server.post(f"/v1/{path}", body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        salts.append({each.cache_salt for each in server.engine.requests[-2:]})
    assert salts[0] == salts[2]
    assert (salts[0] == salts[1]) is shared
    assert all(len(each) == 1 for each in salts)


async def test_item_5_a_salt_of_ones_own_stays_within_the_key(serve: Serve) -> None:
    server = serve(api_keys=["one", "two"])
    found = [await seen(server.engine, server, key, {"prompt": "a", "cache_salt": "s"}) for key in ("one", "two")]
    assert found[0].cache_salt != found[1].cache_salt
    assert all("s" in each.cache_salt for each in found)


# the file of keys


def test_a_key_file_gives_weights_and_bounds(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a weight=3 max_priority=-2\n\nb\n")
    config = ServerConfig(api_keys=("b", "c"), api_key_file=str(keys), allow_priority=True)
    assert config.keys() == (ApiKey("b"), ApiKey("c"), ApiKey("a", 3.0, None, -2))
    assert config.all_api_keys() == ("b", "c", "a")


@pytest.mark.parametrize("line", ["a weight=0", "a weight=x", "a weight", "a b", "a min_priority=1.5", "a colour=red"])
def test_a_key_file_that_cannot_be_read_says_where(tmp_path: Path, line: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"fine\n{line}\n")
    with pytest.raises(ConfigError, match=r"api_key_file: .*keys:2: cannot read"):
        ServerConfig(api_key_file=str(keys)).keys()


def test_item_4_errors_of_a_key_file_show_no_part_of_a_line(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("my secret passphrase\n")
    with pytest.raises(ConfigError, match="keys:1: cannot read what follows") as caught:
        ServerConfig(api_key_file=str(keys)).keys()
    assert not any(word in str(caught.value) for word in ("my", "secret", "passphrase"))


@pytest.mark.parametrize(
    ("line", "allowed", "message"),
    [
        ("a min_priority=10 max_priority=-10", True, "keys:2: min_priority=10 is more than max_priority=-10"),
        ("a min_priority=6", True, "keys:2: min_priority=6 is more than max_priority=5"),
        ("a max_priority=-6", True, "keys:2: min_priority=-5 is more than max_priority=-6"),
        ("fine weight=2", True, "keys:2: this key has a line already"),
        ("a max_priority=3", False, "keys:2: min_priority and max_priority act only with the option allow_priority"),
    ],
)
def test_item_3_lines_of_keys_that_cannot_act_are_refused(
    tmp_path: Path, line: str, allowed: bool, message: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"fine\n{line}\n")
    config = ServerConfig(api_key_file=str(keys), allow_priority=allowed, min_priority=-5, max_priority=5)
    with pytest.raises(ConfigError, match=message):
        config.keys()


def test_priorities_in_order() -> None:
    with pytest.raises(ConfigError, match="min_priority: 5 is more than max_priority=1"):
        ServerConfig(min_priority=5, max_priority=1)
