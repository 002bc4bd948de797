"""Other clients: what they once sent is answered as they need it, and those that are installed pass their own flows.

`tests/server/record.py` says how to record a client anew.
"""

import base64
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.clients import FLOWS
from tests.server.live import MAX_MODEL_LEN, Live
from tests.server.record import NODE, TRANSCRIPTS, command
from tests.server.test_completions import events

NAMES = sorted(path.stem for path in TRANSCRIPTS.glob("*.json"))


def test_every_client_has_a_transcript() -> None:
    assert set(NAMES) == {*FLOWS, NODE}


@pytest.mark.parametrize("name", NAMES)
def test_items_20_21_24_what_clients_send_is_answered(live: Live, name: str) -> None:
    transcript = json.loads(Path(TRANSCRIPTS / f"{name}.json").read_text())
    with live.http() as client:
        for request in transcript["requests"]:
            method, path, body = request["method"], request["path"], request["body"]
            answer = client.request(method, path, json=body)
            assert answer.status_code == 200, (transcript["client"], body, answer.text)
            if body and body.get("stream"):
                check_stream(body, events(answer.text))
            else:
                CHECKS[path](body, answer.json())


def check_stream(body: dict[str, Any], chunks: list[dict[str, Any]]) -> None:
    """Pieces of a text, one end, and the usage where it is asked for."""
    options = body.get("stream_options") or {}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    if options.get("include_usage"):
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == most_tokens(body)
    if options.get("continuous_usage_stats"):
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] == ("text" not in choices[0] and 0) or counts[0] > 0
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


def most_tokens(body: dict[str, Any]) -> int:
    return int(body.get("max_completion_tokens") or body["max_tokens"])


def check_chat(body: dict[str, Any], answer: dict[str, Any]) -> None:
    (choice,) = answer["choices"]
    message, usage = choice["message"], answer["usage"]
    assert message["role"] == "assistant"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if body.get("tool_choice") not in (None, "auto", "none"):
        for call in message["tool_calls"]:
            assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
            assert (call["type"], call["function"]["name"]) == ("function", body["tools"][0]["function"]["name"])
    elif body.get("response_format"):
        assert json.loads(message["content"])["city"] in ("Rome", "Oslo")
        assert choice["finish_reason"] == "stop"
    else:
        assert message["content"]
        assert choice["finish_reason"] == "length"


def check_completion(body: dict[str, Any], answer: dict[str, Any]) -> None:
    """Scores of lm-eval are those of the prompt's tokens: all must be there, in one order."""
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts)))
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        if body.get("logprobs") is None:
            assert choice["text"]
            continue
        logprobs = choice["logprobs"]
        count = len(prompt) + (isinstance(prompt, str)) + body["max_tokens"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(logprobs["tokens"]) == count
        assert logprobs["token_logprobs"][0] is None
        for token, logprob, top in list(zip(*(logprobs[name] for name in COLUMNS), strict=True))[1:]:
            assert top[token] == logprob <= max(top.values()) <= 0


COLUMNS = ("tokens", "token_logprobs", "top_logprobs")


def check_embeddings(body: dict[str, Any], answer: dict[str, Any]) -> None:
    vectors = [entry["embedding"] for entry in answer["data"]]
    assert len(vectors) == len(body["input"])
    if body.get("encoding_format") == "base64":
        assert {len(base64.b64decode(vector)) % 4 for vector in vectors} == {0}


def check_tokens(body: dict[str, Any], answer: dict[str, Any]) -> None:
    assert answer["count"] == len(answer["tokens"]) > 0


def check_tokenizer(body: None, answer: dict[str, Any]) -> None:
    assert answer["eos_token"] == "<|end|>"
    assert answer["chat_template"]


def check_models(body: None, answer: dict[str, Any]) -> None:
    assert (answer["data"][0]["id"], answer["data"][0]["max_model_len"]) == ("tiny", MAX_MODEL_LEN)


def check_health(body: None, answer: dict[str, Any]) -> None:
    assert answer["status"] == "ok"


CHECKS: dict[str, Any] = {
    "/v1/chat/completions": check_chat,
    "/v1/completions": check_completion,
    "/v1/embeddings": check_embeddings,
    "/v1/models": check_models,
    "/tokenize": check_tokens,
    "/tokenizer_info": check_tokenizer,
    "/health": check_health,
}


def has_node_client() -> bool:
    """Whether `require("openai")` works in Node; NODE_PATH may say where it is."""
    if (node := shutil.which("node")) is None:
        return False
    return subprocess.run([node, "-e", 'require.resolve("openai")'], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FLOWS, NODE])
def test_clients_pass_their_own_flows(live: Live, name: str) -> None:
    is_there = has_node_client() if name == NODE else importlib.util.find_spec(name.replace("-", "_")) is not None
    if not is_there:
        pytest.skip(f"{name} is not installed; its transcript is replayed")
    program = "node" if name == NODE else sys.executable
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command(name, program, live.url, str(live.folder)), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
