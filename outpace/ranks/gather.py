"""How node 0 waits for the other nodes and makes them start their ranks."""

import contextlib
import socket
import time
from collections.abc import Callable

from outpace.config import LLMConfig
from outpace.errors import EngineDead
from outpace.log import logger
from outpace.ranks.agent import all_options
from outpace.ranks.door import Door, Wanted
from outpace.ranks.messages import frame
from outpace.ranks.network import Place, listen
from outpace.ranks.node_messages import StartRanks
from outpace.ranks.process import versions
from outpace.ranks.watch import Follower, Watch
from outpace.ranks.world import shares_device

SAY_EVERY = 5.0  # seconds between log lines about missing nodes
Tell = Callable[[str], None]


def open_doors(config: LLMConfig, size: int, place: Place) -> tuple[Door, socket.socket]:
    """Start listening for nodes and their ranks, and for the store."""
    nodes, with_gpus = config.nodes, config.device_type == "cuda" and not shares_device()
    gpus = size // nodes.nnodes if with_gpus else None
    wanted = Wanted(nodes.nnodes, size, versions(), gpus, all_options(config), nodes.link_timeout)
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(listen(place.address, place.port))
        store = listen(place.address, place.port + 1)
        stack.pop_all()
    return Door(control, wanted), store


def gather(watch: Watch, door: Door, place: Place, seconds: float, tell: Tell) -> None:
    """Wait until all nodes have joined. Raises EngineDead if one is missing or does not match."""
    now = time.monotonic()
    until, say_at = now + seconds, now + SAY_EVERY
    tell(_missing(door))
    while not watch.wait(lambda: door.problem is not None or not door.missing, min(say_at, until) - time.monotonic()):
        if watch.cause is not None:
            raise EngineDead(watch.cause)
        now = time.monotonic()
        if now >= until:
            away = "".join(f"; {address} was refused: {reason}" for address, reason in list(door.turned_away.items()))
            names = ", ".join(f"node {number}" for number in door.missing)
            raise EngineDead(
                f"nodes: {names} of {door.wanted.nnodes} did not connect to {place.address} port {place.port} "
                f"within {seconds:g} s; start `outpace serve` there with its --node-rank and --master-addr "
                f"{place.master}, and check the link{away}"
            )
        if now >= say_at:
            say_at = now + SAY_EVERY
            logger.warning("%s at %s port %d", _missing(door), place.address, place.port)
            tell(_missing(door))
    if door.problem is not None:
        raise EngineDead(f"nodes: {door.problem}")
    door.open = False


def start_ranks(watch: Watch, door: Door, followers: list[Follower], seconds: float, tell: Tell) -> None:
    """Make all nodes start their ranks, and wait until the ranks have connected."""
    wanted = door.wanted
    tell("starting ranks on all nodes")
    for node in watch.nodes:
        node.sender.send_small(frame(StartRanks(list(node.ranks), wanted.size, door.key)))
    if not watch.wait(lambda: len(followers) == wanted.size - 1, seconds):
        there = {each.rank for each in followers}
        away = [rank for rank in range(1, wanted.size) if rank not in there]
        raise EngineDead(
            watch.cause or f"nodes: ranks {away} did not connect within {seconds:g} s; see the output of their nodes"
        )


def _missing(door: Door) -> str:
    return f"waiting for {', '.join(f'node {number}' for number in door.missing)} of {door.wanted.nnodes}"
