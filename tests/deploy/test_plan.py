"""Options of `outpace deploy` and what Ray Serve is asked for: pure functions, no Ray."""

from typing import Any

import pytest

from outpace import ConfigError
from outpace.config import AskedConfig
from outpace.deploy import plan
from outpace.deploy.options import DeployConfig
from outpace.server.options import ServerConfig

CLUSTER = {"CPU": 64.0, "GPU": 8.0}


def asked(**options: Any) -> AskedConfig:
    return AskedConfig.of(options)


@pytest.mark.parametrize(
    ("deploy", "options", "cluster", "needed"),
    [
        ({}, {}, CLUSTER, {"CPU": 1, "GPU": 1}),
        ({}, {}, {"CPU": 8.0}, {"CPU": 1}),
        ({}, {"device": "cuda"}, {"CPU": 8.0}, {"CPU": 1, "GPU": 1}),
        ({}, {"device": "cpu"}, CLUSTER, {"CPU": 1}),
        ({"cpus_per_rank": 2}, {"tensor_parallel_size": 4}, CLUSTER, {"CPU": 8, "GPU": 4}),
        ({}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, CLUSTER, {"CPU": 4, "GPU": 4}),
        ({"gpus_per_rank": 0.5}, {}, CLUSTER, {"CPU": 1, "GPU": 0.5}),
        ({"gpus_per_rank": 0}, {}, CLUSTER, {"CPU": 1}),
    ],
)
def test_a_replica_reserves_what_its_ranks_need(
    deploy: dict[str, Any], options: dict[str, Any], cluster: dict[str, float], needed: dict[str, float]
) -> None:
    made = plan.replica_options(DeployConfig(**deploy), ServerConfig(), asked(**options), cluster)
    assert made["placement_group_bundles"] == [needed]
    assert made["placement_group_strategy"] == "STRICT_PACK"
    assert made["ray_actor_options"] == {"num_cpus": needed["CPU"], "num_gpus": needed.get("GPU", 0)}


@pytest.mark.parametrize(
    ("deploy", "options", "said"),
    [
        ({"gpus_per_rank": 1}, {"device": "cpu"}, r"gpus_per_rank: device=cpu uses no GPU"),
        ({"gpus_per_rank": 0}, {"device": "cuda"}, r"gpus_per_rank: device=cuda needs a GPU"),
        ({"gpus_per_rank": 0.5}, {"tensor_parallel_size": 2}, r"gpus_per_rank: 2 ranks need a whole GPU each"),
    ],
)
def test_gpus_that_cannot_be(deploy: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan.bundle(DeployConfig(**deploy), asked(**options), CLUSTER)


def test_a_replica_that_fits_on_no_node_is_refused() -> None:
    nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 4.0}]
    plan.check_room({"CPU": 2, "GPU": 4}, nodes)
    with pytest.raises(ConfigError, match=r"one needs 4 CPU, 4 GPU on one node, .* at most 8 CPU; at most 4 GPU"):
        plan.check_room({"CPU": 4, "GPU": 4}, nodes)


def test_a_fixed_number_of_replicas() -> None:
    assert plan.scaling(DeployConfig(), asked()) == {"num_replicas": 1}
    assert plan.scaling(DeployConfig(replicas=3), asked()) == {"num_replicas": 3}
    assert plan.scaling(DeployConfig(min_replicas=2), asked()) == {"num_replicas": 2}


def test_scaling_aims_at_a_full_batch_unless_told() -> None:
    scaled = plan.scaling(DeployConfig(min_replicas=2, max_replicas=5), asked(max_num_seqs=32))["autoscaling_config"]
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (2, 5)
    assert scaled["target_ongoing_requests"] == 32
    told = DeployConfig(max_replicas=5, target_ongoing=7, upscale_delay=1, downscale_delay=2)
    scaled = plan.scaling(told, asked())["autoscaling_config"]
    assert (scaled["target_ongoing_requests"], scaled["upscale_delay_s"], scaled["downscale_delay_s"]) == (7, 1, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": 2, "max_replicas": 3}, "replicas: fixes the number, max_replicas is for scaling"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas: 2 is less than min_replicas=3"),
        ({"gpus_per_rank": 2}, "gpus_per_rank: a rank uses one GPU"),
        ({"name": "a/b"}, "name"),
        ({"replicas": 0}, "replicas"),
        ({"routing": "random"}, "routing"),
        ({"adress": "auto"}, "unknown name 'adress'.*address"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DeployConfig(**options)


def test_draining_lasts_as_long_as_the_server_says() -> None:
    server = ServerConfig(shutdown_timeout=45)
    assert plan.replica_options(DeployConfig(), server, asked(), CLUSTER)["graceful_shutdown_timeout_s"] > 45
    assert plan.ingress_options(DeployConfig(), server)["graceful_shutdown_timeout_s"] > 45


def test_the_router_is_the_one_asked_for() -> None:
    for routing, name in (("least-loaded", "LeastLoaded"), ("round-robin", "RoundRobin")):
        config = DeployConfig.of({"routing": routing})
        made = plan.replica_options(config, ServerConfig(), asked(), CLUSTER)
        assert made["request_router_config"]["request_router_class"] == f"outpace.deploy.routers:{name}"


def test_an_update_keeps_its_replicas_until_new_ones_are_ready() -> None:
    made = plan.replica_options(DeployConfig(), ServerConfig(), asked(), CLUSTER)
    assert made["max_surge_percent"] > 0


@pytest.mark.parametrize("name", ["max_connections", "max_connections_per_address"])
def test_what_cannot_act_behind_rays_proxy_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: has no effect"):
        plan.check(ServerConfig(**{name: 5}), asked())


def test_a_free_port_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match="port: "):
        plan.check(ServerConfig(port=0), asked())
    plan.check(ServerConfig(), asked())


def test_a_replica_does_not_span_nodes() -> None:
    several = asked(nnodes=2, master_addr="10.0.0.1", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="nnodes: a replica has all its ranks on one node"):
        plan.check(ServerConfig(), several)


def test_keys_of_this_machine_go_with_the_application() -> None:
    server = ServerConfig.of({"api_keys": ["one"], "port": 9000})
    assert plan.sent_options(server, {}) == {"api_keys": ["one"], "port": 9000}
    assert plan.sent_options(server, {"OUTPACE_API_KEYS": "two, three"})["api_keys"] == ["one", "two", "three"]
    assert ServerConfig(**plan.sent_options(server, {})).all_api_keys() == ("one",)


def test_http_options_are_the_servers() -> None:
    made = plan.http_options(ServerConfig(host="0.0.0.0", port=9000, keep_alive_timeout=7))
    assert (made["host"], made["port"], made["keep_alive_timeout_s"]) == ("0.0.0.0", 9000, 7)
