"""OpenAI's routes: completions, chats, embeddings, models."""

import base64
import math
import struct
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from outpace.server.body import StrictRoute
from outpace.server.engine import Delta, EngineRequest
from outpace.server.fields import pieces
from outpace.server.gone import until_gone
from outpace.server.protocol import ChatRequest, CompletionRequest, EmbeddingRequest
from outpace.server.reply import Reply
from outpace.server.responses import (
    ChatCompletion,
    Completion,
    EmbeddingEntry,
    EmbeddingList,
    EmbeddingUsage,
    ModelEntry,
    ModelList,
    json_response,
)
from outpace.server.routes.documented import answers
from outpace.server.services import Services
from outpace.server.stream import deltas_of_request
from outpace.server.write import CompletionWriter
from outpace.server.write_chat import ChatWriter

_MANY = 4096  # numbers in all vectors; more are written in a thread


def long_list(values: list[Any]) -> Any:
    """A list as JSON, made in short calls of C code, between which other threads can run."""
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(piece)[1:-1] for piece in pieces(values)) + b"]")


def deltas(services: Services, prompts: Sequence[EngineRequest], name: str) -> AsyncGenerator[Delta, None]:
    """The deltas of a request, counted by the metrics."""
    return deltas_of_request(services.engine, prompts, services.tokenizer, name, services.metrics)


def router(services: Services) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["OpenAI"])
    validator = services.validator

    @routes.post(
        "/completions",
        response_model=None,
        responses=answers(Completion, "The answers; with stream=true their chunks as events.", stream=True),
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete each prompt."""
        request.state.user = body.user
        model, name = validator.model(body.model), f"cmpl-{uuid.uuid4().hex}"
        prompts = await until_gone(request.receive, validator.completion(body))
        writer = CompletionWriter(body, prompts, services.tokenizer, model, name)
        return Reply(deltas(services, prompts, name), writer, stream=bool(body.stream))

    @routes.post(
        "/chat/completions",
        response_model=None,
        responses=answers(ChatCompletion, "The answers; with stream=true their chunks as events.", stream=True),
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        request.state.user = body.user
        model, name = validator.model(body.model), f"chatcmpl-{uuid.uuid4().hex}"
        prompt = await until_gone(request.receive, validator.chat(body))
        style = services.style if body.tools and body.tool_choice != "none" else "none"
        writer = ChatWriter(
            body, prompt, services.tokenizer, model, name, role=services.options.response_role, style=style
        )
        return Reply(deltas(services, [prompt], name), writer, stream=bool(body.stream))

    @routes.post("/embeddings", response_model=None, responses=answers(EmbeddingList, "A vector for each input."))
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """The hidden states of each input as one vector."""
        request.state.user = body.user
        model = validator.model(body.model)
        prompts = await until_gone(request.receive, validator.embedding(body))
        vectors = await until_gone(request.receive, services.engine.embed(prompts))
        count = sum(len(prompt.prompt_token_ids) for prompt in prompts)

        make = partial(_embedding_list, body, model, vectors, count)
        return make() if sum(map(len, vectors)) < _MANY else await services.answers.run(make)

    @routes.get("/models", response_model=None, responses=answers(ModelList, "The names of the model."))
    async def models() -> Response:
        """The served names of the model."""
        result: ModelList = {"object": "list", "data": [_model(services, name) for name in validator.names]}
        return json_response(result)

    @routes.get("/models/{name:path}", response_model=None, responses=answers(ModelEntry, "The model."))
    async def model(name: str) -> Response:
        """One name of the model."""
        return json_response(_model(services, validator.model(name)))

    return routes


def _embedding_list(asked: EmbeddingRequest, model: str, vectors: Sequence[Sequence[float]], count: int) -> Response:
    """count: tokens of all inputs."""
    usage: EmbeddingUsage = {
        "prompt_tokens": count,
        "total_tokens": count,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
    result: EmbeddingList = {
        "id": f"embd-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "data": [_entry(index, vector, asked) for index, vector in enumerate(vectors)],
        "model": model,
        "usage": usage,
    }
    return json_response(result)


def _model(services: Services, name: str) -> ModelEntry:
    card = services.engine.card
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "outpace",
        "root": services.validator.names[0],
        "max_model_len": card.max_model_len,
    }


def _entry(index: int, vector: Sequence[float], asked: EmbeddingRequest) -> EmbeddingEntry:
    vector = vector[: asked.dimensions]
    if not all(map(math.isfinite, vector)):
        raise RuntimeError("the engine gave a vector that is not finite")
    length = math.sqrt(math.fsum(value * value for value in vector)) if asked.normalize else 1.0
    values = [value / (length or 1.0) for value in vector]
    if asked.encoding_format == "float":
        return {"object": "embedding", "index": index, "embedding": values}
    data = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    return {"object": "embedding", "index": index, "embedding": data}
