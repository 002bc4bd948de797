"""One rank of a model over several GPUs, measured on one GPU, without its collectives.

    scripts/bench ranks --ranks llama-3.1-8b:2,llama-3.1-70b:8

A rank's share of each layer is a smaller model (`outpace.bench.shapes.rank_shape`), so no second GPU is needed. It
measures a whole decode step through `LLM` at contexts of 1,024 tokens, and its limit. No measurement starts after
--seconds. (`scripts/bench kernels --models llama-3.1-8b:2 --only gemv` times the linear layers of a rank alone.)
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial

import torch

from bench import report
from bench.plans import ways
from bench.report import DEVICE, DTYPE, Found, Report, row
from outpace.bench.latency import decode_step
from outpace.bench.shapes import SHAPES, build, rank_shape
from outpace.bench.subject import started
from outpace.kernels.limits import Speed

RANKS = "llama-3.1-8b:2,llama-3.1-8b:4,llama-3.1-8b:8,llama-3.1-70b:4,llama-3.1-70b:8"
BATCHES = (1, 8, 32)
LENGTHS = {"input_len": 1024, "output_len": 96}
LIMITS = {"max_num_seqs": max(BATCHES), "max_model_len": 2048, "max_num_batched_tokens": 4096}


def rank_of(text: str) -> tuple[str, int]:
    """Parse NAME:RANKS."""
    model, _, ranks = text.partition(":")
    if model not in SHAPES or not ranks.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not NAME:RANKS with a name of {', '.join(SHAPES)}")
    return model, int(ranks)


def measure_steps(model: str, ranks: int, scheme: str, speed: Speed) -> Found:
    """A decode step of each batch, compared with the time to read its weights, keys and values."""
    options = {**LIMITS, **ways([""], [scheme])[scheme], "device": DEVICE.type}
    with started(build(rank_shape(model, ranks), DTYPE, DEVICE), speed=speed, **options) as subject:
        found = {str(batch): decode_step(subject, batch, **LENGTHS) for batch in BATCHES}
    title = f"{model}, one of {ranks} ranks, {scheme}"
    rows = [row(f"{title}: step of {n}", each["step_ms"], "ms", each["limit_ms"]) for n, each in found.items()]
    return rows, {"model": model, "ranks": ranks, "scheme": scheme, "batches": found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the requested ranks."""
    options = report.parser(__doc__)
    options.add_argument("--ranks", type=lambda text: [rank_of(each) for each in text.split(",")], default=RANKS)
    options.add_argument("--schemes", default="none", help="as of scripts/bench quantization: none,fp8+fp8")
    options.add_argument("--seconds", type=float, default=140.0, help="start no measurement after this time")
    asked = options.parse_args(arguments)
    to = Report("ranks_steps", asked.out)
    for scheme in asked.schemes.split(","):
        for model, ranks in asked.ranks:
            title = f"{model}, one of {ranks} ranks, {scheme}: steps"
            if time.perf_counter() - to.begin > asked.seconds:
                to.add(title, [row(f"{title} LEFT OUT: no time", 0.0, "ms")])
                continue
            to.part(title, partial(measure_steps, model, ranks, scheme, to.speed))
            torch.cuda.empty_cache()
    to.show()


if __name__ == "__main__":
    main()
