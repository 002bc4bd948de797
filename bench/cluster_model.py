"""Predicts one replica of `pp` stages of `tp` GPUs from measurements of one GPU.

Steps are predicted as in bench/scaling.py, with the prompts that arrive meanwhile and the sends between stages. One
factor makes the prediction for the 8B on one GPU equal to its measurement. docs/scaling.md lists the assumptions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from bench import scaling
from bench.scaling import DENSE, MEMORY, MOE, RESERVED, Measured, Share, collectives, experts_read, share_of
from outpace.bench.shapes import SHAPES, rank_shape
from outpace.offload.cards import DISK
from outpace.offload.numbers import Experts, Work
from outpace.parallel.stages import bubble

WORK = Work(prompt=1000, new=1000)  # as in the measurement of one GPU
NODE = 8  # GPUs
TENSOR, PIPELINE = (1, 2, 4, 8), (1, 2, 4, 8, 16)
MOST = 256  # most requests of a micro-batch: the default of max_num_seqs
BATCHES = (8, 16, 24, 32, 48, 64, 96, 128, 192, MOST)  # batch sizes to try
BETWEEN = 0.050  # most seconds between the tokens of a request
CHUNK = 2048  # tokens of a prompt in a step
ALIKE = 0.98  # layouts with this share of the best rate count as equal; the one with the fewest GPUs is chosen
MIXED = (
    ("quantization", f"{DENSE}, none: throughput", DENSE, "bf16"),
    ("quantization", f"{DENSE}, fp8+fp8: throughput", DENSE, "fp8"),
    ("moe", f"{MOE}, triton: throughput", MOE, "bf16"),
)
"""Runs of 256 mixed requests: results, key, model, weights."""


@dataclass(frozen=True)
class Rates:
    """Assumptions that are neither results of our benchmarks nor in bench/scaling.py. Sources: docs/scaling.md."""

    nvlink: float = 0.8 * 450e9
    """Bytes per second of a GPU to others of its node, in one direction."""
    nvlink_seconds: float = 16.5e-6
    """Latency of a send between two GPUs of a node."""
    network: float = 0.9 * 50e9
    """Bytes per second of a GPU to other nodes: 400 Gbit/s each."""
    network_seconds: float = 32e-6
    """Latency of a send between nodes."""
    price: float = 3.5
    """Dollars per GPU and hour."""
    mtbf: float = 16_384 * 54 * 24 / 419 * 3600
    """Mean seconds between two failures that affect a GPU."""
    repair: float = 24 * 3600.0
    """Seconds until a failed node is back."""
    detect: float = 30.0
    """Seconds until a failure is noticed and a start begins."""
    start: float = 9.6
    """Seconds of a start without reading weights: measured, with imports and CUDA graphs."""
    disk: float = DISK
    """Bytes per second that a node reads from its own disk."""
    store: float = 100e9
    """Bytes per second of the store that all nodes read from together."""
    event: float = 76e-6
    """Seconds of a core for each event of a stream: measured in our HTTP process."""
    request: float = 0.21 / 89.5
    """Seconds of a core for each request with a short answer: measured."""


RATES = Rates()


@dataclass(frozen=True)
class Layout:
    """The layout of a replica."""

    pp: int = 1
    """Number of stages, and of micro-batches in flight: the runtime has at least as many."""
    tp: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.pp * self.tp

    def replicas(self, nodes: int) -> int:
        """Number of replicas on these nodes; a replica over several nodes uses them alone."""
        if self.gpus <= NODE:
            return nodes * (NODE // self.gpus)
        return nodes // -(-self.gpus // NODE)

    def __str__(self) -> str:
        return f"PP {self.pp} x TP {self.tp}"


class Parts(NamedTuple):
    """Seconds of one micro-batch on one stage, by purpose."""

    weights: float
    """Reads of weights."""
    products: float
    """Products of decodes, if they take longer than reading the weights, and of prompts."""
    cache: float
    """Reads of keys and values."""
    fixed: float
    """Time of each layer that does not depend on its reads."""
    all_reduce: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self)

    def times(self, factor: float) -> "Parts":
        """All parts multiplied by a factor."""
        return Parts(*(factor * seconds for seconds in self))


@dataclass(frozen=True)
class Replica:
    """One replica at full load."""

    model: str
    weights: str
    layout: Layout
    gb: float
    """GB of weights on each GPU."""
    batch: int
    """Requests in all micro-batches; 0: the model does not fit."""
    room: int
    """Number of requests whose keys and values fit."""
    parts: Parts
    send: float
    """Seconds of a send from one stage to the next."""
    work: Work

    @property
    def between(self) -> float:
        """Seconds between two tokens of a request: its micro-batch goes once through all stages."""
        return self.layout.pp * (self.parts.total + (self.send if self.layout.pp > 1 else 0.0))

    @property
    def rate(self) -> float:
        """Output tokens/s."""
        return self.batch / self.between if self.batch else 0.0

    @property
    def rate_of_gpu(self) -> float:
        """Output tokens/s for each GPU."""
        return self.rate / self.layout.gpus

    @property
    def dollars(self) -> float:
        """Dollars for a million output tokens, at full load."""
        return RATES.price / 3600 / self.rate_of_gpu * 1e6

    @property
    def shares(self) -> dict[str, float]:
        """Shares of a GPU's time, which add up to 1: each part of the work, and waiting for sends."""
        busy = self.layout.pp / self.between
        shares = {name.replace("_", "-"): busy * seconds for name, seconds in self.parts._asdict().items()}
        return {**shares, "waiting for stages": max(0.0, 1 - sum(shares.values()))}


class Model:
    """Predicts replicas from measurements."""

    def __init__(self, measured: Measured, rates: Rates = RATES) -> None:
        self.measured, self.rates = measured, rates

    def replica(self, model: str, weights: str, layout: Layout, work: Work = WORK, most: int = MOST) -> Replica:
        """One replica with as many requests as fit, but at most `most` in a micro-batch."""
        share = share_of(model, weights, layout.tp)
        left = MEMORY - RESERVED - share.held_bytes / layout.pp
        room = max(0, int(left / (share.kv_bytes / layout.pp) / (work.prompt + work.new)))
        each = min(most, room // layout.pp)
        parts = self.parts(model, weights, layout, each, work).times(1 / self.factor)
        send = self.send(share.hidden, round(each * (1 + work.prompt / work.new)), layout)
        gb = share.held_bytes / layout.pp / 1e9
        return Replica(model, weights, layout, gb, each * layout.pp, room, parts, send, work)

    def parts(
        self, model: str, weights: str, layout: Layout, requests: float, work: Work, prompts: bool = True
    ) -> Parts:
        """A micro-batch on the slowest stage: a token of each request, and the prompt tokens that arrive meanwhile."""
        share, experts = share_of(model, weights, layout.tp), SHAPES[model].get("num_experts", 0)
        batch, speed, reading = max(1, round(requests)), self.measured.speed, self.measured.reading
        read = share.read_bytes + share.layers * _experts(model, layout.tp, batch) * share.expert_bytes
        reads, products = read / speed.bandwidth, requests * share.token_flops / speed.flops
        bound = products > reads
        context = work.prompt + work.new / 2
        arriving = requests * work.prompt / work.new
        prompt = arriving * self.prompt_token(model, weights, layout.tp) if prompts else 0.0
        whole = Parts(
            weights=0.0 if bound else reading * reads,
            products=(reading * products if bound else 0.0) + prompt,
            cache=reading * requests * context * share.kv_bytes / speed.bandwidth,
            fixed=share.layers * self.measured.fixed(experts > 0, weights, batch),
            all_reduce=self.all_reduce(share, layout.tp, batch),
        )
        return whole.times(-(-share.layers // layout.pp) / share.layers)

    def prompt_token(self, model: str, weights: str, tp: int) -> float:
        """Seconds of one prompt token in a large step on `tp` GPUs, including its part of the all-reduces."""
        share = share_of(model, weights, tp)
        reduced = 2 * share.layers * self._reduced(2 * share.hidden, tp)
        reach = self.experts_reach if share.expert_bytes else self.prompts_reach[weights]
        return _prompt_flops(model, weights, tp) / (self.measured.speed.flops * reach) + reduced

    def all_reduce(self, share: Share, tp: int, batch: int) -> float:
        """Seconds of all all-reduces of a decode step; bytes beyond a MiB count at the rate of NVLink."""
        known = scaling.KIB * max(scaling.LATENCIES["direct"][tp]) if tp > 1 else 0
        beyond = max(0, 2 * batch * share.hidden - known)
        return collectives(share, tp, batch, "direct") + 2 * share.layers * self._reduced(beyond, tp)

    def _reduced(self, size: float, tp: int) -> float:
        """Seconds to reduce `size` bytes: each GPU sends and receives 2 (n - 1) / n of them."""
        return 2 * (tp - 1) / tp * size / self.rates.nvlink

    def send(self, hidden: int, tokens: int, layout: Layout) -> float:
        """Seconds to send the hidden states of these tokens from one stage to the next."""
        if layout.gpus <= NODE:
            return self.rates.nvlink_seconds + 2 * hidden * tokens / self.rates.nvlink
        return self.rates.network_seconds + 2 * hidden * tokens / self.rates.network

    def first_token(self, model: str, weights: str, layout: Layout, prompt: int) -> float:
        """Seconds to the first token of one prompt alone: its chunks fill and drain the pipeline."""
        chunks = -(-prompt // CHUNK)
        decode = self.parts(model, weights, layout, 1, WORK, prompts=False).total
        stage = decode + prompt / chunks * self.prompt_token(model, weights, layout.tp) / layout.pp
        sends = (layout.pp - 1) * self.send(share_of(model, weights, layout.tp).hidden, prompt // chunks, layout)
        return chunks * stage / (1 - bubble(layout.pp, chunks)) / self.factor + sends

    @cached_property
    def prompts_reach(self) -> dict[str, float]:
        """The share of the measured rate of bf16 products that prompts reach, by weights: 64 prompts, dense model."""
        found = {}
        for weights, scheme in scaling.WEIGHTS.items():
            _, steps = self.measured.needed("quantization", f"{DENSE}, {scheme}: decode")
            tokens = 64 * steps["64"]["outpace"]["input_len"] / (steps["64"]["median_ttft_ms"] / 1e3)
            found[weights] = tokens * _prompt_flops(DENSE, weights) / self.measured.speed.flops
        return found

    @cached_property
    def experts_reach(self) -> float:
        """The same with experts, from 256 mixed requests: prompts take the time that decodes leave.

        The loss at both ends of such a run is assumed to be that of the dense model.
        """
        dense, moe = (self.run(*run[:2]) for run in (MIXED[0], MIXED[2]))
        decode = self.parts(MOE, "bf16", Layout(), MOST, moe[1], prompts=False).total / MOST / self.factor
        lost = self.replica(DENSE, "bf16", Layout(), dense[1]).rate / dense[0]
        token = (1 / (lost * moe[0]) - decode) * moe[1].new / moe[1].prompt * self.factor
        return _prompt_flops(MOE, "bf16") / token / self.measured.speed.flops

    def run(self, what: str, key: str) -> tuple[float, Work]:
        """Output tokens/s of a measured run, and its mean lengths."""
        run = self.measured.needed(what, key)[1]
        prompt, new = (round(run[f"total_{side}_tokens"] / run["num_requests"]) for side in ("input", "output"))
        return run["output_throughput"], Work(prompt, new)

    @cached_property
    def factor(self) -> float:
        """Measured over predicted speed of one GPU: the 8B with 256 requests of 1,000 + 1,000 tokens."""
        measured = self.measured.needed("runtime", f"{DENSE}: full-load")[1]["output_throughput"]
        return float(measured) * self.parts(DENSE, "bf16", Layout(), MOST, WORK).total / MOST

    def checks(self) -> list[dict[str, Any]]:
        """Measurements on one GPU, compared with the simulation."""
        rows = []
        for what, key, name, weights in (("runtime", f"{DENSE}: full-load", DENSE, "bf16"), *MIXED):
            rate, work = self.run(what, key)
            said = self.replica(name, weights, Layout(), work).rate
            rows.append({"run": key, "measured tokens/s": rate, "simulated": said, "ratio": said / rate})
        return rows


def _prompt_flops(model: str, weights: str, tp: int = 1) -> float:
    """Operations of a prompt token, which needs no logits."""
    share = share_of(model, weights, tp)
    return share.token_flops - 2 * share.hidden * rank_shape(model, tp)["vocab_size"]


def _experts(model: str, tp: int, batch: int) -> float:
    """Experts of a layer that the busiest rank reads. Large batches read nearly all, so ranks differ little."""
    total, top_k = (SHAPES[model].get(key, 0) for key in ("num_experts", "num_experts_per_tok"))
    if total and batch > 64:
        return Experts(total, top_k, {}).touched(batch) / tp
    return experts_read(total, top_k, tp, batch)[1]


def layouts(model: Model, name: str, weights: str) -> list[Replica]:
    """All fitting pairs of layout and batch size, cheapest tokens first; those too slow between tokens come last."""
    every = (
        model.replica(name, weights, Layout(pp, tp), most=most) for pp in PIPELINE for tp in TENSOR for most in BATCHES
    )
    return sorted((each for each in every if each.batch), key=lambda each: (each.between > BETWEEN, -each.rate_of_gpu))


def choose(found: Sequence[Replica]) -> Replica:
    """The layout with the fewest GPUs among those that are about as cheap as the cheapest."""
    alike = [each for each in found if each.rate_of_gpu >= ALIKE * found[0].rate_of_gpu and each.between <= BETWEEN]
    return min(alike or found[:1], key=lambda each: (each.layout.gpus, -each.rate_of_gpu))
