"""Translates our options into those of Ray Serve. Pure functions: neither Ray nor torch is imported."""

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.config import AskedConfig
from outpace.config.rules import num_ranks
from outpace.deploy.options import DeployConfig
from outpace.errors import ConfigError
from outpace.server.options import ServerConfig, keys_in

ROUTERS: Mapping[str, str] = {
    "least-loaded": "outpace.deploy.routers:LeastLoaded",
    "round-robin": "outpace.deploy.routers:RoundRobin",
}
NOT_HERE: Mapping[str, str] = dict.fromkeys(
    ("max_connections", "max_connections_per_address"),
    "Ray's proxy takes the connections; limit them in the load balancer before it",
)
"""Options of `outpace serve` that cannot act behind Ray's HTTP proxy, and what to do instead."""
MANY = 100_000
"""Requests that an ingress process holds at most."""
CLOSING = 10.0  # seconds beyond shutdown_timeout in which a replica ends its engine
MOST_STARTS = 3  # of a replica that cannot start, before the deployment fails
LONGEST_LOOK_BACK = 30.0  # seconds of load that scaling looks at


def check(server: ServerConfig, asked: AskedConfig) -> None:
    """Refuse options that would be ignored."""
    if asked.nodes.nnodes > 1:
        raise ConfigError("nnodes: a replica has all its ranks on one node; use `outpace serve` for a model of several")
    for name, why in NOT_HERE.items():
        if name in server.model_fields_set:
            raise ConfigError(f"{name}: has no effect in `outpace deploy`: {why}")
    if server.port == 0:
        raise ConfigError("port: Ray's proxies on all nodes need one fixed port; give a number from 1 to 65535")


def gpus_per_rank(deploy: DeployConfig, asked: AskedConfig, cluster: Mapping[str, float]) -> float:
    """GPUs of a rank, given the resources of the whole cluster."""
    if asked.device_type == "cpu":
        if deploy.gpus_per_rank:
            raise ConfigError(
                f"gpus_per_rank: device=cpu uses no GPU, got {deploy.gpus_per_rank:g}; remove one of them"
            )
        return 0.0
    if deploy.gpus_per_rank == 0 and asked.device_type == "cuda":
        raise ConfigError("gpus_per_rank: device=cuda needs a GPU, got 0; remove one of them")
    if deploy.gpus_per_rank is not None:
        return deploy.gpus_per_rank
    return 1.0 if asked.device_type == "cuda" or cluster.get("GPU", 0.0) else 0.0


def bundle(deploy: DeployConfig, asked: AskedConfig, cluster: Mapping[str, float]) -> dict[str, float]:
    """The resources of one replica: the share of each of its ranks, times their number, on one node."""
    ranks, gpus = num_ranks(asked), gpus_per_rank(deploy, asked, cluster)
    if 0 < gpus < 1 and ranks > 1:
        raise ConfigError(f"gpus_per_rank: {ranks} ranks need a whole GPU each, got {gpus:g}; give 1")
    needed = {"CPU": deploy.cpus_per_rank * ranks}
    return needed | ({"GPU": gpus * ranks} if gpus else {})


def check_room(needed: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse a replica that no node of the cluster has room for, even an idle one: Ray would wait for ever."""
    if not any(all(node.get(name, 0.0) >= value for name, value in needed.items()) for node in nodes):
        asked = ", ".join(f"{value:g} {name}" for name, value in needed.items())
        largest = "; ".join(
            f"at most {max((node.get(name, 0.0) for node in nodes), default=0):g} {name}" for name in needed
        )
        raise ConfigError(
            f"replicas: one needs {asked} on one node, and the nodes of the cluster have {largest}; lower --tp or "
            "--cpus-per-rank, or add a larger node"
        )


def replica_options(
    deploy: DeployConfig, server: ServerConfig, asked: AskedConfig, cluster: Mapping[str, float]
) -> dict[str, Any]:
    """Options of the deployment whose replicas have the model."""
    needed = bundle(deploy, asked, cluster)
    actor = {"num_cpus": needed["CPU"], "num_gpus": needed.get("GPU", 0)}
    return {
        **scaling(deploy, asked),
        "name": "Model",
        "ray_actor_options": actor,
        "placement_group_bundles": [needed],
        "placement_group_strategy": "STRICT_PACK",
        "max_ongoing_requests": server.max_concurrent_requests,
        "graceful_shutdown_timeout_s": server.shutdown_timeout + CLOSING,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": deploy.health_check_period,
        "health_check_timeout_s": max(30.0, 2 * server.ready_timeout),
        "max_constructor_retry_count": MOST_STARTS,
        "request_router_config": {"request_router_class": ROUTERS[deploy.routing]},
        "rolling_update_percentage": 0.2,
        "max_surge_percent": 20,
    }


def scaling(deploy: DeployConfig, asked: AskedConfig) -> dict[str, Any]:
    """A fixed number of replicas, or bounds and the queue depth to aim at."""
    if deploy.replicas is not None or deploy.max_replicas in (None, deploy.min_replicas):
        return {"num_replicas": deploy.replicas or deploy.min_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": deploy.min_replicas,
            "max_replicas": deploy.max_replicas,
            "target_ongoing_requests": deploy.target_ongoing or asked.scheduler.max_num_seqs,
            "upscale_delay_s": deploy.upscale_delay,
            "downscale_delay_s": deploy.downscale_delay,
            "look_back_period_s": min(LONGEST_LOOK_BACK, max(1.0, deploy.upscale_delay)),
        }
    }


def ingress_options(deploy: DeployConfig, server: ServerConfig) -> dict[str, Any]:
    """Options of the deployment that forwards requests. It holds all requests of all replicas."""
    return {
        "name": "Ingress",
        "num_replicas": deploy.ingress_replicas,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": MANY,  # the replicas refuse what is too much
        "graceful_shutdown_timeout_s": server.shutdown_timeout + CLOSING,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": deploy.health_check_period,
        "max_constructor_retry_count": MOST_STARTS,
        "max_surge_percent": 100,
    }


def http_options(server: ServerConfig) -> dict[str, Any]:
    """Options of Ray's HTTP proxies."""
    return {
        "host": server.host,
        "port": server.port,
        "keep_alive_timeout_s": max(1, round(server.keep_alive_timeout)),
        "ssl_keyfile": server.ssl_keyfile,  # before the certificate: Ray checks them in this order
        "ssl_certfile": server.ssl_certfile,
    }


def sent_options(server: ServerConfig, environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that were given, as plain values, with the API keys of this machine's environment."""
    keys = [*(key.get_secret_value() for key in server.api_keys), *keys_in(environment)]
    return {**server.given(), **({"api_keys": keys} if keys else {})}
