"""MII's REST route, for those who come from there."""

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from outpace.server.body import StrictRoute
from outpace.server.gone import until_gone
from outpace.server.problems import ApiError
from outpace.server.protocol import MiiRequest
from outpace.server.responses import MiiResponse
from outpace.server.routes.documented import answers
from outpace.server.routes.openai import events, json_response
from outpace.server.serving import Serving
from outpace.server.validate import Work


def router(serving: Serving) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/mii", route_class=StrictRoute, tags=["MII"])

    @routes.post(
        "/{deployment:path}", response_model=None, responses=answers(list[MiiResponse], "A response for each prompt.")
    )
    async def generate(deployment: str, body: MiiRequest, request: Request) -> Response:
        """Answer each prompt; the deployment is the model by one of its names."""
        if deployment not in serving.validator.names:
            raise ApiError(404, "There is no such deployment; GET /v1/models lists the names.", code="model_not_found")
        works = await until_gone(request.receive, serving.validator.mii(body))
        result = await until_gone(request.receive, _responses(serving, works, body.return_full_text))
        return json_response(result)

    return routes


async def _responses(serving: Serving, works: list[Work], full: bool) -> list[MiiResponse]:
    results: list[MiiResponse] = [
        {
            "generated_text": (work.text or "") if full else "",
            "prompt_length": len(work.prompt_token_ids),
            "generated_length": 0,
            "finish_reason": "none",
        }
        for work in works
    ]
    texts: list[list[str]] = [[] for _ in works]
    async for event in events(serving, works, f"mii-{uuid.uuid4().hex}"):
        texts[event.index].append(event.text)
        results[event.index]["generated_length"] += len(event.token_ids)
        if event.finish_reason is not None:
            results[event.index]["finish_reason"] = event.finish_reason.value
    for result, parts in zip(results, texts, strict=True):
        result["generated_text"] += "".join(parts)
    return results
