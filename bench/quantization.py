"""Quantized weights and caches through `LLM`, one scheme after another, beside 16 bits and the limits of each.

    python -m bench.quantization --schemes none,int8,int4,fp8+fp8 --only decode,throughput

A scheme is one of --quantization, "+" and a --kv-cache-dtype if keys and values are quantized too. Parts: decode (a
step at contexts of 1,024 tokens), throughput (the 256 mixed requests that others were measured with), kernels (what a
decode step launches).
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from bench import report
from bench.runtime import CONSOLE, Measured, Row, measure_profile, measure_throughput, row
from outpace.bench.latency import latency
from outpace.bench.plot import plot_steps
from outpace.bench.subject import Subject, started
from outpace.bench.workload import COUNT
from outpace.kernels import limits

MODEL = "llama-3.1-8b"
SCHEMES = "none,int8,int4,w8a8,fp8,fp8+fp8"
PARTS = ("decode", "throughput", "kernels")
BATCHES = (1, 8, 32, 64)
CONTEXT, NEW = 1024, 64
OTHERS: Mapping[tuple[str, str], float] = {
    ("none", "1"): 4.90, ("none", "8"): 5.08, ("none", "32"): 5.50, ("none", "throughput"): 8620.0,
    ("fp8+fp8", "1"): 3.56, ("fp8+fp8", "8"): 3.69, ("fp8+fp8", "32"): 4.57, ("fp8+fp8", "throughput"): 11310.0,
}  # fmt: skip
"""What vLLM 0.26.0 reaches on an H200 with Llama-3.1-8B: milliseconds of a step by batch, output tokens/s."""


def measure_decode(subject: Subject, scheme: str) -> tuple[list[Row], Any]:
    """A step of each batch."""
    rows, details = [], {}
    for batch in BATCHES:
        found = latency(subject, batch_size=batch, input_len=CONTEXT, output_len=NEW, iters=3 if batch < 32 else 1)
        details[str(batch)] = found
        least = 1e3 / found["outpace"]["limit"]["decode_tokens_per_second"]
        took = 1e3 / found["decode_tokens_per_second"]
        other = _other(subject, scheme, str(batch))
        rows.append(row(f"{subject.name}: {scheme}, step of {batch}", took, "ms", least, other))
    return rows, details


def measure_mixed(subject: Subject, scheme: str) -> tuple[list[Row], Any]:
    """The workload that others were measured with."""
    _, found = measure_throughput(subject)
    limit, other = found["outpace"]["limit"]["output_throughput"], _other(subject, scheme, "throughput")
    what = f"{subject.name}: {scheme}, {COUNT} mixed requests"
    return [row(what, found["output_throughput"], "tok/s", limit, other)], found


def measure_kernels(subject: Subject, scheme: str) -> tuple[list[Row], Any]:
    """What decode steps launch: none of it may write a weight in 16 bits."""
    rows, found = measure_profile(subject)
    return [{**each, "what": f"{scheme}, {each['what']}"} for each in rows], found


def _other(subject: Subject, scheme: str, what: str) -> tuple[str, float] | None:
    found = OTHERS.get((scheme, what)) if subject.name == MODEL and torch.cuda.is_available() else None
    return None if found is None else ("vLLM 0.26.0", found)


def measure_scheme(model: str, scheme: str, measured: Measured) -> dict[str, dict[int, float]]:
    """Every part with one scheme; milliseconds of a step by batch, measured and at the limit."""
    weights, _, pages = scheme.partition("+")
    options: dict[str, Any] = {"quantization": None if weights == "none" else weights, "kv_cache_dtype": pages or None}
    title = f"{model}, {scheme}"
    CONSOLE.print(f"[{time.perf_counter() - measured.begin:6.1f} s] {title}: starting")
    try:
        options |= {"max_num_seqs": COUNT, "max_model_len": measured.max_model_len}
        with started(model, speed=measured.speed, **options) as subject:
            read = 0.0 if subject.cost is None else subject.cost.weight_bytes / 1e9
            what = f"{model}: {scheme}, weights that a step reads"
            measured.add(f"{title}: weights", [row(what, read, "GB")], str(subject.llm.quantized))
            measured.part(title, "decode", partial(measure_decode, subject, scheme))
            measured.part(title, "throughput", partial(measure_mixed, subject, scheme))
            measured.part(title, "kernels", partial(measure_kernels, subject, scheme))
    except Exception as error:  # it could not be started; each part looks after itself
        measured.failed(f"{title}: start", error)
    found = measured.details.get(f"{title}: decode")
    if not found or "error" in found:
        return {}
    return {scheme: {int(batch): 1e3 / each["decode_tokens_per_second"] for batch, each in found.items()}}


def main() -> None:
    """Measure what is asked for."""
    options = report.parser(__doc__)
    options.add_argument("--model", default=MODEL, help="a shape, or a model")
    options.add_argument("--schemes", default=SCHEMES)
    options.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    options.add_argument("--max-model-len", type=int, default=4096, help="most tokens of a request")
    asked = options.parse_args()
    if unknown := sorted({*asked.only.split(",")} - {*PARTS}):
        options.error(f"--only: there is no {', '.join(unknown)}; there are {', '.join(PARTS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speed = limits.measure_speed(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    name = limits.device_name(device)
    measured = Measured(asked.out, name, speed, asked.only.split(","), asked.max_model_len, what="quantization")
    steps: dict[str, dict[int, float]] = {}
    for scheme in asked.schemes.split(","):
        steps |= measure_scheme(asked.model, scheme, measured)
    if steps:
        path = report.picture("quantization", name, asked.model, asked.out)
        plot_steps(steps, f"{asked.model} on {name}", path)
    report.show("quantization", measured.rows)


if __name__ == "__main__":
    main()
