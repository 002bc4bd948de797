"""`LLM` over two nodes, in somebody's own process: it answers and ends; when the link is cut, the call raises."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.models import tiny
from tests.nodes import hosts
from tests.nodes.hosts import REASON
from tests.patience import PATIENCE

SCRIPT = """
import json, sys, time
import outpace

folder, options = sys.argv[1], json.loads(sys.argv[2])
with outpace.LLM(folder, device="cpu", num_blocks=200, tensor_parallel_size=2, nnodes=2, **options) as llm:
    greedy = outpace.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    print("tokens", llm.generate([[1, 2, 3]], greedy, use_tqdm=False)[0].outputs[0].token_ids, flush=True)
    if sys.stdin.readline() == "on\\n":
        try:
            while True:
                llm.generate([[1, 2, 3]], greedy, use_tqdm=False)
        except outpace.errors.EngineDead as error:
            print("dead:", error, flush=True)
print("over", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("nodes") / "model"
    tiny("llama").save_pretrained(made)
    return made


@contextmanager
def started(cluster: hosts.Cluster, **options: object) -> Iterator[tuple[hosts.Process, hosts.Process]]:
    given = {"master_addr": cluster.master, "master_port": cluster.port, "join_timeout": PATIENCE, "link_timeout": 8}
    script = hosts.Process([sys.executable, "-c", SCRIPT, str(cluster.folder), json.dumps({**given, **options})])
    place = "--master-addr", cluster.seen[0], "--master-port", cluster.seen[1], "--node-rank", 1, "--nnodes", 2
    node = hosts.serve(cluster.folder, *place, "--device", "cpu", "--join-timeout", PATIENCE, prefix=cluster.prefix)
    with script, node:
        script.wait_for("tokens [")
        yield script, node


def test_the_other_node_ends_with_the_llm(folder: Path) -> None:
    with hosts.over_a_proxy(folder) as cluster, started(cluster) as (script, node):
        script.say("off\n")
        script.wait_for("over")
        assert script.code() == 0
        assert node.code() == 0


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_collective_over_a_cut_link_raises(folder: Path) -> None:
    def act() -> None:
        with hosts.in_namespaces(folder) as cluster, started(cluster) as (script, node):
            script.say("on\n")
            cluster.cut()
            assert "no message from node 1 (10.77.0.2) for 8 s" in script.wait_for("dead:")
            script.wait_for("over")
            assert script.code() == 0
            node.wait_for("no message from node 0 at 10.77.0.1")

    hosts.inside(act)
