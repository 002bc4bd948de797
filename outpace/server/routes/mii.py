"""MII's REST route, for programs that were written for MII."""

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from outpace.server.body import StrictRoute
from outpace.server.engine import EngineRequest
from outpace.server.gone import until_gone
from outpace.server.problems import ApiError
from outpace.server.protocol import MiiRequest
from outpace.server.responses import MiiResponse, json_response
from outpace.server.routes.documented import answers
from outpace.server.routes.openai import deltas
from outpace.server.services import Services


def router(services: Services) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/mii", route_class=StrictRoute, tags=["MII"])

    @routes.post(
        "/{deployment:path}", response_model=None, responses=answers(list[MiiResponse], "A response for each prompt.")
    )
    async def generate(deployment: str, body: MiiRequest, request: Request) -> Response:
        """Answer each prompt; the deployment is one of the names of the model."""
        if deployment not in services.validator.names:
            raise ApiError(404, "There is no such deployment; GET /v1/models lists the names.", code="model_not_found")
        prompts = await until_gone(request.receive, services.validator.mii(body))
        result = await until_gone(request.receive, _responses(services, prompts, body.return_full_text))
        return json_response(result)

    return routes


async def _responses(services: Services, prompts: list[EngineRequest], full: bool) -> list[MiiResponse]:
    results: list[MiiResponse] = [
        {
            "generated_text": (each.text or "") if full else "",
            "prompt_length": len(each.prompt_token_ids),
            "generated_length": 0,
            "finish_reason": "none",
        }
        for each in prompts
    ]
    texts: list[list[str]] = [[] for _ in prompts]
    async for delta in deltas(services, prompts, f"mii-{uuid.uuid4().hex}"):
        texts[delta.index].append(delta.text)
        results[delta.index]["generated_length"] += len(delta.token_ids)
        if delta.finish_reason is not None:
            results[delta.index]["finish_reason"] = delta.finish_reason.value
    for result, parts in zip(results, texts, strict=True):
        result["generated_text"] += "".join(parts)
    return results
