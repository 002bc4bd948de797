"""`outpace bench serve`: latencies, throughput and goodput of any OpenAI-compatible server, under load from outside."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from outpace.bench.load import Load, Pace, Request, Target, Trace, Watch, load, make_request
from outpace.bench.workload import END_ID, Item, Source, Workload
from outpace.errors import InputError, OutpaceError

Figures = dict[str, Any]
FASTGEN_PROMPT = 512.0
"""Prompt tokens a second that DeepSpeed-FastGen's measure asks for."""
FASTGEN_RATES = (2, 4, 6)
"""Generated tokens a second that it asks for."""
FASTGEN_SPAN = 16
"""Of the moving average of a token's time."""
UNLIMITED = 1 << 20  # tokens of a request, where the server does not say
PROBE_SECONDS = 60.0
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work number night point home water room mother area"
)
WORDS = tuple(_TEXT.split())
"""Prompts for servers that take no token ids: one word for each."""


@dataclass(frozen=True)
class Server:
    """A server and how it is asked."""

    target: Target
    model: str
    max_model_len: int
    takes_ids: bool
    """Whether prompts go as token ids; else as words, about as many."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More fields of each request."""

    def request(self, item: Item) -> Request:
        """One request of a workload."""
        prompt = item.prompt if self.takes_ids else " ".join(WORDS[token % len(WORDS)] for token in item.prompt)
        return make_request(self.target.endpoint, self.model, prompt, item.output_len, self.extra)


def find(target: Target, model: str | None, extra: Mapping[str, Any]) -> Server:
    """Ask a server what it serves, and whether it takes token ids."""
    with httpx.Client(base_url=target.base, headers=dict(target.headers), timeout=PROBE_SECONDS) as client:
        try:
            card = _card(client, model)
            name = model or str(card.get("id", ""))
            if not name:
                raise InputError("model: the server does not say what it serves; name it")
            takes = target.endpoint == "completions" and _takes_ids(client, name)
        except httpx.HTTPError as error:
            raise OutpaceError(f"url: {target.base}: {error or type(error).__name__}") from None
    return Server(target, name, int(card.get("max_model_len") or UNLIMITED), takes, extra)


def _card(client: httpx.Client, model: str | None) -> dict[str, Any]:
    reply = client.get("/models")
    if reply.status_code in (401, 403):
        raise InputError("api-key: the server wants another one")
    try:
        cards = [card for card in reply.json()["data"] if model in (None, card.get("id"))]
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return cards[0] if cards else {}


def _takes_ids(client: httpx.Client, model: str) -> bool:
    reply = client.post("/completions", json={"model": model, "prompt": [20, 21], "max_tokens": 1})
    return reply.status_code == 200


def source_of(
    server: Server, workload: Workload, tokenize: Callable[[str], list[int]] | None = None, vocab: int = END_ID
) -> Source:
    """The requests of a workload; texts of a dataset are tokenized by the server, unless there is something else."""
    headers, root = dict(server.target.headers), server.target.base.removesuffix("/v1")
    with httpx.Client(base_url=root, headers=headers, timeout=PROBE_SECONDS) as client:

        def ask(text: str) -> list[int]:
            reply = client.post("/tokenize", json={"model": server.model, "prompt": text})
            if reply.status_code != 200:
                raise InputError("dataset: the server has no /tokenize; give prompts as token ids, or name a tokenizer")
            return list(reply.json()["tokens"])

        return workload.source(vocab, tokenize or ask, server.max_model_len)


def measure(
    server: Server,
    items: Sequence[Item],
    pace: Pace,
    *,
    warm_up: Sequence[Item] = (),
    goodput: Mapping[str, float] | None = None,
    seed: int = 0,
    watch: Watch | None = None,
) -> Figures:
    """Run the warm-up, then the requests at their pace; figures under the names of `vllm bench serve`."""

    async def both() -> Load:
        if warm_up:
            at_once = Pace(max_concurrency=pace.max_concurrency)
            await load(server.target, [server.request(item) for item in warm_up], at_once, seed)
        return await load(server.target, [server.request(item) for item in items], pace, seed, watch)

    found = asyncio.run(both())
    if all(trace.error for trace in found.traces):
        raise OutpaceError(f"every request failed; the first: {found.traces[0].error}")
    finite = pace.rate != float("inf")
    return {
        "model_id": server.model,
        "endpoint": server.target.endpoint,
        "prompts_are_token_ids": server.takes_ids,
        "num_prompts": len(items),
        "request_rate": _number(pace.rate) if finite else "inf",
        "arrival": pace.arrival if finite else None,
        "max_concurrency": pace.max_concurrency,
        **figures_of(found, goodput),
    }


def _number(rate: float) -> float:
    return int(rate) if rate.is_integer() else rate


def figures_of(found: Load, goodput: Mapping[str, float] | None = None) -> Figures:
    """The figures of a load; those of requests that failed count only as failed."""
    good = [trace for trace in found.traces if not trace.error]
    seconds, begin = found.seconds, min(trace.start for trace in found.traces)
    inputs, outputs = sum(trace.prompt_tokens for trace in good), sum(trace.output_tokens for trace in good)
    met = None if goodput is None else sum(_meets(trace, goodput) for trace in good) / seconds
    return {
        "duration": seconds,
        "completed": len(good),
        "failed": len(found.traces) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "request_goodput": met,
        "goodput_sla_ms": None if goodput is None else dict(goodput),
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": _peak_tokens(good, begin),
        "max_concurrent_requests": _most_at_once(found.traces),
        **_spread("ttft", [trace.ttft for trace in good]),
        **_spread("tpot", [trace.tpot for trace in good if trace.tpot is not None]),
        **_spread("itl", [gap for trace in good for gap in trace.gaps]),
        **_spread("e2el", [trace.latency for trace in good]),
        "effective_throughput": {
            str(rate): sum(meets_fastgen(trace, rate) for trace in good) / seconds for rate in FASTGEN_RATES
        },
        "input_lens": [trace.prompt_tokens for trace in found.traces],
        "output_lens": [trace.output_tokens for trace in found.traces],
        "ttfts": [trace.ttft if trace.times else 0.0 for trace in found.traces],
        "itls": [trace.gaps for trace in found.traces],
        "start_times": [trace.start - begin for trace in found.traces],
        "errors": [trace.error for trace in found.traces],
    }


def parse_goodput(words: Sequence[str]) -> dict[str, float] | None:
    """ttft:200 tpot:50 e2el:1000 as milliseconds; None: nothing is asked for."""
    wanted: dict[str, float] = {}
    for word in (part for given in words for part in given.replace(",", " ").split()):
        name, _, number = word.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        if name not in ("ttft", "tpot", "e2el") or not 0 < limit < float("inf"):
            raise InputError(f"goodput: expected ttft:MS, tpot:MS or e2el:MS, got {word!r}")
        wanted[name] = limit
    return wanted or None


def _meets(trace: Trace, limits: Mapping[str, float]) -> bool:
    reached = {"ttft": trace.ttft, "tpot": trace.tpot or 0.0, "e2el": trace.latency}
    return all(reached[name] * 1e3 <= limit for name, limit in limits.items())


def meets_fastgen(trace: Trace, rate: float) -> bool:
    """DeepSpeed-FastGen's agreement: 512 prompt tokens a second, and never less than `rate` new ones on average.

    The average of a token's time is a moving one (exponential, of span 16) that begins with the second token.
    """
    if trace.ttft > trace.prompt_tokens / FASTGEN_PROMPT:
        return False
    tokens = max(1.0, (trace.output_tokens - 1) / max(1, len(trace.times) - 1))  # in one piece
    return all(average <= tokens / rate for average in moving_average(trace.gaps, FASTGEN_SPAN))


def moving_average(values: Sequence[float], span: int) -> Iterator[float]:
    """Each value averaged with those before it, whose weights fall by 1 - 2 / (span + 1) from one to the next."""
    keep, total, weight = 1 - 2 / (span + 1), 0.0, 0.0
    for value in values:
        total, weight = value + keep * total, 1 + keep * weight
        yield total / weight


def _peak_tokens(traces: Sequence[Trace], begin: float) -> float:
    """Most tokens that came within a second of the run."""
    seconds: Counter[int] = Counter()
    for trace in traces:
        each = trace.output_tokens / len(trace.times)
        for moment in trace.times:
            seconds[int(moment - begin)] += each  # type: ignore[assignment]
    return float(max(seconds.values(), default=0))


def _most_at_once(traces: Sequence[Trace]) -> int:
    """Most requests in flight."""
    changes = sorted([(trace.start, 1) for trace in traces] + [(trace.end, -1) for trace in traces])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _spread(name: str, seconds: Sequence[float]) -> Figures:
    """Mean, median, deviation and percentiles in milliseconds."""
    values = np.asarray(seconds or [0.0]) * 1e3
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p90_{name}_ms": float(np.percentile(values, 90)),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
    }
