"""`init_inference` at batch 1, with limits: a forward, decode and prefill of `generate`, start-up, and BERT.

Decode: 128 prompt tokens, 256 new ones, greedy, no end token; tokens/s = 255 / (time for 256 tokens - time for 1).
Prefill: time for 1 token. A forward: one token without a cache, by Hugging Face and from a CUDA graph.
"""

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import BertConfig, BertModel

import outpace
from bench import report
from bench.report import DEVICE, DTYPE, Found, Report, Row, row
from outpace.bench import shapes
from outpace.bench.cost import cost_of
from outpace.kernels import limits

PROMPT, NEW = 128, 256
PREFILLS = {"llama-3.1-8b": (128, 2048, 8192)}  # other models: 128
GRAPH = DEVICE.type == "cuda"
BERT_LARGE = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)


def prompt(length: int, most: int = 30000) -> torch.Tensor:
    """A random prompt of one sequence."""
    return torch.randint(10, most, (1, length), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(7))


def wall_seconds(run: Callable[[], object]) -> float:
    """Seconds of one call until the GPU is done, without the work that it had before."""
    _wait()
    begin = time.perf_counter()
    run()
    _wait()
    return time.perf_counter() - begin


def _wait() -> None:
    if GRAPH:
        torch.cuda.synchronize()


def measure_generate(name: str, speed: limits.Speed) -> Found:
    """Start-up, decode and prefill of one shape."""
    model: Any = shapes.build(name, DTYPE, DEVICE)
    prefills, most = PREFILLS.get(name, (PROMPT,)), min(30000, model.config.vocab_size)
    options: dict[str, Any] = {"enable_cuda_graph": GRAPH, "max_out_tokens": max(prefills) + NEW}
    _wait()
    begin = time.perf_counter()
    engine = outpace.init_inference(model, dtype=DTYPE, kernel_inject=True, **options)
    _wait()
    rows, cost = [row(f"{name}: inject", time.perf_counter() - begin, "s", 3.0)], cost_of(engine.module)
    assert cost is not None, "the shape is dense"

    def generate(length: int, new: int) -> None:
        engine.generate(prompt(length, most), max_new_tokens=new, do_sample=False, eos_token_id=None)

    rows.append(row(f"{name}: first call (kernels compiled)", wall_seconds(partial(generate, PROMPT, 2)), "s", 20.0))
    took = {(length, 1): _seconds(partial(generate, length, 1)) for length in prefills}
    decode = (NEW - 1) / (_seconds(partial(generate, PROMPT, NEW)) - took[PROMPT, 1])
    rows.append(row(f"{name}: decode", decode, "tok/s", 1 / cost.decode_seconds(1, PROMPT + NEW / 2, speed)))
    for length in prefills:
        limit = cost.prompt_seconds(1, length, speed)
        rows.append(row(f"{name}: prefill {length}", took[length, 1] * 1e3, "ms", limit * 1e3))
    engine.destroy()
    return rows, None


def _seconds(run: Callable[[], object]) -> float:
    return sorted(wall_seconds(run) for _ in range(5))[2]


def measure_forward(name: str, speed: limits.Speed) -> Found:
    """One token: Hugging Face eager against the engine with CUDA graphs."""
    model, inputs = shapes.build(name, DTYPE, DEVICE), {"input_ids": prompt(1, 200), "use_cache": False}
    return [_beside_eager(f"{name}: forward of one token", model, DTYPE, inputs, speed)], None


def measure_bert() -> Found:
    """BERT-large, batch 1, 128 tokens, fp16."""
    model: Any = BertModel(BERT_LARGE)
    model, inputs = model.to(DEVICE).half().eval(), {"input_ids": prompt(128)}
    return [_beside_eager("bert-large: forward of 128 tokens", model, torch.float16, inputs)], None


def _beside_eager(
    what: str, model: Any, dtype: torch.dtype, inputs: Mapping[str, Any], speed: limits.Speed | None = None
) -> Row:
    """Milliseconds of a forward. speed: of the device, for the limit of one token; None: there is none."""
    with torch.no_grad():
        eager = limits.seconds_of(lambda: model(**inputs), DEVICE) * 1e3
    engine = outpace.init_inference(model, dtype=dtype, kernel_inject=True, enable_cuda_graph=GRAPH)
    cost = None if speed is None else cost_of(engine.module)
    limit = None if speed is None or cost is None else cost.prompt_seconds(1, 1, speed) * 1e3
    took = limits.seconds_of(lambda: engine(**inputs), DEVICE) * 1e3
    engine.destroy()
    return row(what, took, "ms", limit, ("Hugging Face eager", eager))


def main() -> None:
    """Measure every shape and write the table."""
    options = report.parser(__doc__)
    options.add_argument("--models", nargs="*", default=list(shapes.SMALL), choices=shapes.DENSE, help="shapes")
    asked = options.parse_args()
    to = Report("inject", asked.out)
    for name in asked.models:
        for what, measure in (("generate", measure_generate), ("forward", measure_forward)):
            to.part(f"{name}: {what}", partial(measure, name, to.speed))
            gc.collect()
            torch.cuda.empty_cache()
    to.part("bert-large", measure_bert)
    to.show()


if __name__ == "__main__":
    main()
