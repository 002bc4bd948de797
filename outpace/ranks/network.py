"""Addresses, interfaces and sockets between nodes: only the ports and the interface that were asked for. No torch."""

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
_ENTRY = 40  # bytes of an interface in what the system answers
_ENTRIES = 256  # interfaces


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node is in the network."""

    address: str
    """Its own, on the interface that leads to the others."""
    interface: str
    master: str
    """Where node 0 is, as this node reaches it."""
    port: int
    named: bool
    """Whether the interface was asked for."""

    @property
    def environment(self) -> dict[str, str]:
        """What makes gloo and NCCL use this interface alone. What the user's environment says stands, if it can."""
        wanted = dict(zip(VARIABLES, (self.interface, f"={self.interface}"), strict=True))
        return {name: value for name, value in wanted.items() if self.named or name not in os.environ}


def place_of(nodes: NodesConfig) -> Place:
    """Where this node is. Refuses names that nobody knows, and interfaces that this machine has not."""
    assert nodes.master_addr is not None, "checked by the config"
    master = _resolved(nodes.master_addr)
    known = interfaces()
    if nodes.interface is None:
        own = _source(master)
        found = next((name for name, address in known if address == own), None)
        if found is None:
            raise ConfigError(f"nodes.interface: none of this machine's has the address {own}; name one")
        return Place(own if nodes.node_rank else master, found, master, nodes.master_port, named=False)
    own_of = [address for name, address in known if name == nodes.interface]
    if not own_of:
        names = ", ".join(dict.fromkeys(name for name, _ in known))
        raise ConfigError(
            f"nodes.interface: {nodes.interface!r} is no interface with an address on this machine; there are {names}"
        )
    same_kind = [address for address in own_of if (":" in address) == (":" in master)]
    own = master if master in own_of else next(iter(same_kind or own_of))
    return Place(own, nodes.interface, master, nodes.master_port, named=True)


def interfaces() -> list[tuple[str, str]]:
    """Interfaces of this machine and their addresses; one with several is there several times."""
    if sys.platform != "linux":
        return [("lo0", "127.0.0.1")]
    return [*_ipv4(), *_ipv6()]


def _ipv4() -> Iterator[tuple[str, str]]:
    import array  # what the system writes to

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
    """The address of this machine that packets to another one come from."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((address, 9))  # nothing is sent
        except OSError as error:
            raise ConfigError(
                f"nodes.master_addr: there is no way to {address} ({error.strerror}); check it, or the network"
            ) from None
        return str(asked.getsockname()[0])


def listen(address: str, port: int) -> socket.socket:
    """A socket on one address of this machine; the error says what to change."""
    try:
        return socket.create_server((address, port), family=_family(address), backlog=1024)
    except OSError as error:
        is_address = error.errno == errno.EADDRNOTAVAIL
        name = "nodes.master_addr" if is_address else "nodes.master_port"
        remedy = (
            "give an address of node 0's own, or name its interface"
            if is_address
            else f"give another: node 0 needs {port} for itself"
        )
        raise ConfigError(f"{name}: cannot listen on {address} port {port} ({error.strerror}); {remedy}") from None


def connect(address: str, port: int, own: str, timeout: float) -> socket.socket:
    """A connection to node 0 from this node's own address; OSError if there is none in time."""
    source = (own, 0) if (":" in own) == (":" in address) else None
    return socket.create_connection((address, port), timeout, source)


def watch_over(sock: socket.socket, seconds: float) -> None:
    """Have the system end a connection whose other side does not answer for so long, and send small frames at once."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    if sys.platform == "linux":
        options += [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(seconds / 2))),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(seconds / 6))),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds)),
        ]
    with contextlib.suppress(OSError):  # it has ended: whoever reads it is told
        for option in options:
            sock.setsockopt(*option)


def writable(sock: socket.socket) -> bool:
    """Whether a small frame would leave at once."""
    ready = select.poll()
    ready.register(sock, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in ready.poll(0))


def own_sockets() -> dict[int, str]:
    """The sockets of this process: what the system calls each, by its number. Empty where the system does not say."""
    found = {}
    with contextlib.suppress(OSError):
        for file in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if (name := str(file.readlink())).startswith("socket:"):
                    found[int(file.name)] = name
    return found


def connections(names: Collection[str]) -> Iterator[socket.socket]:
    """The connections of this process over a network, of those sockets that are named. They are copies."""
    for number, name in own_sockets().items():
        with contextlib.suppress(OSError):
            if name in names:
                with socket.socket(fileno=os.dup(number)) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        sock.getpeername()  # an error unless it is connected
                        yield sock


def watch_over_new(before: Collection[str], seconds: float) -> None:
    """`watch_over` all connections that this process has made since: those of gloo."""
    for sock in connections(set(own_sockets().values()) - set(before)):
        watch_over(sock, seconds)


def peer(sock: socket.socket) -> str:
    """The address at the other side, of IPv4 as such."""
    return str(sock.getpeername()[0]).removeprefix("::ffff:")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
