"""`outpace bench serve`: measures latencies, throughput and goodput of any OpenAI-compatible server under load."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from outpace.bench import figures
from outpace.bench.figures import FASTGEN_PROMPT, Figures, Run, Trace
from outpace.bench.load import Pace, Request, Target, Watch, load, make_request
from outpace.bench.workload import END_ID, Item, Source, Workload
from outpace.errors import InputError, OutpaceError

FASTGEN_RATES = (2, 4, 6)
"""Generated tokens per second in DeepSpeed-FastGen's service level agreement."""
FASTGEN_SPAN = 16
"""Span of its moving average of the time per token."""
UNLIMITED = 1 << 20  # tokens of a request, if the server does not say
PROBE_SECONDS = 60.0
PERCENTS = (90, 99)
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work number night point home water room mother area"
)
WORDS = _TEXT.split()
"""Prompts for servers that take no token ids: one word per token."""


@dataclass(frozen=True)
class Server:
    """A server, and how to send it requests."""

    target: Target
    model: str
    max_model_len: int
    takes_ids: bool
    """Whether prompts are sent as token ids; otherwise as about as many words."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More fields of each request."""

    def request(self, item: Item) -> Request:
        """One request of a workload."""
        prompt = item.prompt if self.takes_ids else " ".join(WORDS[token % len(WORDS)] for token in item.prompt)
        return make_request(self.target.endpoint, self.model, prompt, item.output_len, self.extra)


def find(target: Target, model: str | None, extra: Mapping[str, Any]) -> Server:
    """Ask a server for its model, and whether it takes token ids."""
    with _client(target, target.base) as client:
        try:
            card = _card(client, model)
            name = model or str(card.get("id", ""))
            if not name:
                raise InputError("model: the server lists no models; name one")
            asked = {"model": name, "prompt": [20, 21], "max_tokens": 1}
            takes = target.endpoint == "completions" and client.post("/completions", json=asked).status_code == 200
        except httpx.HTTPError as error:
            raise OutpaceError(f"url: {target.base}: {error or type(error).__name__}") from None
    return Server(target, name, int(card.get("max_model_len") or UNLIMITED), takes, extra)


def _client(target: Target, url: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers=dict(target.headers), timeout=PROBE_SECONDS)


def _card(client: httpx.Client, model: str | None) -> dict[str, Any]:
    """The server's entry for the model, or for its first model; empty: there is none."""
    reply = client.get("/models")
    if reply.status_code in (401, 403):
        raise InputError("api-key: the server refuses it; give another one")
    try:
        return next((card for card in reply.json()["data"] if model in (None, card.get("id"))), {})
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def source_of(
    server: Server, workload: Workload, tokenize: Callable[[str], list[int]] | None = None, vocab: int = END_ID
) -> Source:
    """The requests of a workload. The server tokenizes the texts of a dataset, unless `tokenize` is given."""
    with _client(server.target, server.target.base.removesuffix("/v1")) as client:

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

    async def both() -> Run[Trace]:
        if warm_up:
            at_once = Pace(max_concurrency=pace.max_concurrency)
            await load(server.target, [server.request(item) for item in warm_up], at_once, seed)
        return await load(server.target, [server.request(item) for item in items], pace, seed, watch)

    found = asyncio.run(both())
    if all(trace.error for trace in found.traces):
        raise OutpaceError(f"every request failed; the first: {found.traces[0].error}")
    rate = int(pace.rate) if pace.rate.is_integer() else pace.rate
    is_finite = rate != float("inf")
    return {
        "model_id": server.model,
        "endpoint": server.target.endpoint,
        "prompts_are_token_ids": server.takes_ids,
        "num_prompts": len(items),
        "request_rate": rate if is_finite else "inf",
        "arrival": pace.arrival if is_finite else None,
        "max_concurrency": pace.max_concurrency,
        **figures_of(found, goodput),
    }


def figures_of(found: Run[Trace], goodput: Mapping[str, float] | None = None) -> Figures:
    """The figures of a load; a request that failed counts only as failed."""
    good = [trace for trace in found.traces if not trace.error]
    seconds, begin = found.seconds, min(trace.start for trace in found.traces)
    met = None if goodput is None else sum(_meets(trace, goodput) for trace in good) / seconds
    return {
        **figures.figures_of(good, seconds, PERCENTS),
        **figures.spread("e2el", [trace.latency for trace in good], PERCENTS),
        "failed": len(found.traces) - len(good),
        "request_goodput": met,
        "goodput_sla_ms": None if goodput is None else dict(goodput),
        "max_output_tokens_per_s": _peak_tokens(good, begin),
        "max_concurrent_requests": _most_in_flight(found.traces),
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
    """Parse ttft:200 tpot:50 e2el:1000 as milliseconds; None: no limits are given."""
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
    """Whether a request meets FastGen's agreement: 512 prompt tokens/s, and always at least `rate` new tokens/s.

    The time per token is averaged exponentially, with a span of 16, from the second token on.
    """
    if trace.ttft > trace.prompt_tokens / FASTGEN_PROMPT:
        return False
    tokens = max(1.0, (trace.output_tokens - 1) / max(1, len(trace.times) - 1))  # per event
    return all(average <= tokens / rate for average in moving_average(trace.gaps, FASTGEN_SPAN))


def moving_average(values: Sequence[float], span: int) -> Iterator[float]:
    """Exponential moving averages: each earlier value weighs 1 - 2 / (span + 1) times as much as the next one."""
    keep, total, weight = 1 - 2 / (span + 1), 0.0, 0.0
    for value in values:
        total, weight = value + keep * total, 1 + keep * weight
        yield total / weight


def _peak_tokens(traces: Sequence[Trace], begin: float) -> float:
    """Most tokens that came within a second of the run."""
    seconds: Counter[int] = Counter()
    for trace in traces:
        for moment in trace.times:
            seconds[int(moment - begin)] += trace.output_tokens / len(trace.times)  # type: ignore[assignment]
    return float(max(seconds.values(), default=0))


def _most_in_flight(traces: Sequence[Trace]) -> int:
    now = most = 0
    for _, change in sorted([(trace.start, 1) for trace in traces] + [(trace.end, -1) for trace in traces]):
        now += change
        most = max(most, now)
    return most
