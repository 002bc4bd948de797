"""The cost of HTTP: runs the same requests through `outpace serve` and through `LLM` in this process, in turns.

Without a GPU the model is SmolLM2; with one, a shape with random weights, written to a folder and loaded from there.
Both sides run all the time and take turns. The best turn counts for tokens/s, the median for the first token.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import outpace
from bench import report
from bench.report import DEVICE, Found, Report, Row, row
from outpace.bench.drive import run
from outpace.bench.figures import Run, Trace
from outpace.bench.load import Pace, Target, load
from outpace.bench.serve import Server, find
from outpace.bench.shapes import SHAPES, build
from outpace.bench.workload import Item, latency_prompt, like, uniform
from outpace.errors import OutpaceError
from outpace.loading.default_model import default_model_path

ALONE = 20  # requests that come one at a time
FIRST_TOKEN_PROMPT = 128
VOCAB = 32000  # prompts have token ids below this


@dataclass(frozen=True)
class Plan:
    """The work for a kind of device."""

    streams: tuple[int, ...]
    per_stream: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    turns: int
    options: dict[str, Any]


PLANS = {
    "cpu": Plan((32,), 1, (16, 128), (64, 128), 3, {"max_model_len": 512, "dtype": "fp32"}),
    "cuda": Plan((32, 256), 2, (64, 1024), (64, 512), 3, {"max_model_len": 4096, "dtype": "bf16", "num_blocks": 4500}),
}


@contextmanager
def folder_of(model: str, device: torch.device) -> Iterator[Path]:
    """A folder with the model: the default model, a folder, or a shape with random weights and a token for every id."""
    if model not in SHAPES:
        yield default_model_path() if model == "default" else Path(model)
        return
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name) / model
        module: Any = build(model, torch.bfloat16, device)
        module.save_pretrained(folder)
        words = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
        words += [f"Ġw{number}" for number in range(module.config.vocab_size - len(words))]
        made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
        del module
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield folder


def through_http(server: Server, items: Sequence[Item], streams: int) -> Run[Trace]:
    """Run requests through the server; one that fails ends the measurement."""
    pace = Pace(max_concurrency=streams)
    found = asyncio.run(load(server.target, [server.request(item) for item in items], pace, 0))
    failed = next((trace for trace in found.traces if trace.error), None)
    if failed is not None:
        raise OutpaceError(f"a request failed: {failed.error}")
    return found


def measure(model: str, device: torch.device) -> Found:
    """Measure both sides with one model."""
    plan = PLANS[device.type]
    with folder_of(model, device) as folder:
        options = {**plan.options, "enable_prefix_caching": False}
        llm = outpace.LLM(folder, device=str(device), **options)
        with outpace.serve(folder, device=str(device), access_log=False, **options) as served:
            server = find(Target(f"{served.url}/v1"), None, {"ignore_eos": True})
            rows = [_throughput(model, llm, server, plan, streams) for streams in plan.streams]
            rows.append(_first_token(model, llm, server, plan))
        llm.shutdown()
    return rows, None


def _throughput(model: str, llm: outpace.LLM, server: Server, plan: Plan, streams: int) -> Row:
    items = uniform(VOCAB, plan.per_stream * streams, prompt=plan.prompt, output=plan.output)
    total = sum(item.output_len for item in items)
    inside, outside = [], []
    warm_up = like(items[:streams], VOCAB, 1)
    run(llm.engine, warm_up, streams)
    through_http(server, warm_up, streams)
    for turn in range(plan.turns):
        again = like(items, VOCAB, 2 + turn)
        inside.append(total / run(llm.engine, again, streams).seconds)
        outside.append(total / through_http(server, again, streams).seconds)
    what = f"{model}: output, {streams} streams"
    return row(what, max(outside), "tok/s", None, ("in process", max(inside)))


def _first_token(model: str, llm: outpace.LLM, server: Server, plan: Plan) -> Row:
    items = [Item(latency_prompt(VOCAB, FIRST_TOKEN_PROMPT, number), 8) for number in range(ALONE)]
    inside, outside = [], []
    run(llm.engine, items[:2], 1)
    through_http(server, items[:2], 1)
    for _ in range(plan.turns):
        inside += [trace.ttft for trace in run(llm.engine, items, 1).traces]
        outside += [trace.ttft for trace in through_http(server, items, 1).traces]
    a, b = (1e3 * statistics.median(found) for found in (inside, outside))
    return row(f"{model}: first token of {FIRST_TOKEN_PROMPT}, alone", b, "ms", None, ("in process", a))


def main() -> None:
    """Measure and write the table."""
    parser = report.parser(__doc__)
    default = "default" if DEVICE.type == "cpu" else "llama-3.1-8b"
    parser.add_argument("--model", nargs="+", default=[default], help="shapes, folders")
    asked = parser.parse_args()
    plan, to = PLANS[DEVICE.type], Report("server", asked.out)
    to.notes = {"prompt tokens": str(plan.prompt), "output tokens": str(plan.output), "turns": plan.turns}
    for model in asked.model:
        to.part(model, partial(measure, model, DEVICE))
    to.show()


if __name__ == "__main__":
    main()
