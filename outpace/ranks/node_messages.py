"""What crosses the network between node 0 and the others, beside what ranks are sent: plain data, as in `messages`.

Each connection begins with one `Join` or `Arrive`, and is answered with `Accepted` or `Refused`.
"""

from typing import Any

import msgspec

from outpace.ranks.messages import Ping, Pong

PROTOCOL = 1
"""Of these messages; nodes with different ones do not work together."""
LONGEST_HELLO = 1 << 16  # bytes that somebody may send who is not known yet


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A node says who it is."""

    protocol: int
    nnodes: int
    node_rank: int
    versions: dict[str, str]
    gpus: int | None
    """None: it was asked to use none."""
    model: str | None
    """Where it has the model; None: where node 0 has it."""
    options: dict[str, Any]
    """Of the engine, those that were given there."""


class Arrive(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The connection of a rank that a node starts."""

    protocol: int
    rank: int
    key: str
    """That the node was given for its ranks."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Go on."""

    link_timeout: float
    """Seconds of silence after which the other side counts as lost."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Go away."""

    reason: str
    again: bool = False
    """It may be different later."""


class StartRanks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start these, each with a connection of its own."""

    ranks: list[int]
    size: int
    key: str


class Serving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All ranks have loaded the model."""


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Last of all: the ranks end."""

    cause: str | None
    """What failed; None: they were asked to end."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank of the node has ended."""

    rank: int
    how: str


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Last of all: why the node goes."""

    why: str


Hello = Join | Arrive
ToNode = Accepted | Refused | StartRanks | Serving | End | Ping
FromNode = Ended | Leaving | Pong
