"""The first seconds of `outpace serve`: what is imported where, what dies with what, what early clients get."""

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from outpace.server.placeholder import Placeholder
from tests.server.live import REPLICAS, Live

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 120  # seconds that something may take on a busy machine before it counts as never
HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "xgrammar", "huggingface_hub")
SLOW_TORCH = """
import os, signal
with open(os.environ["TELL"], "w") as file:
    file.write(str(os.getpid()))
while True:
    signal.pause()
"""
"""A module `torch` whose import never ends, and which says which process imports it."""


def python(code: str, *arguments: str, **environment: str) -> str:
    """What a program prints; it has this tree on its path."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def importing(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server, and the pid of its engine, which is in the middle of its imports and stays there."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(SLOW_TORCH)
    os.mkfifo(folder / "tell")
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = os.environ | {"TELL": str(folder / "tell"), "PYTHONPATH": path, "OUTPACE_CACHE": str(folder)}
    command = [sys.executable, "-c", "from outpace.cli import main; main()", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as server:
        try:
            yield server, int((folder / "tell").read_text())
        finally:
            server.kill()


def test_item_12_an_engine_that_imports_dies_with_its_server(tmp_path: Path) -> None:
    with importing(tmp_path) as (server, engine):
        assert engine != server.pid
        watched = os.pidfd_open(engine)
        try:
            server.send_signal(signal.SIGKILL)
            assert select.select([watched], [], [], PATIENCE)[0], "the engine outlives its server"
        finally:
            os.close(watched)


def test_item_12_an_engine_whose_server_is_gone_already_ends_before_it_imports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outpace.server.engine_process", "0", "1"]  # 1 is not its parent
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=PATIENCE, check=False)
    assert done.returncode == 4


@pytest.mark.parametrize("arguments", [("--help",), ("--prot", "80"), ("--dtype", "int4"), ("--port", "x")], ids=str)
def test_item_16_help_and_wrong_options_import_little(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom outpace.cli import main\nsys.argv[0] = 'outpace'\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        f"print(code, sorted(set(sys.modules) & set({HEAVY})))"
    )
    last = python(code, "serve", *arguments).splitlines()[-1]
    assert last == f"{0 if arguments == ('--help',) else last[0]} []"
    assert (last[0] == "0") == (arguments == ("--help",))


def test_item_16_info_does_not_wait_for_transformers() -> None:
    code = (
        "import sys\nfrom outpace.cli import main\nsys.argv = ['outpace', 'info']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nprint('transformers' in sys.modules)"
    )
    assert python(code).splitlines()[-1] == "False"


def test_item_16_the_engine_is_launched_before_the_http_side_is_imported() -> None:
    code = (
        "import sys\nfrom outpace.server import supervisor\nfrom outpace.server.options import ServerConfig\n"
        "from outpace.server.launch import launch\n"
        "async def process(sock):\n"
        f"    print(sorted(set(sys.modules) & set({HEAVY})))\n    raise OSError('that is enough')\n"
        "supervisor._process = process\n"
        "print(launch(None, {'dtype': 'bf16', 'gpu_memory_utilization': 0.5}, ServerConfig(port=0)))"
    )
    assert python(code).splitlines() == ["[]", "1"]


def test_item_16_what_answers_first_needs_neither_fastapi_nor_transformers() -> None:
    code = f"import sys, outpace.server.lifetime\nprint(sorted(set(sys.modules) & (set({HEAVY}) - {{'uvicorn'}})))"
    assert python(code) == "[]\n"


def test_item_16_the_http_process_has_no_torch(live: Live) -> None:
    """Though it has made tokens, text and a grammar by now."""
    pid = live.server.process.pid
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert "tokenizers" in mapped or REPLICAS in os.environ, "this is not where libraries show"
    assert "libtorch" not in mapped


def test_item_16_tokenizers_are_the_same_without_torch(chain_folder: Path) -> None:
    code = (
        "import json, sys\nfrom outpace.loading.read_tokenizer import import_without_torch, load_tokenizer\n"
        "import_without_torch()\nfound = load_tokenizer(sys.argv[1])\n"
        "assert 'torch' not in sys.modules\n"
        "chat = found.apply_chat_template([{'role': 'user', 'content': 'a'}], tokenize=False)\n"
        "ids = found(sys.argv[2])['input_ids']\n"
        "print(json.dumps([type(found).__name__, ids, found.decode(ids), chat, found.special_tokens_map]))"
    )
    text = "Zwölf Boxkämpfer <|end|> 🥊"
    name, ids, decoded, chat, special = json.loads(python(code, str(chain_folder), text))
    here = AutoTokenizer.from_pretrained(chain_folder)
    assert name == type(here).__name__
    assert ids == here(text)["input_ids"]
    assert decoded == here.decode(ids)
    assert chat == here.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert special == here.special_tokens_map


def test_item_16_the_parts_of_a_start_add_up_to_what_a_clock_shows(chain_folder: Path) -> None:
    command = [sys.executable, "-c", "from outpace.cli import main; main()", "serve", str(chain_folder), "--port", "0"]
    begin = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if " is ready (" in line)
            clock = time.monotonic() - begin
        finally:
            process.kill()
    parts = {name: float(took) for name, took in re.findall(r"(\w+) ([\d.]+) s\b", line)}
    total = parts.pop("all")
    assert {"start", "imports", "load", "http"} <= parts.keys()
    assert sum(parts.values()) == pytest.approx(total, abs=0.01 * (len(parts) + 1))
    assert total <= clock + 0.02, "the system counts in hundredths of a second"
    assert total > 0.8 * clock, "something was left out"


async def _asked(path: str, method: str = "GET", **headers: str) -> tuple[dict[str, Any], bytes]:
    """The head and the body of what is answered while the server starts."""
    front = Placeholder(lambda: "loading the <weights>", retry_after=3)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    await front({"type": "http", "method": method, "path": path, "headers": named}, receive, send)
    head = {name.decode(): value.decode() for name, value in sent[0]["headers"]} | {"status": sent[0]["status"]}
    return head, b"".join(message.get("body", b"") for message in sent[1:])


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_item_16_a_browser_that_comes_early_gets_a_page_that_waits(path: str) -> None:
    head, body = asyncio.run(_asked(path, accept=BROWSER))
    assert (head["status"], head["retry-after"]) == (503, "3")
    assert head["content-type"].startswith("text/html")
    assert head["cache-control"] == "no-store"
    assert b'http-equiv="refresh"' in body
    assert b"loading the &lt;weights&gt;" in body


@pytest.mark.parametrize(
    ("path", "method", "accept"),
    [
        ("/", "GET", "*/*"),
        ("/v1/models", "GET", "application/json"),
        ("/v1/chat/completions", "POST", BROWSER),
        ("/v1/models", "GET", ""),
    ],
)
def test_item_16_programs_that_come_early_get_json(path: str, method: str, accept: str) -> None:
    head, body = asyncio.run(_asked(path, method, accept=accept))
    assert (head["status"], head["retry-after"]) == (503, "3")
    assert json.loads(body)["error"]["code"] == "starting"
