"""Kernel injection: decode and prefill of `engine.generate` at batch 1, start-up, and BERT, each beside its limit.

Decode: 128 prompt tokens, 256 new ones, greedy, no end token; two warm-ups, median of three;
tokens/s = 255 / (time for 256 tokens - time for 1). Prefill: time for 1 token.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertModel

import outpace
from bench import kernels, report
from outpace.bench import shapes
from outpace.kernels import limits

PROMPT, NEW = 128, 256
PREFILLS = (128, 2048, 8192)
TARGETS = {"llama-3.1-8b": 240.0, "llama-3.2-1b": 900.0, "qwen3-0.6b": 900.0}
PREFILL_TARGETS = {128: 6.0, 2048: 50.0, 8192: 210.0}


def seconds(run: Callable[[], object], warm_ups: int = 2, repeats: int = 3) -> float:
    """Median wall seconds of `run`, the GPU's work included."""
    times = []
    for turn in range(warm_ups + repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        if turn < warm_ups:
            times.clear()
    return statistics.median(times)


def prompt(length: int) -> torch.Tensor:
    """A random prompt of one sequence."""
    return torch.randint(10, 30000, (1, length), device="cuda", generator=torch.Generator("cuda").manual_seed(7))


def row(what: str, figure: float, unit: str, limit: float | None, target: float | None) -> dict[str, Any]:
    """A figure beside its limit, where there is one, and its target; the ratio is how near the limit it is."""
    ratio = "-" if limit is None else figure / limit if unit == "tok/s" else limit / figure
    return {
        "what": what, "figure": figure, "unit": unit, "limit": "-" if limit is None else limit, "of limit": ratio,
        "target": target or "-",
    }  # fmt: skip


def measure_model(name: str, bandwidth: float, flops: float) -> list[dict[str, Any]]:
    """Start-up, decode and prefill of one shape."""
    model = shapes.build(name, torch.bfloat16, "cuda")
    floor = shapes.bytes_read_per_token(model) / bandwidth
    torch.cuda.synchronize()
    begin = time.perf_counter()
    engine = outpace.init_inference(
        model, dtype=torch.bfloat16, kernel_inject=True, enable_cuda_graph=True, max_out_tokens=max(PREFILLS) + NEW
    )
    torch.cuda.synchronize()
    rows = [row(f"{name}: inject", time.perf_counter() - begin, "s", None, 3.0)]
    begin = time.perf_counter()
    engine.generate(prompt(PROMPT), max_new_tokens=2, do_sample=False, eos_token_id=None)
    torch.cuda.synchronize()
    rows.append(row(f"{name}: first call (kernels compiled)", time.perf_counter() - begin, "s", None, 20.0))

    def generate(length: int, new: int) -> float:
        ids = prompt(length)
        return seconds(lambda: engine.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None))

    decode = (NEW - 1) / (generate(PROMPT, NEW) - generate(PROMPT, 1))
    rows.append(row(f"{name}: decode", decode, "tok/s", 1 / floor, TARGETS[name]))
    for length in PREFILLS if name == "llama-3.1-8b" else PREFILLS[:1]:
        limit = max(floor, prefill_flops(engine.config, length) / flops)
        target = PREFILL_TARGETS[length] if name == "llama-3.1-8b" else None
        rows.append(row(f"{name}: prefill {length}", generate(length, 1) * 1e3, "ms", limit * 1e3, target))
    engine.destroy()
    return rows


def prefill_flops(config: Any, length: int) -> float:
    """Operations of a prompt: two for each weight of the layers and token, the head once, causal attention."""
    heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layer = config.hidden_size * ((2 * heads + 2 * kv) * dim + 3 * config.intermediate_size)
    attention = 2 * heads * dim * length  # half of all pairs, a product for scores and one for values
    return length * config.num_hidden_layers * (2 * layer + attention) + 2 * config.hidden_size * config.vocab_size


def measure_bert() -> dict[str, Any]:
    """BERT-large, batch 1, 128 tokens, fp16: Hugging Face eager against injection under a graph."""
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    model: Any = BertModel(config)
    model = model.cuda().half().eval()
    ids = prompt(128)
    with torch.no_grad():
        eager = limits.gpu_ms(lambda: model(input_ids=ids))
    engine = outpace.init_inference(model, dtype=torch.float16, kernel_inject=True, enable_cuda_graph=True)
    fused = limits.gpu_ms(lambda: engine(input_ids=ids))
    return {"what": "bert-large: times Hugging Face eager", "figure": eager / fused, "unit": f"x ({fused:.2f} ms)",
            "limit": "-", "of limit": "-", "target": 5.0}  # fmt: skip


def main() -> None:
    """Measure every shape, then every kernel, and write both tables."""
    options = report.parser(__doc__)
    options.add_argument("--models", nargs="*", default=list(shapes.SMALL), choices=shapes.DENSE, help="shapes")
    chosen = options.parse_args()
    bandwidth, flops = limits.read_bandwidth(), limits.matmul_flops()
    rows = []
    for name in chosen.models:
        rows += measure_model(name, bandwidth, flops)
        gc.collect()
        torch.cuda.empty_cache()
    rows.append(measure_bert())
    notes = {"read bandwidth TB/s": bandwidth / 1e12, "bf16 TFLOP/s": flops / 1e12}
    report.write("inject", limits.device_name(torch.device("cuda")), rows, notes, chosen.out)
    kernels.measure(chosen.out)


if __name__ == "__main__":
    main()
