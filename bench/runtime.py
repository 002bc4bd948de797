"""Measures models through `LLM` and compares each part with its limit: `scripts/bench runtime`, `moe`, `quantization`.

The three commands differ only in their defaults (bench/plans.py). --experts and --schemes run all parts once for each
implementation of experts and each scheme of quantization ("+": also keys and values, as in fp8+fp8). If a part fails,
it becomes a row and the others go on; results are written after each part. docs/benchmarks.md describes the parts.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bench import kernels, report
from bench.kernel_cases import attend
from bench.plans import EXPERTS, PLANS, TINY, Others, Sizes, ways
from bench.report import Found, Report, Row, row
from outpace.bench.figures import SPLIT, WHOLE
from outpace.bench.latency import decode_step, first_token, latency
from outpace.bench.plot import plot_splitfuse, plot_steps, plot_throughput
from outpace.bench.profiling import profile_decode
from outpace.bench.shapes import SHAPES
from outpace.bench.splitfuse import splitfuse
from outpace.bench.subject import Subject, started
from outpace.bench.throughput import sweep, throughput
from outpace.bench.workload import SEED, Item, Workload, uniform

START_TARGETS = {"empty": 10.0, "full": 5.0}
"""Seconds that a start should take at most, in place of a limit: a start has no physical one."""
START = """
import json, sys
from outpace.kernels.limits import Speed
from outpace.bench.subject import started
with started(sys.argv[1], speed=Speed(1.0, 1.0), catch_up=False, **json.loads(sys.argv[2])) as subject:
    print(json.dumps(subject.startup_seconds))
"""


@dataclass(frozen=True)
class Bench:
    """A model with certain options, and the measurements of its parts."""

    model: str
    to: Report
    sizes: Sizes = field(default_factory=Sizes)
    way: str = ""
    """Follows the model's name in rows: implementation of experts, scheme."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `LLM`."""
    others: Others = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The beginning of the names of parts in the results."""
        return f"{self.model}{f', {self.way}' * bool(self.way)}"

    def draw(self, what: str, plot: Callable[[Path], None]) -> None:
        """Draw a picture of this model."""
        parts = (Path(self.model).name, self.way.replace(" ", "-"), what)
        self.to.draw("_".join(filter(None, parts)), plot)

    @property
    def many(self) -> dict[str, Any]:
        """Options with as many slots as throughput has requests."""
        return {"max_num_seqs": self.sizes.requests, "max_model_len": longest(self.model, 4096), **self.options}

    @property
    def plain(self) -> dict[str, Any]:
        """Default options of `LLM`, except for the longest request."""
        return {"max_model_len": longest(self.model, self.sizes.max_model_len), **self.options}

    def measure(self, parts: Sequence[str]) -> None:
        """Measure these parts."""
        if first := {name: run for name, run in SHARED.items() if name in parts}:
            self.share_start({"ready": Bench.ready, **first}, self.many)
        self.share_start({name: run for name, run in DEFAULTS.items() if name in parts}, self.plain)
        self.start_alone(parts)

    def share_start(self, measures: Mapping[str, "Measure"], options: Mapping[str, Any]) -> None:
        """Measure parts that share one start of the model."""
        if not measures:
            return
        self.to.say(f"{self.title}: starting")
        try:
            with started(self.model, speed=self.to.speed, **options) as subject:
                for name, run in measures.items():
                    self.to.part(f"{self.title}: {name}", partial(run, self, subject))
        except Exception as error:  # the start failed; `part` catches errors of parts
            self.to.failed(f"{self.title}: {', '.join(measures)}", error)

    def start_alone(self, parts: Sequence[str]) -> None:
        """Measure the parts that share no start."""
        for name, run in ALONE.items():
            if name in parts:
                self.to.part(f"{self.title}: {name}", partial(run, self))

    def row(self, what: str, figure: float, unit: str, limit: float | None = None, key: str | None = None) -> Row:
        """A row of this model."""
        other = self.others.get((self.model, self.way, key or what)) if self.to.device == "h200" else None
        return row(f"{self.model}: {self.way}{', ' * bool(self.way)}{what}", figure, unit, limit, other)

    def ready(self, subject: Subject) -> Found:
        """Seconds of the start in this process, without making weights, and the weights that a decode step reads."""
        took, rows = subject.startup_seconds, []
        rows.append(self.row("ready, without making weights", took["all"] - took["load"], "s"))
        if subject.cost is not None:
            rows.append(self.row("weights that a step reads", subject.cost.weight_bytes / 1e9, "GB"))
        return rows, {**took, "quantized": str(subject.llm.quantized)}

    def throughput(self, subject: Subject) -> Found:
        """Requests of mixed lengths, all at once: the workload that other engines were measured with."""
        return self._requests(subject, "throughput", self.sizes.workload)

    def full_load(self, subject: Subject) -> Found:
        """Equal numbers of prompt and new tokens, in every slot of the batch."""
        length = self.sizes.full_load
        return self._requests(subject, f"{length}/{length}", Workload(input_len=length, output_len=length), 32)

    def _requests(self, subject: Subject, what: str, workload: Workload, warm_up: int | None = None) -> Found:
        source, count = _source(subject, workload), self.sizes.requests
        first = [Item(item.prompt, warm_up or item.output_len) for item in source.warm_up(count, SEED)]
        found = throughput(subject, source.draw(count, SEED), first)
        return self._rates(what, found), found

    def _rates(self, what: str, found: dict[str, Any]) -> list[Row]:
        limit = found["outpace"]["limit"]["output_throughput"]
        rows = [self.row(what, found["output_throughput"], "tok/s", limit)]
        return [*rows, self.row(f"{what}, median between tokens", found["median_itl_ms"], "ms")]

    def decode(self, subject: Subject) -> Found:
        """Decode steps of one request and of several."""
        found = [self._decode(subject, batch) for batch in self.sizes.decode_batches]
        details = {str(each["outpace"]["batch_size"]): each for _, each in found}
        return [each for rows, _ in found for each in rows], details

    def latency(self, subject: Subject) -> Found:
        """One request alone."""
        return self._decode(subject, 1)

    def _decode(self, subject: Subject, batch: int) -> Found:
        prompt, new = self.sizes.decode
        found = latency(subject, batch_size=batch, input_len=prompt, output_len=new, iters=3 if batch < 32 else 1)
        rate, limit = found["decode_tokens_per_second"], found["outpace"]["limit"]
        least = limit["decode_tokens_per_second"]
        rows = [self.row(f"decode step of {batch}", 1e3 / rate, "ms", 1e3 / least)]
        if batch == 1:
            rows.append(self.row("decode of one", rate, "tok/s", least))
            rows.append(self.row("first token", found["median_ttft_ms"], "ms", limit["ttft_ms"]))
        return rows, found

    def profile(self, subject: Subject) -> Found:
        """Decode steps of a full batch."""
        found = profile_decode(subject, _source(subject, self.sizes.workload).draw(self.sizes.requests, SEED))
        what = f"decode step of {found['batch_size']}"
        rows = [self.row(f"{what}, host", found["host_us_per_step"], "us")]
        return [*rows, self.row(f"{what}, GPU busy", found["gpu_busy"] or 0.0, "of the time")], found

    def sweep(self, subject: Subject) -> Found:
        """Throughput against latency."""
        points = list(sweep(subject, _source(subject, self.sizes.workload), self.sizes.levels, SEED))
        self.draw("sweep", partial(plot_throughput, points, subject.cost, subject.speed))
        found = zip(self.sizes.levels, points, strict=True)
        return [each for level, point in found for each in self._rates(f"{level} in flight", point)], points

    def long_prompts(self, subject: Subject) -> Found:
        """Long prompts with short answers, all at once."""
        lengths, count = {"prompt": self.sizes.prompt, "output": self.sizes.output}, self.sizes.long_requests
        found = throughput(subject, *(uniform(subject.vocab_size, count, SEED + turn, **lengths) for turn in (0, 1)))
        least, what = found["outpace"]["limit"], "long prompts, prompt and output tokens"
        limit = None if least is None else found["total_num_tokens"] / least["seconds"]
        return [self.row(what, found["total_token_throughput"], "tok/s", limit, key="long prompts")], found

    def batches(self, subject: Subject) -> Found:
        """A decode step of few requests, compared with its limit and with a step of one request."""
        rows, details, alone = [], {}, 0.0
        for batch in self.sizes.batches:
            found = details[str(batch)] = decode_step(subject, batch, output_len=self.sizes.new_tokens)
            rows.append(self.row(f"step of {batch}", found["step_ms"], "ms", found["limit_ms"]))
            if alone:
                what = f"step of {batch} to that of {self.sizes.batches[0]}"
                rows.append(self.row(what, found["step_ms"] / alone, "times"))
            alone = alone or found["step_ms"]
        return rows, details

    def prefill(self, subject: Subject) -> Found:
        """The first token of one long prompt; lengths that do not fit the model are skipped."""
        fitting = [length for length in self.sizes.prefills if length < subject.llm.engine.max_model_len]
        found = {str(length): first_token(subject, length) for length in fitting}
        rows = [self.row(f"first token of {n}", each["ttft_ms"], "ms", each["limit_ms"]) for n, each in found.items()]
        return rows, found

    def splitfuse(self) -> Found:
        """Decodes beside long prompts. The limit of P95 is the limit of a step with only these decodes."""
        sizes, speed = self.sizes.experiment, self.to.speed
        with started(self.model, speed=speed, **{**self.options, **sizes.options()}) as subject:
            found, cost, least = splitfuse(subject, sizes), subject.cost, None
        if cost is not None:
            least = 1e3 * cost.decode_seconds(sizes.decoders, sizes.decoder_prompt, speed)
        if self.to.save:
            self.draw("splitfuse", partial(plot_splitfuse, found))
        rows = []
        for way, percent in product((SPLIT, WHOLE), (50, 95, 99)):
            limit = least if (way, percent) == (SPLIT, 95) else None
            rows.append(self.row(f"{way}, P{percent} between tokens", found[way][f"p{percent}_itl_ms"], "ms", limit))
        rows += [self.row(f"{way}, output tokens", found[way]["output_throughput"], "tok/s") for way in (SPLIT, WHOLE)]
        rows.append(self.row("P95 of whole prompts to that of SplitFuse", found["p95_itl_ratio"], "times"))
        return [*rows, self.row("tokens/s of SplitFuse to whole", found["throughput_ratio"], "times")], found

    def deterministic(self) -> Found:
        """The cost of `deterministic`: throughput with it and without it."""
        rates, details, count = [], {}, 64
        for chosen in (False, True):
            given = {**self.many, "max_num_seqs": count, "deterministic": chosen}
            with started(self.model, speed=self.to.speed, **given) as subject:
                source = _source(subject, self.sizes.workload)
                found = throughput(subject, source.draw(count, SEED), source.warm_up(count, SEED))
            details[f"deterministic={chosen}"] = found
            rates.append(found["output_throughput"])
        what = f"{count} at a time"
        rows = [self.row(what, rates[0], "tok/s"), self.row(f"{what}, deterministic", rates[1], "tok/s")]
        return [*rows, self.row(f"{what}, deterministic to not", rates[1] / rates[0], "times")], details

    def start(self) -> Found:
        """Seconds until ready in a process of its own, with empty kernel caches and then with full ones.

        Imports and making the weights are not counted.
        """
        rows, details = [], {}
        with tempfile.TemporaryDirectory() as cache:
            for state, target in START_TARGETS.items():
                took = details[state] = seconds_of_start(self.model, self.options, Path(cache))
                seconds, key = took["all"] - took["load"], "ready" if state == "empty" else None
                rows.append(self.row(f"ready, kernel cache {state}", seconds, "s", target, key))
        return rows, details

    def few_long(self) -> Found:
        """Decode attention over a few long contexts among many short ones; the limit is the time to read their pages.

        The keys of a launch do not fit in the L2 cache. The decode plan is shared among launches, as in a step.
        """
        (few, long), (many, short) = self.sizes.few, self.sizes.many
        seqs = [(1, short)] * many
        for place in range(few):  # evenly among the short ones
            seqs.insert(place * (many + few) // few, (1, long))
        case = attend(self.sizes.heads, seqs + [(0, 0)] * (self.sizes.slots - len(seqs)))
        took = kernels.seconds_of([partial(case.ways[0].run, *each) for each in case.inputs])
        limit = case.amount / self.to.speed.bandwidth
        details = {"seconds": took, "limit_seconds": limit, "bytes": case.amount}
        return [self.row(f"{few} x {long} + {many} x {short} keys", took * 1e3, "ms", limit * 1e3)], details


Measure = Callable[[Bench, Subject], Found]
SHARED: Mapping[str, Measure] = {
    "throughput": Bench.throughput, "latency": Bench.latency, "decode": Bench.decode, "profile": Bench.profile,
    "full-load": Bench.full_load, "sweep": Bench.sweep,
}  # fmt: skip
"""Parts that share one start with as many slots as throughput has requests."""
DEFAULTS: Mapping[str, Measure] = {
    "long-prompts": Bench.long_prompts, "batches": Bench.batches, "prefill": Bench.prefill,
}  # fmt: skip
"""Parts that share one start with the defaults of `LLM`."""
ALONE: Mapping[str, Callable[[Bench], Found]] = {
    "splitfuse": Bench.splitfuse, "deterministic": Bench.deterministic, "start": Bench.start,
    "few-long": Bench.few_long,
}  # fmt: skip
"""Parts with starts of their own."""
PARTS = (*SHARED, *DEFAULTS, *ALONE)


def _source(subject: Subject, workload: Workload) -> Any:
    return workload.source(subject.vocab_size, subject.tokenize, subject.llm.engine.max_model_len)


def longest(model: str, wanted: int) -> int:
    """The wanted tokens of a request, but at most the positions of the shape."""
    return min(wanted, SHAPES.get(model, {}).get("max_position_embeddings", wanted))


def seconds_of_start(model: str, options: Mapping[str, Any], cache: Path) -> dict[str, float]:
    """Seconds of each part of a start in a new process, which stores compiled kernels and measured rates in `cache`."""
    environment = {"TRITON_CACHE_DIR": str(cache / "triton"), "OUTPACE_CACHE": str(cache / "outpace")}
    parts: dict[str, float] = report.child("-c", START, model, json.dumps(dict(options)), environment=environment)
    return parts


def draw_steps(benches: Sequence[Bench], to: Report) -> None:
    """Draw milliseconds of a model's step by batch, measured and at the limit, for each way that was measured."""
    lines: dict[str, dict[int, float]] = {}
    for bench in benches:
        found, name = to.details.get(f"{bench.title}: decode", {}), bench.way or "measured"
        steps = {int(batch): each for batch, each in found.items() if batch.isdigit()}
        if steps:
            lines[name] = {batch: 1e3 / each["decode_tokens_per_second"] for batch, each in steps.items()}
            least = {batch: each["outpace"]["limit"]["decode_tokens_per_second"] for batch, each in steps.items()}
            lines[f"limit of {name}"] = {batch: 1e3 / rate for batch, rate in least.items()}
    if lines:
        model = benches[0].model
        to.draw(Path(model).name, partial(plot_steps, lines, f"{model} on {to.device}"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the requested parts. The first word is the name of a plan."""
    given = sys.argv[1:] if arguments is None else arguments
    what = given[0] if given and given[0] in PLANS else "runtime"
    plan, options = PLANS[what], report.parser(__doc__)
    options.add_argument("plan", nargs="?", choices=PLANS, default="runtime")
    options.add_argument("--models", default=plan.models, help="shapes, or models")
    options.add_argument("--only", type=report.names(PARTS), default=plan.parts, help=f"parts: {', '.join(PARTS)}")
    options.add_argument("--experts", type=report.names(EXPERTS), default=plan.experts, help="implementations")
    options.add_argument("--schemes", default=plan.schemes, help="of quantization: none,int8,int4,fp8,fp8+fp8, ...")
    options.add_argument("--options", type=report.json_object, default={}, help="more options of LLM, as JSON")
    options.add_argument("--tiny", action="store_true", help="little work, to try it on a CPU")
    asked = options.parse_args(given)
    to = Report(what, asked.out)
    if asked.options:
        to.notes["options of LLM"] = json.dumps(asked.options)
    sizes, found = TINY if asked.tiny else plan.sizes, ways(asked.experts, asked.schemes.split(","))
    for model in asked.models.split(","):
        benches = [
            Bench(model, to, sizes, way, {**chosen, **asked.options}, plan.others) for way, chosen in found.items()
        ]
        for bench in benches:
            bench.measure([part for part in asked.only if part != "few-long"])
        draw_steps(benches, to)
    if "few-long" in asked.only:
        Bench("attention", to, sizes).measure(["few-long"])
    to.show()


if __name__ == "__main__":
    main()
