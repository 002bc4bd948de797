"""`outpace serve` with layers on disk and pages in host memory: the resident answers, whatever the disk does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import outpace
from outpace.server.python_api import Server
from tests.offload.placed import deep, offload_at
from tests.patience import PATIENCE
from tests.server.live import END, MAX_MODEL_LEN, VOCAB, write_model

BODIES: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 3},
    {"seed": 7, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 2},
    {"seed": 7, "n": 2, "logit_bias": {"64": 2}},
    {"temperature": 0, "guided_regex": "[a-c]{3}[0-9]+"},
]
LONG = "the same words again and again " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("offload") / "model"
    write_model(made)
    model().save_pretrained(made)
    return made


def model() -> Any:
    return deep("llama", vocab_size=VOCAB, max_position_embeddings=MAX_MODEL_LEN, eos_token_id=END)


def start(folder: Path, **options: Any) -> Server:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return outpace.serve(folder, device="cpu", template_processes=1, access_log=False, block_size=16, **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def server(folder: Path, files: Path) -> Iterator[Server]:
    """As with --offload-device-memory, --offload-host-memory, --offload-nvme and --kv-offloading-size."""
    options = {f"offload_{name}": value for name, value in offload_at("disk", model(), files).items()}
    made = start(folder, **options, kv_offloading_size=0.001, num_blocks=16)
    with made:
        yield made
    assert made.process.returncode == 0


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def figures(http: httpx.Client) -> dict[str, float]:
    lines = http.get("/metrics").raise_for_status().text.splitlines()
    pairs = (line.removeprefix("outpace:").rpartition(" ") for line in lines if line.startswith("outpace:"))
    return {name.removesuffix("}").removesuffix(',model_name="model"'): float(value) for name, _, value in pairs}


def test_answers_are_those_of_the_resident_model(folder: Path, files: Path, http: httpx.Client) -> None:
    with start(folder) as resident:
        for body in BODIES:
            asked = {"prompt": "hello", "max_tokens": 12, **body}
            found = http.post("/v1/completions", json=asked).raise_for_status().json()
            wanted = httpx.post(f"{resident.url}/v1/completions", json=asked, timeout=PATIENCE).json()
            assert found["choices"] == wanted["choices"]
            assert found["usage"] == wanted["usage"]
    assert len(list(files.iterdir())) == 1, "its layers"


def test_levels_are_in_the_metrics(http: httpx.Client) -> None:
    for word in ("one", "two", "three", "one"):
        http.post("/v1/completions", json={"prompt": word + LONG, "max_tokens": 2}).raise_for_status()
    found = figures(http)
    assert found['prefix_cache_level_hits_total{level="host"'] > 0
    assert found['kv_offload_bytes_total{model_name="model",way="load"'] > 0
    assert found['kv_offload_blocks{level="host"'] > 16


def test_f9_a_damaged_file_costs_its_requests_and_not_the_server(
    server: Server, files: Path, http: httpx.Client
) -> None:
    asked = {"prompt": "hello", "max_tokens": 6, "temperature": 0}
    wanted = http.post("/v1/completions", json=asked).raise_for_status().json()["choices"]
    (path,) = files.iterdir()
    whole = path.read_bytes()
    alter(path, whole[-20_000:-8000], b"\0" * 12_000)
    answer = http.post("/v1/completions", json=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
    alter(path, b"", whole)
    assert http.post("/v1/completions", json=asked).raise_for_status().json()["choices"] == wanted, "whole again"
    assert http.get("/status").json()["restarts"] == 0
    alter(path, b"", b"\0" * len(whole))
    with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response:
        assert '"error"' in "".join(response.iter_text())
    answer = http.post("/v1/completions", json=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
    while http.get("/health/ready").status_code != 200 or http.get("/status").json()["restarts"] == 0:
        pass  # an engine that fails twice in a row is started anew, and so is the file
    assert http.post("/v1/completions", json=asked).raise_for_status().json()["choices"] == wanted
    assert [each.read_bytes() for each in files.iterdir()] == [whole]


def alter(path: Path, at: bytes, new: bytes) -> None:
    """Write into a file, from where some bytes are."""
    place = path.read_bytes().index(at)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(new)
