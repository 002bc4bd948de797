"""Messages between node 0 and the other nodes, besides those to ranks: plain data, as in `messages`.

Each connection begins with a `Join` or an `Arrive`, which is answered with `Accepted` or `Refused`.
"""

from typing import Any

import msgspec

from outpace.ranks.messages import Ping, Pong

PROTOCOL = 1
"""Version of these messages; it must be the same on all nodes."""
LONGEST_HELLO = 1 << 16  # most bytes of the first message of a connection


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A node introduces itself."""

    protocol: int
    nnodes: int
    node_rank: int
    versions: dict[str, str]
    gpus: int | None
    """Number of GPUs; None: GPUs are not used."""
    model: str | None
    """Path of its model; None: the same as on node 0."""
    options: dict[str, Any]
    """Engine options set on that node."""


class Arrive(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Opens the connection of a rank that a node starts."""

    protocol: int
    rank: int
    key: str
    """The secret that the node was given for its ranks."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The connection is accepted."""

    link_timeout: float
    """Seconds of silence after which the other side is lost."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The connection is refused."""

    reason: str
    again: bool = False
    """Whether it may succeed later."""


class StartRanks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start these ranks, each with its own connection."""

    ranks: list[int]
    size: int
    key: str


class Serving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All ranks have loaded the model."""


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last message: the ranks must end."""

    cause: str | None
    """What failed; None: a regular end."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank of the node has ended."""

    rank: int
    how: str


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last message: why the node leaves."""

    why: str


Hello = Join | Arrive
ToNode = Accepted | Refused | StartRanks | Serving | End | Ping
FromNode = Ended | Leaving | Pong
