"""Metrics of several servers as those of one: totals and histograms are added up, gauges where a sum makes sense.

Totals never fall: when the process of a replica ends, its last known totals stay.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import add

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_TOTALS = frozenset({"counter", "histogram", "summary"})
_CREATED = "_created"  # when a series began, in seconds since 1970
GAUGES: Mapping[str, Callable[[float, float], float]] = {
    "outpace:kv_cache_usage_perc": max,
    "outpace:engine_ready": max,
    "outpace:startup_seconds": max,
    "outpace:cache_config_info": max,
    "outpace:expert_imbalance": max,
}
"""Gauges that cannot be added up -> how two of them become one."""

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Family:
    """All series of one name."""

    text: str
    kind: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def add(self, name: str, other: "Family") -> None:
        """Merge the series of another server into these."""
        join = _join(name, self.kind)
        for key, value in other.samples.items():
            self.samples[key] = value if key not in self.samples else join(self.samples[key], value)


Families = dict[str, Family]


def parsed(text: str) -> Families:
    """The families in a text of Prometheus' format."""
    found: Families = {}
    for metric in text_string_to_metric_families(text):
        family = found.setdefault(metric.name, Family(metric.documentation, metric.type))
        for sample in metric.samples:
            family.samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def merged(parts: Iterable[Families]) -> Families:
    """The families of several servers as those of one."""
    whole: Families = {}
    for part in parts:
        for name, family in part.items():
            whole.setdefault(name, Family(family.text, family.kind)).add(name, family)
    return whole


def totals(families: Families) -> Families:
    """The families that stay true when their server is gone."""
    return {name: each for name, each in families.items() if each.kind in _TOTALS or name.endswith(_CREATED)}


def _join(name: str, kind: str) -> Callable[[float, float], float]:
    if kind in _TOTALS:
        return add
    return min if name.endswith(_CREATED) else GAUGES.get(name, add)


class Numbers:
    """The newest metrics of each replica, and the totals of processes that are gone."""

    def __init__(self) -> None:
        self._newest: dict[int, Families] = {}
        self._past: Families = {}

    def take(self, replica: int, text: str | None) -> None:
        """The newest text of a replica; None: it does not answer now, and its gauges are not known."""
        if text is not None:
            self._newest[replica] = parsed(text)
        elif replica in self._newest:
            self._newest[replica] = totals(self._newest[replica])

    def retire(self, replica: int) -> None:
        """The process of a replica has ended: the next begins at 0."""
        if (last := self._newest.pop(replica, None)) is not None:
            self._past = merged([self._past, totals(last)])

    def whole(self) -> Families:
        """All metrics, as those of one server."""
        return merged([self._past, *self._newest.values()])


class Shown(Collector):
    """Families in the form that the library can write."""

    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The families."""
        for name, family in self._families.items():
            metric = Metric(name, family.text, family.kind)
            for (sample, labels), value in family.samples.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric
