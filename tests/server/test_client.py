"""`outpace.client` against a server over a socket, and how the command line takes names."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from transformers import PreTrainedTokenizerFast

import outpace
from outpace.cli.serve import spread_names
from outpace.errors import EngineDead, InputError
from outpace.mii import Response
from outpace.server.app import create_app
from outpace.server.options import ServerConfig
from outpace.server.python_api import completion_body
from tests.server.fake import FakeEngine, says


@contextmanager
def real_server(tokenizer: PreTrainedTokenizerFast, engine: FakeEngine | None = None, **options: Any) -> Iterator[str]:
    """The URL of a server over an engine in memory."""
    engine = engine or FakeEngine(tokenizer, says("I am here."))
    app = create_app(engine, ServerConfig(**options), tokenizer)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        listener.close()
        app.state.services.close()


@pytest.mark.parametrize("full", [False, True])
def test_a_callback_gets_the_answer_piece_by_piece(tokenizer: PreTrainedTokenizerFast, full: bool) -> None:
    engine, pieces = FakeEngine(tokenizer, says("I am.")), list[list[Response]]()
    with real_server(tokenizer, engine) as url, outpace.client(url) as client:
        options: dict[str, Any] = {"max_new_tokens": 30, "return_full_text": full, "do_sample": False}
        answers = client.generate("Who?", streaming_fn=pieces.append, **options)
        assert answers == client.generate(["Who?"], **options), "streamed and whole answers differ"
    assert len(pieces) > 3
    assert all(len(piece) == 1 for piece in pieces)
    assert "".join(piece.generated_text for (piece,) in pieces) == ("Who?I am." if full else "I am.")
    assert [piece.generated_length for (piece,) in pieces] == list(range(1, 7))
    assert {piece.finish_reason for (piece,) in pieces[:-1]} == {"none"}
    assert (pieces[-1][0].finish_reason, pieces[-1][0].prompt_length) == ("stop", 4)


def test_streaming_takes_one_prompt_and_raises_what_goes_wrong(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = FakeEngine(tokenizer, error=EngineDead("gone"), error_at=2)
    with real_server(tokenizer, engine, max_n=1) as url, outpace.client(url) as client:
        with pytest.raises(InputError, match="streaming_fn: expected one prompt, got 2"):
            client.generate(["a", "b"], streaming_fn=print)
        with pytest.raises(InputError, match="top_p"):
            client.generate("a", streaming_fn=lambda piece: None, top_p=7)
        with pytest.raises(InputError, match="num_beams"):
            client.generate("a", streaming_fn=lambda piece: None, num_beams=2)
        with pytest.raises(EngineDead, match="gone"):
            client.generate("a", streaming_fn=lambda piece: None)


def test_the_arguments_of_mii_become_those_of_completions() -> None:
    body = completion_body("p", 10, 100, {"max_length": 50, "stop": ["x"], "seed": 3, "min_new_tokens": 2})
    assert (body["max_tokens"], body["stop"], body["seed"], body["min_tokens"]) == (40, ["x"], 3, 2)
    assert (body["temperature"], body["top_p"]) == (1.0, 0.9)
    assert completion_body("p", 10, 100, {"max_new_tokens": 500})["max_tokens"] == 90
    assert completion_body("p", 10, 100, {"do_sample": False, "temperature": 0.5})["temperature"] == 0.0
    with pytest.raises(InputError, match="max_length"):
        completion_body("p", 50, 100, {"max_length": 50})


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("m --served-model-name a b --port 1", "m --served-model-name a --served-model-name b --port 1"),
        ("m --served-model-name a b c", "m --served-model-name a --served-model-name b --served-model-name c"),
        ("m --served-model-name a --served-model-name b", "m --served-model-name a --served-model-name b"),
        ("m --port 1 --served-model-name a", "m --port 1 --served-model-name a"),
        ("--served-model-name a m", "--served-model-name a m"),
        ("m b", "m b"),
        ("", ""),
    ],
)
def test_several_names_may_stand_behind_one_flag(args: str, expected: str) -> None:
    assert spread_names(args.split()) == expected.split()
