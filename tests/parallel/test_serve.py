"""`outpace serve --tp 2` and `--pp 2`: the same answers, and a server that heals when a rank is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import outpace
from outpace.server.python_api import Server
from tests.patience import PATIENCE
from tests.server.live import family, write_model

BODIES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 7, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 2},
    {"seed": 7, "n": 2, "logit_bias": {"64": 2}},
    {"temperature": 0, "guided_regex": "[a-c]{3}[0-9]+"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("serve") / "model"
    write_model(made)
    return made


@pytest.fixture(scope="module", params=["tensor_parallel_size", "pipeline_parallel_size"])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        options: dict[str, Any] = {request.param: 2, "template_processes": 1, "access_log": False}
        made = outpace.serve(folder, device="cpu", **options)
    with made:
        yield made
    assert made.process.returncode == 0


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def followers(server: Server) -> list[int]:
    """The processes of the other ranks."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family(server.process.pid)}
    return [pid for pid, command in commands.items() if b"outpace.ranks.follower" in command]


def test_answers_are_those_of_one_rank(folder: Path, http: httpx.Client) -> None:
    with outpace.serve(folder, device="cpu", template_processes=1, access_log=False) as alone:
        for body in BODIES:
            asked = {"prompt": "hello", "max_tokens": 12, **body}
            found = http.post("/v1/completions", json=asked).raise_for_status().json()
            wanted = httpx.post(f"{alone.url}/v1/completions", json=asked, timeout=PATIENCE).json()
            assert [each["text"] for each in found["choices"]] == [each["text"] for each in wanted["choices"]]
            assert found["usage"] == wanted["usage"]


def test_f2_a_killed_rank_is_replaced(server: Server, http: httpx.Client) -> None:
    asked = {"prompt": "hello", "max_tokens": 6, "temperature": 0}
    before = http.post("/v1/completions", json=asked).raise_for_status().json()["choices"]
    (other,) = followers(server)
    endless = {"prompt": "hello", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=endless) as response:
        events = response.iter_lines()
        assert next(events).startswith("data: ")
        os.kill(other, signal.SIGKILL)
        assert any('"error"' in event for event in events)
    while http.get("/health/ready").status_code != 200:
        pass
    assert http.get("/status").json()["restarts"] == 1
    assert http.post("/v1/completions", json=asked).raise_for_status().json()["choices"] == before
    assert len(followers(server)) == 1
    assert other not in followers(server)


def test_a_rank_that_is_killed_while_nothing_runs_is_replaced_too(server: Server, http: httpx.Client) -> None:
    restarts = http.get("/status").json()["restarts"]
    (other,) = followers(server)
    os.kill(other, signal.SIGKILL)
    while http.get("/status").json()["restarts"] == restarts or http.get("/health/ready").status_code != 200:
        pass
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
