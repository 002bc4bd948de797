"""Addresses, interfaces and sockets between nodes; uses only the ports and the interface asked for. No torch."""

import array
import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from outpace.config.sections import NodesConfig
from outpace.errors import ConfigError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFCONF = 0x8912
_ENTRY = 40  # bytes per interface in the system's answer
_ENTRIES = 256  # most interfaces
_AT_ONCE = 1 << 18  # bytes to read at a time


@dataclass(frozen=True, slots=True)
class Place:
    """A node's place in the network."""

    address: str
    """Its own address, on the interface that leads to the others."""
    interface: str
    master: str
    """The address of node 0 as this node reaches it."""
    port: int
    named: bool
    """Whether the user named the interface."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make gloo and NCCL use only this interface; the user's own settings win."""
        wanted = dict(zip(VARIABLES, (self.interface, f"={self.interface}"), strict=True))
        return {name: value for name, value in wanted.items() if self.named or name not in os.environ}


def place_of(nodes: NodesConfig) -> Place:
    """Find this node's place. Raises for unknown names and interfaces."""
    assert nodes.master_addr is not None, "checked by the config"
    master = _resolved(nodes.master_addr)
    known = interfaces()
    if nodes.interface is None:
        own = _source(master)
        found = next((name for name, address in known if address == own), None)
        if found is None:
            raise ConfigError(f"nodes.interface: no interface of this machine has the address {own}; name one")
        return Place(own if nodes.node_rank else master, found, master, nodes.master_port, named=False)
    own_of = [address for name, address in known if name == nodes.interface]
    if not own_of:
        names = ", ".join(dict.fromkeys(name for name, _ in known))
        raise ConfigError(
            f"nodes.interface: {nodes.interface!r} is not an interface of this machine with an address; give one of "
            f"{names}"
        )
    same_kind = [address for address in own_of if _family(address) == _family(master)]
    own = master if master in own_of else next(iter(same_kind or own_of))
    return Place(own, nodes.interface, master, nodes.master_port, named=True)


def interfaces() -> list[tuple[str, str]]:
    """Pairs (interface, address) of this machine."""
    if sys.platform != "linux":
        return [("lo0", "127.0.0.1")]
    return [*_ipv4(), *_ipv6()]


def _ipv4() -> Iterator[tuple[str, str]]:
    room = array.array("B", bytes(_ENTRY * _ENTRIES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iL", len(room), room.buffer_info()[0]))
    data = room.tobytes()[: struct.unpack("iL", answer)[0]]
    for start in range(0, len(data), _ENTRY):
        entry = data[start : start + _ENTRY]
        yield entry[:16].split(b"\0", 1)[0].decode(), socket.inet_ntoa(entry[20:24])


def _ipv6() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError), Path("/proc/net/if_inet6").open(encoding="ascii") as lines:
        for line in lines:
            digits, *_, name = line.split()
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _resolved(name: str) -> str:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"nodes.master_addr: {name!r} cannot be found ({error}); give the address of node 0"
        ) from None
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def _source(address: str) -> str:
    """This machine's source address for packets to another one."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((address, 9))  # nothing is sent
        except OSError as error:
            raise ConfigError(
                f"nodes.master_addr: no route to {address} ({error.strerror}); check the address and the network"
            ) from None
        return str(asked.getsockname()[0])


def listen(address: str, port: int) -> socket.socket:
    """A listening socket on one address of this machine."""
    try:
        return socket.create_server((address, port), family=_family(address), backlog=1024)
    except OSError as error:
        is_address = error.errno == errno.EADDRNOTAVAIL
        name = "nodes.master_addr" if is_address else "nodes.master_port"
        remedy = (
            "give an address of node 0, or name its interface"
            if is_address
            else f"give another: node 0 needs {port} for itself"
        )
        raise ConfigError(f"{name}: cannot listen on {address} port {port} ({error.strerror}); {remedy}") from None


def connect(address: str, port: int, own: str, timeout: float) -> socket.socket:
    """Connect to node 0 from this node's own address; raises OSError after a timeout."""
    source = (own, 0) if _family(own) == _family(address) else None
    return socket.create_connection((address, port), timeout, source)


def watch_over(sock: socket.socket, seconds: float) -> None:
    """Make the system close a connection that is silent for `seconds`, and send small frames at once."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    if sys.platform == "linux":
        options += [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(seconds / 2))),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(seconds / 6))),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds)),
        ]
    with contextlib.suppress(OSError):  # it has ended: its reader will notice
        for option in options:
            sock.setsockopt(*option)


def writable(sock: socket.socket) -> bool:
    """Whether a small frame can be sent without blocking."""
    ready = select.poll()
    ready.register(sock, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in ready.poll(0))


def received(sock: socket.socket) -> bytes:
    """The bytes that have arrived, after waiting for some; empty: the connection has ended."""
    try:
        return sock.recv(_AT_ONCE)
    except OSError:  # the system closed the connection
        return b""


def own_sockets() -> dict[int, str]:
    """The sockets of this process: the system's name of each by file descriptor. Empty if the system has none."""
    found = {}
    with contextlib.suppress(OSError):
        for file in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if (name := str(file.readlink())).startswith("socket:"):
                    found[int(file.name)] = name
    return found


def connections(names: Collection[str]) -> Iterator[socket.socket]:
    """Duplicates of the named sockets that are network connections."""
    for number, name in own_sockets().items():
        with contextlib.suppress(OSError):
            if name in names:
                with socket.socket(fileno=os.dup(number)) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        sock.getpeername()  # raises unless connected
                        yield sock


def watch_over_new(before: Collection[str], seconds: float) -> None:
    """`watch_over` all connections that are not in `before`: those that gloo has opened."""
    for sock in connections(set(own_sockets().values()) - set(before)):
        watch_over(sock, seconds)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
