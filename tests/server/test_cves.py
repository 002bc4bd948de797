"""B-2: what has broken other servers, tried on this one.

The catalogue is in tables by advisory: `REQUESTS`, asked of a real server; `ELSEWHERE`, tests by name; `NOT_HERE`,
what this server does not have. A refusal comes in less than a second, costs no memory, and hurts nobody else.
"""

import ast
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import outpace
from outpace.errors import ModelError
from outpace.loading.build import load
from tests.cli.command import run
from tests.models import byte_tokenizer, tiny
from tests.server.conftest import Serve
from tests.server.live import NAMES, RANKS, REPLICAS, VOCAB, Live, family

pytestmark = pytest.mark.anyio
SECONDS = 1.0  # of the server's processors: other tests may run meanwhile
MEMORY = 50 * 2**20
COMPLETIONS, CHAT, EMBEDDINGS, MII = "/v1/completions", "/v1/chat/completions", "/v1/embeddings", f"/mii/{NAMES[0]}"
HI = {"role": "user", "content": "hi"}
INTERNAL = "http://127.0.0.1:9/latest/meta-data"
PICKLE = "gASVHAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAJpZJSFlFKULg=="  # os.system("id")

Request = tuple[str, Any, int, str | None]
"""Path, body (JSON, or text as it is), status, the field that is named."""


def part(kind: str, value: object) -> dict[str, Any]:
    """A chat with something beside text."""
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: value}]}]}


def media(kind: str, value: object) -> list[Request]:
    """It is refused before anybody looks at it."""
    return [(CHAT, part(kind, value), 400, "messages[0].content")]


def with_field(name: str, *values: object, paths: Sequence[str] = (COMPLETIONS, CHAT)) -> list[Request]:
    """The same field with each of the values on each of the routes."""
    return [(path, {**right_body(path), name: value}, 400, name) for path in paths for value in values]


def right_body(path: str) -> dict[str, Any]:
    bodies: Mapping[str, dict[str, Any]] = {CHAT: {"messages": [HI]}, EMBEDDINGS: {"input": "a"}, MII: {"prompts": "a"}}
    return bodies.get(path, {"prompt": "a"})


def raw(name: str, literal: str) -> list[Request]:
    """A number that JSON does not have."""
    return [(COMPLETIONS, f'{{"prompt": "a", "{name}": {literal}}}', 400, None)]


def absent(*paths: str) -> list[Request]:
    """Nobody answers there."""
    return [(path, {}, 404, None) for path in paths]


EMPTY: Sequence[Any] = ("", [], [[]])
REQUESTS: Mapping[str, list[Request]] = {
    # A. Code from a request
    "CVE-2025-62164": with_field("prompt_embeds", PICKLE, [PICKLE], [[0.0] * 32]),
    "CVE-2026-56340": media("image_embeds", PICKLE) + media("audio_embeds", PICKLE),
    "CVE-2025-10164": absent("/update_weights_from_tensor", "/update_weights_from_disk", "/collective_rpc"),
    "CVE-2023-48022": absent("/api/jobs/", "/terminate", "/sleep", "/reset_prefix_cache", "/v1/load_lora_adapter"),
    "CVE-2026-22778": media("video_url", {"url": INTERNAL}),
    "CVE-2026-4944": with_field("trust_remote_code", True) + with_field("code_revision", "main"),
    # B. One request stops the service
    "CVE-2024-8768": [
        *((COMPLETIONS, {"prompt": prompt, "add_special_tokens": False}, 400, "prompt") for prompt in EMPTY),
        *((EMBEDDINGS, {"input": prompt, "add_special_tokens": False}, 400, "input") for prompt in EMPTY),
        *((MII, {"prompts": prompt}, 400, "prompts") for prompt in EMPTY),
        (CHAT, {"messages": []}, 400, "messages"),
    ],
    "CVE-2024-8939": with_field("best_of", 10**9),
    "CVE-2026-34756": with_field("n", 17, 10**6, 10**18, 10**400),
    "CVE-2026-73559": [
        (COMPLETIONS, {"prompt": ["a"] * 100_000}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [[1]] * 100_000}, 400, "prompt"),
        (EMBEDDINGS, {"input": ["a"] * 100_000}, 400, "input"),
        (MII, {"prompts": ["a"] * 100_000}, 400, "prompts"),
        (CHAT, {"messages": [HI] * 10_000}, 400, "messages"),
    ],
    "PYSEC-2026-4350": [
        *with_field("logprob_token_ids", list(range(200))),
        *with_field("prompt_logprobs", 21, 129),
        *with_field("logprobs", 21, 129, paths=[COMPLETIONS]),
        (CHAT, {"messages": [HI], "logprobs": True, "top_logprobs": 129}, 400, "top_logprobs"),
    ],
    "CVE-2026-114051": [
        *(
            (path, {**right_body(path), "max_tokens": 4, "min_tokens": 5}, 400, "min_tokens")
            for path in (COMPLETIONS, CHAT)
        ),
        (MII, {"prompts": "a", "max_new_tokens": 4, "min_new_tokens": 5}, 400, "min_new_tokens"),
    ],
    "CVE-2026-105756": with_field("cache_salt", "", 5, [], "s" * 300),
    "CVE-2026-105922": [
        (COMPLETIONS, {"prompt": [VOCAB], "repetition_penalty": 1.5}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [-1], "presence_penalty": 1}, 400, "prompt"),
        *with_field("presence_penalty", 1e308, -3),
        *with_field("frequency_penalty", 1e308, True),
    ],
    "PYSEC-2026-2303": with_field("prompt_embeds", {"data": PICKLE}),
    "CVE-2025-46560": [(CHAT, {"messages": [{"role": "user", "content": "<|end|>" * 20_000}]}, 400, "messages")],
    "CVE-2025-62372": media("image_embeds", [[0.0]]),
    "CVE-2026-22773": media("image_url", {"url": "data:image/png;base64,iVBORw0KGgo="}),
    "PYSEC-2026-4353": media("image_url", {"url": "data:,"}),
    "CVE-2025-61620": with_field("chat_template", "{% for i in range(10**9) %}x{% endfor %}", paths=[CHAT]),
    "CVE-2025-62426": [
        (CHAT, {"messages": [HI], "chat_template_kwargs": {name: True}}, 400, "chat_template_kwargs")
        for name in ("tokenize", "chat_template", "messages", "add_generation_prompt")
    ],
    "CVE-2026-115911": with_field(
        "chat_template", "{{ 'a' * 10**9 }}", "{{ cycler.__init__.__globals__ }}", paths=[CHAT]
    ),
    "PYSEC-2026-4349": [(CHAT, {"messages": [HI], "chat_template_kwargs": {"mood": "m" * 10**6}}, 400, "messages")],
    "CVE-2026-34755": media("video_url", {"url": "data:video/mp4;base64,AAAA"}),
    "CVE-2026-54233": media("input_audio", {"data": "AAAA", "format": "opus"}),
    "CVE-2026-105758": media("video_url", {"url": "data:,", "fps": 10**9})
    + with_field("mm_processor_kwargs", {"fps": 1}),
    "CVE-2026-105760": with_field("media_io_kwargs", {"video": {"num_frames": 10**9}}),
    "CVE-2025-33201": [
        (COMPLETIONS, '{"prompt": "' + "a" * 3 * 2**20 + '"}', 413, None),
        (COMPLETIONS, '{"prompt": "a"', 400, None),
    ],
    "CVE-2026-24173": [("/v1/models/..%2f..%2f..%2fetc%2fpasswd", None, 404, "model")],
    "CVE-2026-24208": [
        ("/web/..%2foptions.py", None, 404, None),
        ("/web/%2e%2e/options.py", None, 404, None),
        (COMPLETIONS, {"prompt": "a", "model": "../../etc/passwd"}, 404, "model"),
    ],
    "vllm d598d23": [
        *(
            each
            for name in ("temperature", "repetition_penalty")
            for value in ("NaN", "Infinity")
            for each in raw(name, value)
        ),
        *raw("top_p", "-Infinity"),
        *raw("min_p", "NaN"),
    ],
    "vllm 4d546fd": [
        *with_field("allowed_token_ids", [VOCAB], [-1], [2**31], [2**63], []),
        *with_field("stop_token_ids", [VOCAB], [2**63]),
        *with_field("logit_bias", {str(VOCAB): 1}, {"-1": 1}),
    ],
    "vllm 83752a8": [(COMPLETIONS, {"prompt": "a", name * 10**5: 1}, 400, None) for name in ("a_", "a.", "[", "a: ")],
    # C. Disclosure
    "CVE-2025-6242": media("image_url", {"url": INTERNAL}),
    "CVE-2026-24779": media("image_url", {"url": "http://example.com\\@127.0.0.1:9/"}),
    "vllm a69c166": media("image_url", {"url": "http:\\\\127.0.0.1:9\\@example.com"}),
}

ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(
        [
            *("CVE-2024-50050", "CVE-2024-9052", "CVE-2024-9053", "CVE-2024-11041", "CVE-2025-23254", "CVE-2025-9141"),
            *("CVE-2026-3059", "CVE-2026-3060", "CVE-2026-3989"),
        ],
        "test_cves.py::test_b2_nothing_is_unpickled_or_evaluated",
    ),
    **dict.fromkeys(
        ["CVE-2025-29783", "CVE-2025-32444", "CVE-2025-30165", "CVE-2025-47277", "CVE-2025-30202", "CVE-2026-94624"],
        "test_cves.py::test_b2_one_port_and_no_other",
    ),
    **dict.fromkeys(
        [
            *("CVE-2024-43497", "CVE-2025-24357", "GHSA-ggpf-24jw-3fcw", "CVE-2025-32434", "CVE-2026-24747"),
            *("CVE-2025-66448", "CVE-2026-22807"),
        ],
        "test_cves.py::test_b2_a_model_brings_no_code",
    ),
    "CVE-2026-5760": "test_cves.py::test_b2_the_template_of_a_model_is_in_the_sandbox",
    "CVE-2026-0599": "test_cves.py::test_b2_nothing_is_fetched",
    "CVE-2026-9540": "test_cves.py::test_b2_nothing_is_left_behind",
    "CVE-2025-48956": "test_limits.py::test_b3_bytes_that_are_no_request",
    "CVE-2025-23310": "test_limits.py::test_b3_three_megabytes_of_single_bytes",
    "CVE-2025-23311": "test_limits.py::test_b3_three_megabytes_of_single_bytes",
    "CVE-2025-23319": "test_limits.py::test_errors_carry_no_paths",
    "CVE-2025-23320": "test_limits.py::test_errors_carry_no_paths",
    "CVE-2025-23334": "test_limits.py::test_errors_of_other_routes_carry_no_paths",
    "CVE-2025-48887": "test_tools.py::test_b2_a_long_answer_takes_time_in_proportion",
    "CVE-2025-59425": "test_auth.py::test_b11_every_key_is_compared",
    "CVE-2025-46570": "test_openai_client.py::test_each_option_has_its_effect",  # cache_salt
    "CVE-2025-25183": "test_cves.py::test_b2_prefixes_are_known_by_a_hash_that_nobody_can_forge",
    "vllm cache_salt in external keys": "test_cves.py::test_b2_prefixes_are_known_by_a_hash_that_nobody_can_forge",
    "vllm 57861ae": "test_cves.py::test_b2_a_batch_cannot_name_another_server",
    "control endpoints": "test_auth.py::test_b11_every_route_but_health_needs_a_key",
}

STRUCTURED = frozenset(
    {
        *("CVE-2025-48942", "CVE-2025-48943", "CVE-2025-48944", "CVE-2026-105757", "PYSEC-2026-2304"),
        *("CVE-2025-57809", "CVE-2025-58446", "CVE-2025-29770", "CVE-2025-32381"),
    }
)
"""Grammars and schemas: tests/server/test_structured.py."""

NOT_HERE: Mapping[str, str] = {
    "CVE-2026-4538": "PyTorch's pt2 archives are not read",
    "CVE-2026-47155": "there is no revision to pin: a model is a folder, a file or a cached name",
    "CVE-2026-65110": "nothing is trained: training checkpoints are not read",
    "CVE-2026-31221": "nothing is trained: training checkpoints are not read",
    "CVE-2026-31253": "nothing is trained: training checkpoints are not read",
    "vllm 173bd8": "M-RoPE models take images, which this server does not",
    "CVE-2025-46722": "images are not taken, so none is hashed",
    "vllm a84de30": "GPTQ checkpoints are not read",
    "vllm f219788": "GGUF files are dequantised by NumPy, whose sizes are 64 bits wide",
    "ZDI-CAN-28091": "of DeepSpeed, and not published; its pickled files are not read",
    "ZDI-CAN-29214": "of DeepSpeed, and not published; its pickled files are not read",
}

CATALOGUE = frozenset(
    {
        *("CVE-2024-43497", "ZDI-CAN-28091", "ZDI-CAN-29214", "CVE-2024-50050", "CVE-2024-9052", "CVE-2024-9053"),
        *("CVE-2024-11041", "CVE-2025-29783", "CVE-2025-32444", "CVE-2025-30165", "CVE-2025-47277", "CVE-2025-23254"),
        *("CVE-2025-10164", "CVE-2026-3059", "CVE-2026-3060", "CVE-2026-3989", "CVE-2025-24357", "GHSA-ggpf-24jw-3fcw"),
        *("CVE-2025-32434", "CVE-2026-24747", "CVE-2026-4538", "CVE-2025-62164", "CVE-2026-56340", "CVE-2025-9141"),
        *("CVE-2025-66448", "CVE-2026-22807", "CVE-2026-4944", "CVE-2026-47155", "CVE-2026-5760", "CVE-2026-22778"),
        *("CVE-2025-23310", "CVE-2025-23311", "CVE-2025-23319", "CVE-2025-23320", "CVE-2025-23334", "CVE-2023-48022"),
        *("CVE-2026-65110", "CVE-2026-31221", "CVE-2026-31253"),
        *("CVE-2024-8768", "CVE-2024-8939", "CVE-2026-34756", "CVE-2026-73559", "PYSEC-2026-4350", "CVE-2026-114051"),
        *("CVE-2026-105757", "CVE-2026-105756", "CVE-2026-105922", "PYSEC-2026-2303", "vllm 173bd8", "CVE-2025-48942"),
        *("CVE-2025-48943", "CVE-2025-48944", "PYSEC-2026-2304", "CVE-2025-48887", "vllm 83752a8", "CVE-2025-57809"),
        *("CVE-2025-58446", "CVE-2025-29770", "CVE-2025-32381", "CVE-2025-46560", "CVE-2025-62372", "CVE-2026-22773"),
        *("PYSEC-2026-4353", "CVE-2025-61620", "CVE-2025-62426", "CVE-2026-115911", "PYSEC-2026-4349"),
        *("CVE-2025-48956", "CVE-2026-9540", "CVE-2026-34755", "CVE-2026-54233", "CVE-2026-105758", "CVE-2026-105760"),
        *("CVE-2026-94624", "CVE-2025-30202", "CVE-2026-0599", "CVE-2025-33201", "CVE-2026-24173", "CVE-2026-24208"),
        *("vllm d598d23", "vllm 4d546fd", "vllm a84de30", "vllm f219788"),
        *("CVE-2025-6242", "CVE-2026-24779", "vllm a69c166", "vllm 57861ae", "CVE-2025-59425", "CVE-2025-46570"),
        *("CVE-2025-25183", "CVE-2025-46722", "vllm cache_salt in external keys", "control endpoints"),
    }
)


def test_b2_the_tables_are_the_catalogue() -> None:
    tables = [*REQUESTS, *ELSEWHERE, *STRUCTURED, *NOT_HERE]
    assert sorted(tables) == sorted(CATALOGUE)
    folder = Path(__file__).parent
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (folder / file).read_text(), place


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    """A client; after all requests the server has not grown and not restarted."""
    with live.http() as client:
        probe(client)
        for _ in range(3):  # what the allocator keeps for a long text is there before
            client.post(CHAT, json={"messages": [{"role": "user", "content": "m" * 10**6}]})
        before = live.rss()
        yield client
        probe(client)
        grown = {pid: size - before[pid] for pid, size in live.rss().items() if pid in before}
        assert max(grown.values()) < MEMORY, grown


def probe(client: httpx.Client) -> None:
    """The engine answers, and it is the one that was started."""
    answer = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 2)
    assert client.get("/status").json()["restarts"] == 0


@pytest.mark.parametrize("name", REQUESTS)
def test_b2_is_refused(live: Live, client: httpx.Client, name: str) -> None:
    for path, body, status, param in REQUESTS[name]:
        content = body if isinstance(body, str) else json.dumps(body)
        data: Any = {} if body is None else {"content": content, "headers": {"content-type": "application/json"}}
        begin = live.cpu_seconds()
        answer = client.request("GET" if body is None else "POST", path, **data)
        assert live.cpu_seconds() - begin < SECONDS, (path, content[:100])
        assert answer.status_code == status, (path, content[:100], answer.text[:300])
        error = answer.json()["error"]
        assert len(answer.content) < 2000
        if param is not None:
            assert str(error["param"]).partition("[")[0] == param.partition("[")[0], error
            assert param.partition("[")[0] in error["message"]
    probe(client)


def test_b2_nothing_is_left_behind(client: httpx.Client) -> None:
    while (status := client.get("/status").json())["running"] or status["waiting"]:
        time.sleep(0.01)
    assert status["free_blocks"] <= status["num_blocks"]


def test_b2_nothing_is_fetched(client: httpx.Client) -> None:
    """An address in a text is text."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        text = f"![x]({url}) <img src='{url}'>"
        answer = client.post(CHAT, json={"messages": [{"role": "user", "content": text}], "max_tokens": 1})
        assert answer.status_code == 200
        assert client.post(CHAT, json=part("image_url", {"url": url})).status_code == 400
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_b2_one_port_and_no_other(live: Live) -> None:
    """The server's processes listen in one place, on this machine alone, and speak through sockets without names."""
    inodes = set()
    for pid in family(live.server.process.pid):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = str(link.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    listening = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{live.server.process.pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[9] in inodes and (columns[3] == "0A" or table.startswith("udp")):
                listening.append((table, columns[1]))
    assert ("tcp", f"0100007F:{live.port:04X}") in listening
    assert len(listening) == 1 or RANKS in os.environ, listening
    assert all(address.startswith("0100007F:") for _, address in listening), "ranks find each other on this machine"
    for line in Path(f"/proc/{live.server.process.pid}/net/unix").read_text().splitlines()[1:]:
        columns = line.split()
        if REPLICAS not in os.environ:  # those have names, in a folder of this user's alone
            assert columns[6] not in inodes or len(columns) == 7, line  # the eighth would be a name to connect to


FORBIDDEN_MODULES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "zmq"})
FORBIDDEN_CALLS = frozenset(
    {
        *("eval", "exec", "compile", "__import__", "torch.load", "torch.package", "torch.hub.load", "os.system"),
        *("os.popen", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load", "importlib.import_module"),
    }
)
FALSE_ALONE = frozenset({"trust_remote_code", "allow_pickle", "shell"})
FORBIDDEN_LOADERS = frozenset({"UnsafeLoader", "FullLoader", "CLoader"})
FOR_ERRORS = frozenset({"pickle.UnpicklingError"})
"""What another library may raise has to be named to be caught."""


def package() -> Iterator[tuple[str, ast.Module]]:
    root = Path(outpace.__file__).parent
    for path in sorted(root.rglob("*.py")):
        yield str(path.relative_to(root)), ast.parse(path.read_text(encoding="utf-8"))


def _only_weights(call: ast.Call) -> bool:
    """torch.load with weights_only=True written out runs no code of a file: tests/loading/test_open_torch.py tries."""
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return ast.unparse(call.func) == "torch.load" and given.get("weights_only") == "True"


def test_b2_nothing_is_unpickled_or_evaluated() -> None:
    found, connections = [], []
    for name, tree in package():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FORBIDDEN_MODULES:
                found.append((name, node.lineno, node.module))
            elif isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                if text.rpartition(".")[2] in FORBIDDEN_LOADERS or (
                    text.partition(".")[0] in FORBIDDEN_MODULES and text not in FOR_ERRORS
                ):
                    found.append((name, node.lineno, text))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS and not _only_weights(node):
                found.append((name, node.lineno, ast.unparse(node.func)))
            elif isinstance(node, ast.keyword) and node.arg in FALSE_ALONE and ast.unparse(node.value) != "False":
                found.append((name, node.lineno, node.arg))
            elif isinstance(node, ast.Name) and node.id in FORBIDDEN_LOADERS:
                found.append((name, node.lineno, node.id))
        source = ast.unparse(tree)
        if "multiprocessing.connection" in source:  # its send and recv pickle, send_bytes and recv_bytes do not
            connections.append(name)
            found += [(name, 0, call) for call in ("connection.send(", "connection.recv(") if call in source]
    assert found == []
    assert connections, "the check of connections has found nothing to check"


def test_b2_templates_are_compiled_in_the_sandbox_alone() -> None:
    makers = [
        (name, ast.unparse(node.func))
        for name, tree in package()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].endswith("Environment")
    ]
    assert {maker for _, maker in makers} == {"ImmutableSandboxedEnvironment"}


class Harm:
    """An object whose unpickling leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["pickled weights", "code of its own", "code of its own tokenizer"])
def test_b2_a_model_brings_no_code(tmp_path: Path, kind: str) -> None:
    import torch

    canary, folder = tmp_path / "canary", tmp_path / "model"
    tiny("llama").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if kind == "pickled weights":
        (folder / "model.safetensors").unlink()
        torch.save({"a": Harm(canary)}, folder / "pytorch_model.bin")
    else:
        own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.T", None]}
        (folder / "own.py").write_text(f"open({str(canary)!r}, 'w')")
        config |= {"auto_map": own, "model_type": "own" if kind == "code of its own" else "llama"}
        (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": own, "tokenizer_class": "T"}))
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        load(folder)
    assert not canary.exists()


async def test_b2_the_template_of_a_model_is_in_the_sandbox(serve: Serve, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    tokenizer = byte_tokenizer()
    for payload in (
        "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
        "{{ self.__init__.__globals__.__builtins__.open('CANARY', 'w') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    ):
        tokenizer.chat_template = payload.replace("CANARY", str(canary))
        answer = await serve(tokenizer=tokenizer).post(CHAT, {"messages": [HI]})
        assert answer.status_code == 400, answer.text
        assert str(tmp_path) not in answer.text
    assert not canary.exists()


def test_b2_prefixes_are_known_by_a_hash_that_nobody_can_forge() -> None:
    from outpace.cache.block_pool import block_hashes

    hashes = {salt: block_hashes(list(range(64)), 16, salt=salt) for salt in ("", "a", "b")}
    assert all(len(each) == 32 for found in hashes.values() for each in found)
    assert len({each for found in hashes.values() for each in found}) == 12
    assert block_hashes([*range(63), 99], 16, salt="a")[:3] == hashes["a"][:3]


def test_b2_a_batch_cannot_name_another_server(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    urls = ("http://127.0.0.1:9/v1/completions", "//127.0.0.1:9/v1/completions", "/v1/../metrics", "\\\\x@127.0.0.1:9")
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": {"prompt": "a"}}
        for number, url in enumerate(urls)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        result = run("run-batch", source, target, "--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert result.exit_code == 1
        with pytest.raises(BlockingIOError):
            listener.accept()
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(answers) == len(urls)
    assert all(answer["response"] is None and "url" in answer["error"]["message"] for answer in answers)
