"""Mixtures of experts through `LLM`: decode, 256 mixed requests, the start, and the experts of one layer at 8k tokens.

Parts (--only): grouped, decode, throughput, start. Each is measured for each implementation of the experts (--experts):
triton (ours), torch (sorted, with torch's grouped_mm), hf (Hugging Face's own modules); the experts of one layer
(grouped) also for those of --beside. --quantization none,int4,fp8 measures each of them with quantized weights too, one
after the other, beside the limits of those weights. Weights are random, made on the device; all layers and experts run,
and every token is routed anew. A part that fails is one row; results are written after each part.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import experts as kernels
from bench import report
from bench.runtime import CONSOLE, Measured, Row, measure_throughput, row
from outpace.bench.latency import latency
from outpace.bench.plot import plot_steps
from outpace.bench.shapes import SHAPES
from outpace.bench.subject import Subject, started
from outpace.bench.workload import COUNT
from outpace.kernels import limits
from outpace.kernels.dispatch import IMPLEMENTATIONS
from outpace.kernels.packed import Packed
from outpace.kernels.routing import Routing, route_ref
from outpace.quant.asked import NAMED
from outpace.quant.rounding import as_packed, quantized
from outpace.quant.rules import Rules

MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b")
PARTS = ("grouped", "decode", "throughput", "start")
MAX_MODEL_LEN = 4096
BATCHES = (1, 8, 32)
TOKENS = 8192  # of the experts of one layer
EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "triton": {"kernels": {"experts": "triton", "route": "triton"}},
    "torch": {"kernels": {"experts": "torch", "route": "torch"}},
    "hf": {"moe": {"enabled": False}},
}
"""What `LLM` is asked for."""
PLAIN = "none"  # of --quantization
OTHERS: Mapping[tuple[str, str], float] = {
    ("qwen3-30b-a3b", "1"): 245.0, ("qwen3-30b-a3b", "8"): 9.0, ("qwen3-30b-a3b", "32"): 15.6,
    ("qwen3-30b-a3b", "throughput"): 5986.0, ("qwen3-30b-a3b", "start"): 144.0,
    ("mixtral-8x7b", "1"): 125.0, ("mixtral-8x7b", "8"): 21.2, ("mixtral-8x7b", "32"): 24.5,
    ("mixtral-8x7b", "throughput"): 3356.0, ("mixtral-8x7b", "start"): 102.0,
}  # fmt: skip
"""vLLM 0.26.0 on an H200 with the same work (bench/anchors.md): tokens/s alone, ms a step, tokens/s, seconds."""
START = """
import json, sys
from outpace.kernels.limits import Speed
from outpace.bench.subject import started
with started(sys.argv[1], speed=Speed(1.0, 1.0), **json.loads(sys.argv[2])) as subject:
    print(json.dumps(subject.startup_seconds))
"""


@dataclass(frozen=True)
class Layer:
    """The experts of one layer of a shape."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    clamp: float | None
    """GPT-OSS's experts: clamped, and with biases."""

    @classmethod
    def of(cls, name: str) -> "Layer":
        """Read from the shape."""
        shape = SHAPES[name]
        counts = [shape.get(key, 0) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
        inner = shape.get("moe_intermediate_size", shape["intermediate_size"])
        return cls(max(counts), shape["num_experts_per_tok"], shape["hidden_size"], inner, shape.get("swiglu_limit"))

    @property
    def flops(self) -> float:
        """Of one token."""
        return 2.0 * self.top_k * 3 * self.hidden * self.inner

    def call(
        self, run: Callable[..., Any], device: torch.device, dtype: torch.dtype, quantization: str = PLAIN
    ) -> "partial[Any]":
        """A call of an implementation of experts, of random tokens and weights, each token with its own experts."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(*sizes: int) -> Tensor:
            return torch.empty(*sizes, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)

        count, rows = self.experts, 2 * self.inner
        weights, chosen = route_ref(draw(TOKENS, count), Routing(top_k=self.top_k, renormalise=True))
        options: dict[str, Any] = {"act": "silu"}
        if self.clamp is not None:
            options |= {"limit": self.clamp, "alpha": 1.702}
            options |= {"gate_up_bias": draw(count, rows), "down_bias": draw(count, self.hidden)}
        shapes = (count, rows, self.hidden), (count, self.hidden, self.inner)
        stacks = [_stack(draw(*shape), quantization) for shape in shapes]
        if quantization != PLAIN:
            options["rows"] = NAMED[quantization].activations
        return partial(run, draw(TOKENS, self.hidden), *stacks, weights, chosen, **options)


def _stack(weights: Tensor, quantization: str) -> Tensor | Packed:
    """Weights of experts as `LLM` would keep them."""
    scheme = Rules(NAMED.get(quantization), fit=True).of("experts", ["experts"], tuple(weights.shape))
    if scheme is None:
        return weights
    _, rows, columns = weights.shape
    return as_packed(quantized(weights, scheme), scheme, (rows, columns))


def _label(name: str, quantization: str) -> str:
    return name if quantization == PLAIN else f"{name} {quantization}"


def measure_grouped(
    model: str, name: str, quantization: str, speed: limits.Speed, device: torch.device
) -> tuple[list[Row], Any]:
    """The experts of one layer with all that belongs to them (order, both products, activation, weighted sum)."""
    layer, dtype = Layer.of(model), torch.bfloat16 if device.type == "cuda" else torch.float32
    run = IMPLEMENTATIONS["experts"].get(name)
    with torch.no_grad():
        call = layer.call(run or kernels.hugging_face, device, dtype, quantization)
        if run is None:
            known = next(each for each in kernels.MODELS if each.name == model)
            _, gate_up, down, *_ = call.args
            call = partial(kernels.hugging_face(known, gate_up, down), *call.args, act="silu")
        took = limits.seconds_of(call, device)
    rate = TOKENS * layer.flops / took
    what = f"{model}: experts of a layer, {TOKENS} tokens, {_label(name, quantization)}"
    return [row(what, rate / 1e12, "TFLOP/s", speed.flops / 1e12)], {"seconds": took, "flop_s": rate}


def measure_decode(subject: Subject, name: str) -> tuple[list[Row], Any]:
    """One request alone, and one token of each of several."""
    rows, details = [], {}
    for batch in BATCHES:
        found = details[str(batch)] = latency(subject, batch_size=batch)
        rate, limit = found["decode_tokens_per_second"], found["outpace"]["limit"]["decode_tokens_per_second"]
        other, what = _other(subject.name, str(batch), found["outpace"]["device"], name), f"{subject.name}: {name}"
        if batch == 1:
            rows.append(row(f"{what}, decode of one", rate, "tok/s", limit, other))
            rows.append(
                row(f"{what}, first token", found["median_ttft_ms"], "ms", found["outpace"]["limit"]["ttft_ms"])
            )
        else:
            rows.append(row(f"{what}, step of {batch}", 1e3 / rate, "ms", 1e3 / limit, other))
    return rows, details


def measure_mixed(subject: Subject, name: str) -> tuple[list[Row], Any]:
    """The workload that others were measured with."""
    rows, found = measure_throughput(subject)
    other = _other(subject.name, "throughput", found["outpace"]["device"], name)
    limit = found["outpace"]["limit"]["output_throughput"]
    mixed = row(f"{subject.name}: {name}, {COUNT} mixed requests", found["output_throughput"], "tok/s", limit, other)
    return [mixed, rows[1]], found


def measure_start(model: str, name: str, options: Mapping[str, Any], device: str) -> tuple[list[Row], Any]:
    """From a module with its weights to the first step, in a process of its own: kernel cache empty, then full."""
    rows, details = [], {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", "full"):
            took = details[state] = _start(model, options, Path(cache))
            other = _other(model, "start", device, name) if state == "empty" else None
            ready = took["all"] - took["load"]
            rows.append(row(f"{model}: {name}, ready, kernel cache {state}", ready, "s", None, other))
    return rows, details


def _start(model: str, options: Mapping[str, Any], cache: Path) -> dict[str, float]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", START, model, json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    parts: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return parts


def measure_ready(subject: Subject, name: str) -> tuple[list[Row], Any]:
    """What the start of this process took, from a module with its weights on; the kernel cache is what it was."""
    took = subject.startup_seconds
    return [row(f"{subject.name}: {name}, ready", took["all"] - took["load"], "s")], took


def measure_model(
    model: str, experts: list[str], beside: list[str], schemes: list[str], measured: Measured, device: torch.device
) -> None:
    """Every part of one shape."""
    steps: dict[str, dict[int, float]] = {}
    for name in dict.fromkeys([*experts, *beside]):
        for scheme in schemes if name in experts else [PLAIN]:
            grouped = partial(measure_grouped, model, name, scheme, measured.speed, device)
            measured.part(f"{model}, {_label(name, scheme)}", "grouped", grouped)
    for name, scheme in product(experts, schemes):
        options = {"max_num_seqs": COUNT, "max_model_len": measured.max_model_len, **EXPERTS[name]}
        if scheme != PLAIN:
            options["quantization"] = scheme
        _measure_runs(model, _label(name, scheme), options, measured)
        steps |= _steps(_label(name, scheme), scheme, measured.details.get(f"{model}, {_label(name, scheme)}: decode"))
    if steps:
        others = {batch: _step_of_other(model, batch) for batch in BATCHES} if measured.device == "h200" else {}
        known = {batch: took for batch, took in others.items() if took is not None}
        path = report.picture("moe", measured.device, model, measured.folder)
        plot_steps({**steps, **({"vLLM 0.26.0": known} if known else {})}, f"{model} on {measured.device}", path)


def _measure_runs(model: str, label: str, options: Mapping[str, Any], measured: Measured) -> None:
    """The parts that run the whole model."""
    title = f"{model}, {label}"
    if {"decode", "throughput"} & {*measured.parts}:
        CONSOLE.print(f"[{time.perf_counter() - measured.begin:6.1f} s] {title}: starting")
        try:
            with started(model, speed=measured.speed, **options) as subject:
                measured.add(f"{title}: ready", *measure_ready(subject, label))
                measured.part(title, "decode", partial(measure_decode, subject, label))
                measured.part(title, "throughput", partial(measure_mixed, subject, label))
        except Exception as error:  # it could not be started; each part looks after itself
            measured.failed(f"{title}: start", error)
    measured.part(title, "start", partial(measure_start, model, label, options, measured.device))


def _steps(name: str, scheme: str, found: Any) -> dict[str, dict[int, float]]:
    """Milliseconds of a step by batch, measured and at the limit."""
    if not found or "error" in found:
        return {}
    took = {int(batch): 1e3 / each["decode_tokens_per_second"] for batch, each in found.items()}
    least = {int(batch): 1e3 / each["outpace"]["limit"]["decode_tokens_per_second"] for batch, each in found.items()}
    return {name: took, "limit" if scheme == PLAIN else f"limit of {scheme}": least}


def _other(model: str, what: str, device: str, name: str) -> tuple[str, float] | None:
    """What vLLM reaches in bf16, which is what ours is compared with if it is not quantized."""
    found = OTHERS.get((model, what)) if device == "h200" and name in EXPERTS else None
    return None if found is None else ("vLLM 0.26.0", found)


def _step_of_other(model: str, batch: int) -> float | None:
    found = OTHERS.get((model, str(batch)))
    return 1e3 / found if found is not None and batch == 1 else found


def _asked(
    options: argparse.ArgumentParser, name: str, given: str, there: Mapping[str, Any] | tuple[str, ...]
) -> list[str]:
    """The parts of a list, if all of them exist."""
    if unknown := sorted({*given.split(",")} - {*there}):
        options.error(f"--{name}: there is no {', '.join(unknown)}; there are {', '.join(there)}")
    return given.split(",")


def main() -> None:
    """Measure what is asked for."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = report.parser(__doc__)
    shapes = tuple(name for name, shape in SHAPES.items() if "num_experts_per_tok" in shape)
    options.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(shapes)}")
    options.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    own, others = ("triton", "torch,hf") if device.type == "cuda" else ("torch", "torch")
    options.add_argument("--experts", default=own, help=f"implementations, of {', '.join(EXPERTS)}")
    options.add_argument("--beside", default=others, help="the same, for the experts of one layer alone")
    options.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN, help="most tokens of a request")
    schemes = ("int8", "int4", "fp8")
    options.add_argument(
        "--quantization", default=PLAIN, help=f"of {', '.join((PLAIN, *schemes))}; several are measured in turn"
    )
    asked = options.parse_args()
    parts = _asked(options, "only", asked.only, PARTS)
    models, names = _asked(options, "models", asked.models, shapes), _asked(options, "experts", asked.experts, EXPERTS)
    speed = limits.measure_speed(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    beside = _asked(options, "beside", asked.beside, EXPERTS)
    wanted = _asked(options, "quantization", asked.quantization, (PLAIN, *schemes))
    if wanted != [PLAIN] and "hf" in names:
        options.error("--quantization: Hugging Face's own experts (--experts hf) are not quantized; leave one out")
    measured = Measured(asked.out, limits.device_name(device), speed, parts, asked.max_model_len, what="moe")
    for model in models:
        measure_model(model, names, beside, wanted, measured, device)
    report.show("moe", measured.rows)


if __name__ == "__main__":
    main()
