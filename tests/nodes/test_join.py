"""Who may come in at node 0, what the others are told, and how strangers are kept out."""

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from outpace.config import LLMConfig
from outpace.errors import ConfigError, EngineDead
from outpace.ranks import agent, door, gather, network
from outpace.ranks.door import Door, Wanted
from outpace.ranks.messages import Frames, Pong, frame
from outpace.ranks.node_messages import PROTOCOL, Accepted, Arrive, End, Join, Refused, ToNode
from outpace.ranks.process import versions
from outpace.ranks.watch import Watch
from tests.nodes.hosts import free_ports
from tests.patience import PATIENCE

JOIN = Join(PROTOCOL, 3, 1, versions(), None, None, {"tensor_parallel": {"tp_size": 3}})


@dataclass
class Hall:
    """A node 0 that waits for two others."""

    door: Door
    watch: Watch
    port: int
    lost: "queue.SimpleQueue[str]"

    def knock(self, data: bytes = b"") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        sock.sendall(data)
        return sock

    def join(self, **fields: Any) -> tuple[socket.socket, ToNode]:
        sock = self.knock(frame(msgspec.structs.replace(JOIN, **fields)))
        return sock, first(sock)

    def gather(self, seconds: float = PATIENCE) -> None:
        place = network.Place("127.0.0.1", "lo", "127.0.0.1", self.port, named=False)
        gather.gather(self.watch, self.door, place, seconds, lambda part: None)


def first(sock: socket.socket) -> ToNode:
    """The first message that comes, of those that are no signs of life."""
    frames = Frames[ToNode](ToNode)
    while data := sock.recv(frames.wanted):
        if found := [each for each in frames.feed(data) if type(each).__name__ != "Ping"]:
            return found[0]
    raise AssertionError("nothing came")


def ends(sock: socket.socket) -> bool:
    """Whether the other side closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass
    return True


@pytest.fixture
def hall() -> Iterator[Hall]:
    options = agent.all_options(LLMConfig.of(device="cpu", tensor_parallel_size=3))
    wanted = Wanted(3, 3, versions(), None, options, PATIENCE)
    made = Door(socket.create_server(("127.0.0.1", 0)), wanted)
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = Watch([], lost.put, made, lambda: None)
    yield Hall(made, watch, made.listener.getsockname()[1], lost)
    watch.closing = True
    watch.kill()
    watch.thread.join(PATIENCE)


def test_all_nodes_come_in_and_later_ones_are_told_to_come_again(hall: Hall) -> None:
    socks = [hall.join(node_rank=rank) for rank in (1, 2)]
    assert [answer for _, answer in socks] == [Accepted(PATIENCE)] * 2
    hall.gather()
    late, answer = hall.join(node_rank=1)
    assert isinstance(answer, Refused)
    assert answer.again
    for sock in (late, *(sock for sock, _ in socks)):
        sock.close()
    assert hall.lost.get(timeout=PATIENCE).endswith("(127.0.0.1) closed its connection; the other ranks were ended")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"protocol": 99}, "speaks protocol 99, node 0 1; install the same version"),
        ({"nnodes": 2}, "was started with nnodes=2, node 0 with 3; give all of them the same"),
        ({"versions": {**versions(), "torch": "1.0"}}, "has torch 1.0, node 0 has "),
        (
            {"options": {"cache": {"block_size": 16}}},
            "was given cache.block_size=16, node 0 has 64; set it to the same on all",
        ),
    ],
)
def test_a_node_that_differs_is_an_error_on_every_node(hall: Hall, fields: dict[str, Any], says: str) -> None:
    good, _ = hall.join(node_rank=2)
    bad, answer = hall.join(**fields)
    assert isinstance(answer, Refused)
    assert answer.reason.startswith(f"node 1 (127.0.0.1) {says}")
    assert not answer.again
    with pytest.raises(EngineDead, match=r"^nodes: node 1 \(127\.0\.0\.1\) ") as caught:
        hall.gather()
    hall.watch.closing = True
    hall.watch.dismiss(str(caught.value))
    assert first(good) == End(str(caught.value))
    good.close()
    bad.close()


def test_a_node_with_too_few_gpus(hall: Hall) -> None:
    hall.door.wanted = replace(hall.door.wanted, gpus=1)
    sock, answer = hall.join(gpus=0)
    assert isinstance(answer, Refused)
    assert "has 0 GPUs for 1 ranks; ask for fewer ranks" in answer.reason
    sock.close()


@pytest.mark.parametrize(("rank", "says"), [(1, "node 1 has joined from 127.0.0.1 already"), (7, "there is no node 7")])
def test_a_wrong_rank_is_refused_and_named_to_whoever_waits(hall: Hall, rank: int, says: str) -> None:
    good, _ = hall.join(node_rank=1)
    bad, answer = hall.join(node_rank=rank)
    assert isinstance(answer, Refused)
    assert answer.reason.startswith(says)
    with pytest.raises(EngineDead, match=rf"^nodes: node 2 of 3 did not connect to .* refused: {says}"):
        hall.gather(seconds=0.01)
    good.close()
    bad.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        frame(Pong()),
        frame(Arrive(PROTOCOL, 1, "a key that nobody gave")),
        b"",
        b"\x10",
    ],
)
def test_strangers_are_sent_away_and_disturb_nobody(hall: Hall, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(data) < 4:
        monkeypatch.setattr(door, "HELLO", 0.01)
    with hall.knock(data) as sock:
        assert ends(sock)
    monkeypatch.undo()
    socks = [hall.join(node_rank=rank)[0] for rank in (1, 2)]
    hall.gather()
    for each in socks:
        each.close()


def test_many_strangers_at_once_are_turned_away(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "STRANGERS", 2)
    kept = [hall.knock() for _ in range(2)]
    with hall.knock() as sock:
        assert ends(sock)
    for each in kept:
        each.close()


def test_a_silent_node_is_lost(hall: Hall) -> None:
    hall.door.wanted = replace(hall.door.wanted, link_timeout=0.05)
    sock, _ = hall.join()
    assert "no message from node 1 (127.0.0.1) for 0.05 s" in hall.lost.get(timeout=PATIENCE)
    sock.close()


def node(port: int, **options: Any) -> agent.Agent:
    given = {"nnodes": 3, "node_rank": 1, "master_addr": "127.0.0.1", "master_port": port, **options}
    return agent.Agent(None, LLMConfig.of(device="cpu", **given))


def test_an_agent_is_refused_with_the_reason(hall: Hall) -> None:
    with pytest.raises(EngineDead, match=r"refuses this node: node 1 .* was started with nnodes=2"):
        node(hall.port, nnodes=2).run()


def test_an_agent_without_a_node_0() -> None:
    port = free_ports(1)
    with pytest.raises(
        EngineDead, match=rf"node 0 at 127.0.0.1 port {port} did not accept this node within 0.1 s \(.*refused"
    ):
        node(port, join_timeout=0.1).run()


def test_an_agent_at_the_door_of_somebody_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def speak() -> None:
            with other.accept()[0] as sock:
                sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(EngineDead, match=r"did not accept this node within 0\.01 s"):
            node(other.getsockname()[1], join_timeout=0.01).run()
        thread.join()


def test_an_agent_ends_with_the_error_of_node_0(hall: Hall) -> None:
    ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            node(hall.port).run()
        except BaseException as error:
            ended.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert hall.watch.wait(lambda: 1 in hall.door.nodes, PATIENCE)
    with pytest.raises(EngineDead, match="node 2 of 3 did not connect") as caught:
        hall.gather(seconds=0.01)
    hall.watch.closing = True
    hall.watch.dismiss(str(caught.value))
    assert str(ended.get(timeout=PATIENCE)) == str(caught.value)
    thread.join(PATIENCE)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"interface": "nonesuch0"}, "nodes.interface: 'nonesuch0' is not an interface .*; give one of lo"),
        ({"master_addr": "no.such.host.invalid"}, "nodes.master_addr: 'no.such.host.invalid' cannot be found"),
    ],
)
def test_a_place_that_is_none(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        node(29500, **options)


def test_a_port_in_use_and_an_address_of_somebody_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"nodes.master_port: cannot listen on 127.0.0.1 port {port} \(Address al"
        ):
            network.listen("127.0.0.1", port)
    with pytest.raises(
        ConfigError, match=r"nodes.master_addr: cannot listen on 203.0.113.7 .*; give an address of node"
    ):
        network.listen("203.0.113.7", 29500)


def test_only_the_interface_asked_for_is_used() -> None:
    nodes = LLMConfig.of(nnodes=2, node_rank=1, master_addr="127.0.0.1", interface="lo").nodes
    place = network.place_of(nodes)
    assert (place.address, place.interface) == ("127.0.0.1", "lo")
    assert place.environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    with network.listen(place.address, 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
