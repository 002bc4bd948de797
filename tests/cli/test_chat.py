"""`outpace chat` and `outpace complete`: with a server and with a model in this process."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outpace import InputError, OutpaceError
from outpace.cli.chat import Conversation, talk
from outpace.cli.talk import Local, Remote, base_of
from tests.cli.command import run
from tests.cli.fake_openai import FakeOpenAI, served
from tests.models import CYCLE


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    with served(FakeOpenAI()) as server:
        yield server


def test_a_chat_with_a_server_remembers_what_was_said(fake: FakeOpenAI) -> None:
    result = run("chat", "--url", fake.url, "--temperature", "0", stdin="hi\nand you?\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hello wörld\nHello wörld\n"
    assert "fake · /reset forgets" in result.stderr
    first, second = fake.bodies
    assert first == {
        "model": "fake",
        "stream": True,
        "temperature": 0.0,
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert [message["content"] for message in second["messages"]] == ["hi", "Hello wörld", "and you?"]


def test_commands_of_a_chat(fake: FakeOpenAI) -> None:
    lines = "one\n/reset\n/system be kind\n/what\n\ntwo\n/system\nthree\n/exit\nnever\n"
    result = run("chat", "other", "--url", f"{fake.url}/v1/", stdin=lines)
    assert result.exit_code == 0, result.output
    said = [[(each["role"], each["content"]) for each in body["messages"]] for body in fake.bodies]
    assert said == [
        [("user", "one")],
        [("system", "be kind"), ("user", "two")],
        [("user", "two"), ("assistant", "Hello wörld"), ("user", "three")],
    ]
    assert {body["model"] for body in fake.bodies} == {"other"}
    assert result.stderr.count("/reset forgets") == 2  # at the beginning, and for /what


def test_an_answer_that_fails_does_not_end_the_chat(fake: FakeOpenAI) -> None:
    fake.busy = 1
    result = run("chat", "--url", fake.url, stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert "error: the server answered 503: not now" in result.stderr
    assert result.stdout == "\nHello wörld\n"
    assert [message["content"] for message in fake.bodies[1]["messages"]] == ["two"]


def test_a_stream_that_breaks_says_so(fake: FakeOpenAI) -> None:
    fake.breaks = True
    result = run("complete", "x", "--url", fake.url)
    assert isinstance(result.exception, OutpaceError)
    assert str(result.exception) == "the server gave up: the engine died"
    assert result.stdout == "Hel"


class Interrupted:
    """Says a word, and is then interrupted."""

    name = "interrupted"

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.asked: list[list[str]] = []

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Iterator[str]:
        self.asked.append([message["content"] for message in messages])
        yield from self.words
        raise KeyboardInterrupt

    def complete(self, prompt: str, options: Mapping[str, Any]) -> Iterator[str]:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to let go of."""


@pytest.mark.parametrize(("words", "kept"), [(["well, "], ["one", "well, ", "two"]), ([], ["two"])])
def test_an_interrupt_ends_the_answer_and_not_the_chat(
    words: list[str], kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: Iterator[str | type[BaseException]] = iter(["one", KeyboardInterrupt, "two", EOFError])

    def read(_: str) -> str:
        line = next(lines)
        if not isinstance(line, str):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    talker = Interrupted(words)
    talk(Conversation(talker, {}), Console(quiet=True))
    assert talker.asked == [["one"], kept]


def test_a_completion_of_a_server(fake: FakeOpenAI) -> None:
    result = run("complete", "-", "--url", fake.url, "--max-tokens", "2", stdin="Once")
    assert result.stdout == "Hello \n"
    assert fake.bodies == [{"model": "fake", "stream": True, "prompt": "Once", "max_tokens": 2}]


def test_the_key_comes_from_an_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(FakeOpenAI(key="secret")) as fake:
        assert "401: wrong key" in str(run("complete", "x", "--url", fake.url).exception)
        assert run("complete", "x", "--url", fake.url, "--api-key", "secret").exit_code == 0
        monkeypatch.setenv("OUTPACE_API_KEY", "secret")
        assert run("complete", "x", "--url", fake.url).exit_code == 0


def test_a_model_in_this_process(chain_folder: Path) -> None:
    options = ("--device", "cpu")
    assert run("chat", chain_folder, *options, stdin="hello\n").stdout == f"{CYCLE}\n"
    assert run("complete", "E", "-m", chain_folder, *options).stdout == "NDx\n"
    assert run("complete", "?", "-m", chain_folder, *options, "--max-tokens", "5").stdout == "world\n"
    empty = run("complete", "", "-m", chain_folder, *options)
    assert isinstance(empty.exception, InputError)
    assert str(empty.exception).startswith("prompt: it is empty, and this model needs a token to continue from")


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Ctrl-C as a person at a terminal has it: a shell lets its background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_waits_for_the_step_of_a_model(chain_folder: Path) -> None:
    local = Local(str(chain_folder), device="cpu")
    answer = local.complete("?", {})
    assert next(answer) == "w"
    signal.raise_signal(signal.SIGINT)  # noted, and raised between two steps
    with pytest.raises(KeyboardInterrupt):
        next(answer)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "".join(local.complete("E", {})) == "NDx"  # the engine is in one piece


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--url", "localhost:8000"), "url: expected http://host:port"),
        (("--url", "http://x", "--dtype", "fp16"), "dtype: the server at url has its own; remove it"),
        (("--api-key", "k"), "api-key: it is for a server"),
        (("--url", "http://127.0.0.1:9"), "url: http://127.0.0.1:9/v1/: "),
    ],
)
def test_what_is_refused(args: tuple[str, ...], said: str) -> None:
    result = run("chat", *args)
    assert isinstance(result.exception, OutpaceError)
    assert said in str(result.exception)


def test_a_url_may_end_with_v1_or_not() -> None:
    assert {base_of(url) for url in ("http://a", "http://a/", "http://a/v1", "http://a/v1/")} == {"http://a/v1"}


def test_a_server_that_serves_nothing_needs_a_name(fake: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("httpx.Response.json", lambda self: {"data": []})
    with pytest.raises(InputError, match="lists no models"):
        Remote(fake.url, None, None)
