"""What one replica of `pp` stages of `tp` GPUs does, from what one GPU was measured to do.

Steps are predicted as in bench/scaling.py, with the prompts that arrive meanwhile and the sends between stages. One
factor makes one GPU with the 8B exactly as fast as it was measured to be. docs/scaling.md lists what is assumed.
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

WORK = Work(prompt=1000, new=1000)  # as in the run that one GPU was measured with
NODE = 8  # GPUs
TENSOR, PIPELINE = (1, 2, 4, 8), (1, 2, 4, 8, 16)
MOST = 256  # requests of a micro-batch: max_num_seqs by default
BATCHES = (8, 16, 24, 32, 48, 64, 96, 128, 192, MOST)  # that are tried
BETWEEN = 0.050  # seconds between the tokens of a request, at most
ALIKE = 0.98  # of the cheapest: a layout that is as good, so fewer GPUs decide
MIXED = (
    ("quantization", f"{DENSE}, none: throughput", DENSE, "bf16"),
    ("quantization", f"{DENSE}, fp8+fp8: throughput", DENSE, "fp8"),
    ("moe", f"{MOE}, triton: throughput", MOE, "bf16"),
)
"""Runs of 256 mixed requests: results, key, model, weights."""


@dataclass(frozen=True)
class Rates:
    """What was neither measured by our benchmarks nor is in bench/scaling.py. Sources: docs/scaling.md."""

    nvlink: float = 0.8 * 450e9
    """Bytes per second of a GPU to others of its node, in one direction."""
    nvlink_seconds: float = 16.5e-6
    """Of a send between two GPUs of a node."""
    network: float = 0.9 * 50e9
    """Bytes per second of a GPU to other nodes: 400 Gbit/s each."""
    network_seconds: float = 32e-6
    price: float = 3.5
    """Dollars for a GPU and hour."""
    mtbf: float = 16_384 * 54 * 24 / 419 * 3600
    """Seconds of a GPU between two failures of what it needs."""
    repair: float = 24 * 3600.0
    """Seconds until a node that failed is back."""
    detect: float = 30.0
    """Seconds until a failure is noticed and a start begins."""
    start: float = 9.6
    """Seconds of a start beside reading weights: measured, imports and CUDA graphs included."""
    disk: float = DISK
    """Bytes per second that a node reads from its own disk."""
    store: float = 100e9
    """Bytes per second of a store that all nodes read from together."""
    event: float = 76e-6
    """Seconds of a core for each event of a stream: measured, of our HTTP process."""
    request: float = 0.21 / 89.5
    """Seconds of a core for each request: measured, its short answer included."""


RATES = Rates()


@dataclass(frozen=True)
class Layout:
    """How a replica is laid out."""

    pp: int = 1
    """Stages, and as many micro-batches in flight, as the runtime has at least."""
    tp: int = 1

    @property
    def gpus(self) -> int:
        """Of one replica."""
        return self.pp * self.tp

    def replicas(self, nodes: int) -> int:
        """How many so many nodes hold; a replica that spans several nodes has them to itself."""
        if self.gpus <= NODE:
            return nodes * (NODE // self.gpus)
        return nodes // -(-self.gpus // NODE)

    def __str__(self) -> str:
        return f"PP {self.pp} x TP {self.tp}"


class Parts(NamedTuple):
    """Seconds of one micro-batch on one stage, by what they are spent on."""

    weights: float
    """Read."""
    products: float
    """Of decodes, where they take longer than reading the weights, and of prompts."""
    cache: float
    """Keys and values read."""
    fixed: float
    """Of each layer, whatever it reads."""
    all_reduce: float

    @property
    def total(self) -> float:
        """All of them, one after the other."""
        return sum(self)

    def times(self, factor: float) -> "Parts":
        """All of them so many times as long."""
        return Parts(*(factor * seconds for seconds in self))


@dataclass(frozen=True)
class Replica:
    """What one replica does when it has enough to do."""

    model: str
    weights: str
    layout: Layout
    gb: float
    """Of weights, on each GPU."""
    batch: int
    """Requests in all micro-batches; 0: it does not fit."""
    room: int
    """Requests whose keys and values fit."""
    parts: Parts
    send: float
    """Seconds from one stage to the next."""
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
        """For a million output tokens, at full load."""
        return RATES.price / 3600 / self.rate_of_gpu * 1e6

    @property
    def shares(self) -> dict[str, float]:
        """Parts of the time of a GPU, which add up to 1: what the stages do, and what they wait for sends."""
        busy = self.layout.pp / self.between
        shares = {name.replace("_", "-"): busy * seconds for name, seconds in self.parts._asdict().items()}
        return {**shares, "waiting for stages": max(0.0, 1 - sum(shares.values()))}


class Model:
    """Predicts replicas from what was measured."""

    def __init__(self, measured: Measured, rates: Rates = RATES) -> None:
        self.measured, self.rates = measured, rates

    def replica(self, model: str, weights: str, layout: Layout, work: Work = WORK, most: int = MOST) -> Replica:
        """One replica with as many requests as fit, but at most so many in a micro-batch."""
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
        """Seconds of one prompt token in a large step on `tp` GPUs, its part of the all-reduces included."""
        share = share_of(model, weights, tp)
        reduced = 2 * share.layers * self._reduced(2 * share.hidden, tp)
        reach = self.experts_reach if share.expert_bytes else self.prompts_reach[weights]
        return _prompt_flops(model, weights, tp) / (self.measured.speed.flops * reach) + reduced

    def all_reduce(self, share: Share, tp: int, batch: int) -> float:
        """Seconds of all of a decode step; those of more than a MiB by the rate of NVLink beyond it."""
        known = scaling.KIB * max(scaling.LATENCIES["direct"][tp]) if tp > 1 else 0
        beyond = max(0, 2 * batch * share.hidden - known)
        return collectives(share, tp, batch, "direct") + 2 * share.layers * self._reduced(beyond, tp)

    def _reduced(self, size: float, tp: int) -> float:
        """Each GPU sends and receives 2 (n - 1) / n of what is reduced."""
        return 2 * (tp - 1) / tp * size / self.rates.nvlink

    def send(self, hidden: int, tokens: int, layout: Layout) -> float:
        """Seconds of the hidden states of so many tokens from one stage to the next."""
        if layout.gpus <= NODE:
            return self.rates.nvlink_seconds + 2 * hidden * tokens / self.rates.nvlink
        return self.rates.network_seconds + 2 * hidden * tokens / self.rates.network

    def first_token(self, model: str, weights: str, layout: Layout, prompt: int, chunk: int = 2048) -> float:
        """Seconds to the first token of one prompt alone: its chunks fill and drain the pipeline."""
        chunks = -(-prompt // chunk)
        decode = self.parts(model, weights, layout, 1, WORK, prompts=False).total
        stage = decode + prompt / chunks * self.prompt_token(model, weights, layout.tp) / layout.pp
        sends = (layout.pp - 1) * self.send(share_of(model, weights, layout.tp).hidden, prompt // chunks, layout)
        return chunks * stage / (1 - bubble(layout.pp, chunks)) / self.factor + sends

    @cached_property
    def prompts_reach(self) -> dict[str, float]:
        """The part of the measured bf16 products that prompts reach, by weights: 64 prompts of the dense model."""
        found = {}
        for weights, scheme in scaling.WEIGHTS.items():
            _, steps = self.measured.needed("quantization", f"{DENSE}, {scheme}: decode")
            tokens = 64 * steps["64"]["outpace"]["input_len"] / (steps["64"]["median_ttft_ms"] / 1e3)
            found[weights] = tokens * _prompt_flops(DENSE, weights) / self.measured.speed.flops
        return found

    @cached_property
    def experts_reach(self) -> float:
        """The same with experts, from 256 mixed requests: what such a run loses at its ends is that of the dense model.

        The prompts are given the time that the decodes leave.
        """
        dense, moe = (self.run(*run[:2]) for run in (MIXED[0], MIXED[2]))
        decode = self.parts(MOE, "bf16", Layout(), MOST, moe[1], prompts=False).total / MOST / self.factor
        lost = self.replica(DENSE, "bf16", Layout(), dense[1]).rate / dense[0]
        token = (1 / (lost * moe[0]) - decode) * moe[1].new / moe[1].prompt * self.factor
        return _prompt_flops(MOE, "bf16") / token / self.measured.speed.flops

    def run(self, what: str, key: str) -> tuple[float, Work]:
        """Output tokens/s of a run, and its mean lengths."""
        run = self.measured.needed(what, key)[1]
        prompt, new = (round(run[f"total_{side}_tokens"] / run["num_requests"]) for side in ("input", "output"))
        return run["output_throughput"], Work(prompt, new)

    @cached_property
    def factor(self) -> float:
        """What one GPU does of what the parts say: the 8B with 256 requests of 1,000 + 1,000 tokens."""
        measured = self.measured.needed("runtime", f"{DENSE}: full-load")[1]["output_throughput"]
        return float(measured) * self.parts(DENSE, "bf16", Layout(), MOST, WORK).total / MOST

    def checks(self) -> list[dict[str, Any]]:
        """What was measured on one GPU, beside what the same arithmetic says."""
        rows = []
        for what, key, name, weights in (("runtime", f"{DENSE}: full-load", DENSE, "bf16"), *MIXED):
            rate, work = self.run(what, key)
            said = self.replica(name, weights, Layout(), work).rate
            rows.append({"run": key, "measured tokens/s": rate, "simulated": said, "ratio": said / rate})
        return rows


def _prompt_flops(model: str, weights: str, tp: int = 1) -> float:
    """Of a prompt token, which needs no logits."""
    share = share_of(model, weights, tp)
    return share.token_flops - 2 * share.hidden * rank_shape(model, tp)["vocab_size"]


def _experts(model: str, tp: int, batch: int) -> float:
    """Experts of a layer that the busiest rank reads; where nearly all are read, ranks differ little."""
    total, top_k = (SHAPES[model].get(key, 0) for key in ("num_experts", "num_experts_per_tok"))
    if total and batch > 64:
        return Experts(total, top_k, {}).touched(batch) / tp
    return experts_read(total, top_k, tp, batch)[1]


def layouts(model: Model, name: str, weights: str) -> list[Replica]:
    """Every layout that fits with every batch, cheapest tokens first; those that are too slow between tokens last."""
    every = (
        model.replica(name, weights, Layout(pp, tp), most=most) for pp in PIPELINE for tp in TENSOR for most in BATCHES
    )
    return sorted((each for each in every if each.batch), key=lambda each: (each.between > BETWEEN, -each.rate_of_gpu))


def choose(found: Sequence[Replica]) -> Replica:
    """Of those that are about as cheap as the cheapest the one with the fewest GPUs."""
    alike = [each for each in found if each.rate_of_gpu >= ALIKE * found[0].rate_of_gpu and each.between <= BETWEEN]
    return min(alike or found[:1], key=lambda each: (each.layout.gpus, -each.rate_of_gpu))
