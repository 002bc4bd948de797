"""The Ray Serve application: an ingress, and the replicas behind it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from ray import serve
from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message

from outpace.deploy.ingress import ReplicaLost, make_ingress
from outpace.deploy.replica import Replica
from outpace.errors import EngineUnavailable
from outpace.replicas.asked import read
from outpace.server.logs import set_up
from outpace.server.options import ServerConfig

_LOST = (RayActorError, ObjectLostError, ReplicaUnavailableError)
PREFIX_BYTES = 256  # of a body: requests that begin alike share keys and values; a chat begins as its last turn did
ASK_ALL_SECONDS = 10.0  # for the slowest replica


class Handle:
    """The replicas of a deployment, through Ray."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle, self._asked = handle, handle.options(method_name="answer", stream=True)

    async def ask(
        self, head: Mapping[str, Any], body: bytes, avoid: Sequence[str]
    ) -> AsyncGenerator[list[Message], None]:
        """The messages of one replica's answer."""
        cost = read(body)[0].cost
        response = self._asked.remote(head, body, avoid=list(avoid), prefix=body[:PREFIX_BYTES], cost=cost)
        try:
            async for messages in response:
                yield messages
        except _LOST as error:
            raise ReplicaLost(str(error).strip().splitlines()[0]) from None
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise EngineUnavailable(f"no replica takes requests ({error}); try again later") from None
        except (asyncio.CancelledError, GeneratorExit):  # the client has gone: the replica can stop
            response.cancel()
            raise

    async def ask_all(self, head: Mapping[str, Any]) -> list[list[Message]]:
        """The whole answer of every replica, except those that are just ending."""
        asked = self._handle.broadcast("whole_answer", head)
        results = await asked.results_async(timeout_s=ASK_ALL_SECONDS, return_exceptions=True)
        return [result for result in results if not isinstance(result, BaseException)]


def application(
    model: str | None,
    llm_options: Mapping[str, Any],
    server_options: Mapping[str, Any],
    *,
    threads: int,
    replica: Mapping[str, Any],
    ingress: Mapping[str, Any],
) -> serve.Application:
    """The application; threads: of each rank; `replica` and `ingress` are the options of its two deployments."""
    models = serve.deployment(**replica)(Replica).bind(model, dict(llm_options), dict(server_options), threads)
    front = serve.ingress(_builder(dict(server_options), str(replica["name"])))()
    return serve.deployment(**ingress)(front).bind(models)


def _builder(options: Mapping[str, Any], name: str) -> Callable[[], ASGIApp]:
    """A function that makes the ingress where it runs."""

    def build() -> ASGIApp:
        config = ServerConfig(**options)
        set_up(as_json=config.log_json)
        handle = serve.get_deployment_handle(name, app_name=serve.get_replica_context().app_name)
        return make_ingress(Handle(handle), config)

    return build
