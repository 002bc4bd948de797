"""`outpace serve` over two nodes: it answers, a node is killed, the link is cut; clients get an error and it heals."""

from pathlib import Path

import pytest

import outpace
from outpace.types import SamplingParams
from tests.nodes import hosts
from tests.nodes.hosts import REASON
from tests.server.live import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("nodes") / "model"
    write_model(made)
    return made


@pytest.fixture(scope="module")
def wanted(folder: Path) -> str:
    with outpace.LLM(folder, device="cpu", num_blocks=8) as llm:
        return llm.generate("hello", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].outputs[0].text


def test_a_cut_link_and_a_killed_node_over_a_proxy(folder: Path, wanted: str) -> None:
    with (
        hosts.over_a_proxy(folder) as cluster,
        cluster.client() as http,
        cluster.node_0() as first,
        cluster.node_1() as second,
    ):
        cluster.wait_ready(http, first)
        assert hosts.answer(http) == wanted
        status = http.get("/status").json()
        assert [each.partition(" (")[0] for each in status["nodes"]] == ["node 0", "node 1"]
        assert status["nodes"][1].endswith("ranks [1]")

        assert hosts.lose(http, cluster.cut)["code"] == "engine_failed"
        first.wait_for("no message from node 1 (")
        second.wait_for("for node 0 to come back")  # by our silence limit or TCP's, whichever is first
        cluster.mend()
        cluster.wait_ready(http, first)
        assert hosts.answer(http) == wanted
        assert http.get("/status").json()["restarts"] == 1

        seen = len(first.lines)
        assert hosts.lose(http, second.process.kill)["code"] == "engine_failed"
        first.wait_for("; the other ranks were ended", seen)
        first.wait_for("waiting for node 1 of 2", seen)
        assert "waiting for node 1 of 2" in http.get("/health").json()["error"]["message"]
        first.process.terminate()
        assert first.code() == 0


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_killed_node_and_a_cut_link_in_namespaces(folder: Path, wanted: str) -> None:
    def act() -> None:
        with hosts.in_namespaces(folder) as cluster, cluster.client() as http, cluster.node_0() as first:
            with cluster.node_1() as second:
                cluster.wait_ready(http, first)
                assert hosts.answer(http) == wanted
                assert hosts.lose(http, second.process.kill)["code"] == "engine_failed"
                first.wait_for("; the other ranks were ended")
                first.wait_for("waiting for node 1 of 2")  # from now on it listens
            with cluster.node_1("--join-timeout", 5) as second:
                cluster.wait_ready(http, first)
                assert hosts.answer(http) == wanted
                seen = len(first.lines)
                assert hosts.lose(http, cluster.cut)["code"] == "engine_failed"
                first.wait_for("no message from node 1 (10.77.0.2)", seen)
                second.wait_for("for node 0 to come back")  # by our silence limit or TCP's, whichever is first
                assert second.code() == 1, "nobody came back"
                second.wait_for("error: node 0 at 10.77.0.1 port 29500 did not accept this node within 5 s")

    hosts.inside(act)
