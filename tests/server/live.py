"""A real server for tests of the API: `outpace serve` as a process, its engine process behind it, a socket before it.

The model is a tiny random Llama. Its tokens are bytes, so that tests can say which answer they force: `logit_bias` on
the token of "a" gives "aaa...". Its template shows everything that a request can give a template.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from tokenizers.processors import TemplateProcessing

import outpace
from outpace.server.python_api import Client, Server
from tests.models import byte_tokenizer, tiny
from tests.patience import PATIENCE

URL = "OUTPACE_TEST_URL"
"""In the environment, where a server of `OPTIONS` runs already, for tests of answers alone."""
RANKS = "OUTPACE_TEST_RANKS"
"""In the environment, how many ranks the server has: every test of the API passes with any number."""
REPLICAS = "OUTPACE_TEST_REPLICAS"
"""The same for how many replicas it has."""
NAMES = ("tiny", "org/tiny-alias")
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 4
BODY_TIMEOUT = 2.0
VOCAB = 258
END, BEGIN = 256, 257
A, B = 64, 65  # the tokens of "a" and "b"
OPTIONS: Mapping[str, Any] = {
    "device": "cpu",
    "served_model_name": list(NAMES),
    "max_num_seqs": MAX_NUM_SEQS,
    "template_processes": 1,
    "tool_call_parser": "hermes",
    "access_log": False,
    "allow_priority": True,
    "body_timeout": BODY_TIMEOUT,
}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for d in documents or [] %}[{{ d.text }}]{% endfor %}{{ mood }}"
    "{{ reasoning_effort }}{{ '!' if enable_thinking }}{{ verbosity }}"
    "{% for m in messages %}{{ m.role }}{{ '(' ~ m.name ~ ')' if m.name }}="
    "{{ '<' ~ m.reasoning_content ~ '>' if m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '#' ~ m.tool_call_id if m.tool_call_id }};{% endfor %}{% if add_generation_prompt %}assistant={% endif %}"
)


@dataclass(frozen=True)
class Live:
    """A running server."""

    client: Client
    folder: Path
    """Where its model is."""

    @property
    def server(self) -> Server:
        """Its process, if it was started here."""
        assert isinstance(self.client, Server), "another process has started it"
        return self.client

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.client.url

    @property
    def port(self) -> int:
        """Its port on this machine."""
        return int(self.url.rpartition(":")[2])

    def http(self) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE)

    def openai(self) -> OpenAI:
        """OpenAI's client."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def async_openai(self) -> AsyncOpenAI:
        """OpenAI's client for asyncio."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def rss(self) -> dict[int, int]:
        """Bytes of memory of each of its processes."""
        return {pid: rss(pid) for pid in family(self.server.process.pid)}

    def cpu_seconds(self) -> float:
        """Seconds that its processes have computed."""
        return sum(map(cpu_seconds, family(self.server.process.pid)))


def cpu_seconds(pid: int) -> float:
    """Seconds that a process has computed."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """A process and those that it started, by their ids."""
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found += family(int(child))
    return found


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def write_model(folder: Path) -> None:
    """The model and its tokenizer, which puts a token in front of texts."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, len(tokenizer)) == (END, BEGIN, VOCAB)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", BEGIN)]
    )
    tokenizer.chat_template = TEMPLATE
    model = tiny(
        *("llama",), vocab_size=VOCAB, max_position_embeddings=MAX_MODEL_LEN, eos_token_id=END, bos_token_id=BEGIN
    )
    model.config.matryoshka_dimensions = [8]
    with torch.no_grad():
        model.lm_head.weight[94:] = 0  # what is no printable ASCII is unlikely
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def started(folder: Path, **options: Any) -> Iterator[Live]:
    """A server with default limits, whose model is written to this folder; other options win over those here."""
    write_model(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OUTPACE_API_KEYS", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")  # more gain nothing, and spin on a busy machine
        named = {"tensor_parallel_size": RANKS, "replicas": REPLICAS}
        counts = {name: int(os.environ.get(variable, "1")) for name, variable in named.items()}
        server = outpace.serve(folder, **{**OPTIONS, **counts, **options})
    with server:
        made = Live(server, folder)
        with made.http() as client:
            client.post("/v1/completions", json={"prompt": "a", "guided_choice": ["a"]}).raise_for_status()
        yield made  # with all its processes, so that no test measures their start
    assert server.process.returncode == 0


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The server that tests share."""
    if url := os.environ.get(URL):
        with outpace.client(url) as client:
            yield Live(client, Path())
        return
    with started(tmp_path_factory.mktemp("live") / "model") as made:
        yield made
