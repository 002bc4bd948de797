"""Merges the answers of all replicas at one path. Each sample of metrics gets a label with its replica."""

import re
from collections.abc import Sequence

import msgspec

from outpace.replicas.pages import added

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?( .*)")


def merged_metrics(texts: Sequence[tuple[str, bytes]]) -> bytes:
    """One text of several, with a label `replica` on every sample; a family's lines stay together."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for replica, text in texts:
        comments: list[str] = []
        samples: list[str] = []
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                comments, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
            if line.startswith("#"):
                if line not in comments:
                    comments.append(line)
            elif found := _SAMPLE.fullmatch(line):
                labels = f'replica="{replica}"' + (f",{found[2]}" if found[2] else "")
                samples.append(f"{found[1]}{{{labels}}}{found[3]}")
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    return "".join(f"{line}\n" for line in lines).encode()


def merged_status(texts: Sequence[tuple[str, bytes]]) -> bytes:
    """/status of several replicas as that of one server, with their numbers added up, and each replica's own."""
    replies = [msgspec.json.decode(text) for _, text in texts]
    own = [
        {"replica": name, **{field: each[field] for field in ("ready", "in_flight", "restarts")}}
        for (name, _), each in zip(texts, replies, strict=True)
    ]
    return msgspec.json.encode({**added(replies), "replicas": own})
