"""The defaults of `scripts/bench runtime`, `moe` and `quantization`: models, parts, and the size of the work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from bench.report import DEVICE
from outpace.bench.splitfuse import Experiment
from outpace.bench.workload import COUNT, Workload

EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "triton": {"kernels": {"experts": "triton", "route": "triton"}},
    "torch": {"kernels": {"experts": "torch", "route": "torch"}},
    "hf": {"moe": {"enabled": False}},
}
"""Names of --experts -> options of `LLM`."""
PLAIN = "none"  # the scheme without quantization


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The size of the work."""

    requests: int = COUNT
    """Requests of throughput, and the most in a step."""
    workload: Workload = field(default_factory=Workload)
    full_load: int = 1000
    """Prompt and new tokens."""
    levels: Sequence[int] = (1, 4, 16, 64, 256)
    """Requests in flight, of sweep."""
    decode: tuple[int, int] = (128, 256)
    """Prompt and new tokens of decode and latency."""
    decode_batches: Sequence[int] = (1, 8, 32)
    experiment: Experiment = field(default_factory=Experiment)
    max_model_len: int = 8192 + 64
    """The limit of the parts below."""
    long_requests: int = 64
    prompt: tuple[int, int] = (2048, 6144)
    output: tuple[int, int] = (16, 64)
    batches: Sequence[int] = (1, 2, 4, 8, 16)
    new_tokens: int = 128
    prefills: Sequence[int] = (2048, 8192)
    few: tuple[int, int] = (8, 32768)
    """Long sequences of few-long, and the keys of each."""
    many: tuple[int, int] = (200, 300)
    """Short ones in the same batch."""
    slots: int = 256
    """Sequences of that batch, empty ones included."""
    heads: tuple[int, int, int] = (32, 8, 128)
    """Query heads, KV heads and head size."""


TINY = Sizes(
    requests=4, workload=Workload(input_len=8, output_len=8), full_load=8, levels=(1, 2), decode=(4, 8),
    decode_batches=(1, 2), max_model_len=2048, long_requests=3,
    experiment=Experiment(decoders=2, decoder_prompt=4, prompt=40, num_prompts=2, budget=16),
    prompt=(16, 48), output=(2, 4), batches=(1, 2), new_tokens=6, prefills=(16, 64), few=(1, 200), many=(3, 20),
    slots=6, heads=(4, 2, 16),
)  # fmt: skip
"""For trials on a CPU."""
Others = Mapping[tuple[str, str, str], tuple[str, float]]


@dataclass(frozen=True)
class Plan:
    """Default options of a command."""

    models: str
    parts: str
    experts: str = ""
    schemes: str = ""
    sizes: Sizes = field(default_factory=Sizes)
    others: Others = field(default_factory=dict)
    """The best figures of other engines on an H200 with the same work (bench/anchors.md), by model, way and row."""


PLANS: Mapping[str, Plan] = {
    "runtime": Plan(
        "llama-3.1-8b,qwen3-0.6b", "throughput,latency,profile,full-load,splitfuse",
        others={
            ("llama-3.1-8b", "", "throughput"): ("vLLM 0.26.0", 8709.0),
            ("llama-3.1-8b", "", "decode of one"): ("SGLang 0.5.17", 211.4),
            ("qwen3-0.6b", "", "throughput"): ("vLLM 0.26.0", 24520.0),
            ("qwen3-0.6b", "", "decode of one"): ("nano-vllm", 486.5),
            ("llama-3.1-8b", "", "long prompts"): ("vLLM 0.26.0", 35_200.0),
            ("qwen2.5-7b", "", "long prompts"): ("vLLM 0.26.0", 40_100.0),
        },
    ),
    "moe": Plan(
        "qwen3-30b-a3b,mixtral-8x7b,gpt-oss-20b", "decode,throughput,start",
        "triton" if DEVICE.type == "cuda" else "torch", PLAIN,
        others={
            ("qwen3-30b-a3b", "triton", "decode of one"): ("vLLM 0.26.0", 245.0),
            ("qwen3-30b-a3b", "triton", "decode step of 8"): ("vLLM 0.26.0", 9.0),
            ("qwen3-30b-a3b", "triton", "decode step of 32"): ("vLLM 0.26.0", 15.6),
            ("qwen3-30b-a3b", "triton", "throughput"): ("vLLM 0.26.0", 5986.0),
            ("qwen3-30b-a3b", "triton", "ready"): ("vLLM 0.26.0", 144.0),
            ("mixtral-8x7b", "triton", "decode of one"): ("vLLM 0.26.0", 125.0),
            ("mixtral-8x7b", "triton", "decode step of 8"): ("vLLM 0.26.0", 21.2),
            ("mixtral-8x7b", "triton", "decode step of 32"): ("vLLM 0.26.0", 24.5),
            ("mixtral-8x7b", "triton", "throughput"): ("vLLM 0.26.0", 3356.0),
            ("mixtral-8x7b", "triton", "ready"): ("vLLM 0.26.0", 102.0),
        },
    ),
    "quantization": Plan(
        "llama-3.1-8b", "decode,throughput,profile", "", "none,int8,int4,w8a8,fp8,fp8+fp8",
        Sizes(decode=(1024, 64), decode_batches=(1, 8, 32, 64)),
        {
            ("llama-3.1-8b", "none", "decode step of 1"): ("vLLM 0.26.0", 4.90),
            ("llama-3.1-8b", "none", "decode step of 8"): ("vLLM 0.26.0", 5.08),
            ("llama-3.1-8b", "none", "decode step of 32"): ("vLLM 0.26.0", 5.50),
            ("llama-3.1-8b", "none", "throughput"): ("vLLM 0.26.0", 8620.0),
            ("llama-3.1-8b", "fp8+fp8", "decode step of 1"): ("vLLM 0.26.0", 3.56),
            ("llama-3.1-8b", "fp8+fp8", "decode step of 8"): ("vLLM 0.26.0", 3.69),
            ("llama-3.1-8b", "fp8+fp8", "decode step of 32"): ("vLLM 0.26.0", 4.57),
            ("llama-3.1-8b", "fp8+fp8", "throughput"): ("vLLM 0.26.0", 11310.0),
        },
    ),
}  # fmt: skip


def ways(experts: Sequence[str], schemes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Label in the rows -> options of `LLM`."""
    found = {}
    for name, scheme in product(experts, schemes):
        weights, _, pages = scheme.partition("+")
        label = " ".join(filter(None, (name, scheme if scheme != PLAIN or not name else "")))
        quantized = {"quantization": None if weights in ("", PLAIN) else weights, "kv_cache_dtype": pages or None}
        given = {key: value for key, value in quantized.items() if value is not None}
        found[label] = {**EXPERTS[name], **given}
    return found
