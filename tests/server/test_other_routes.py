"""Models, embeddings, tokens, MII, health, status, metrics, the page, and the schema of all."""

import math
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai import AsyncOpenAI, NotFoundError
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerFast

from outpace import __version__
from outpace.server.app import create_app
from outpace.server.options import ServerConfig
from outpace.server.responses import Status
from tests.server.conftest import Serve
from tests.server.fake import FakeEngine, says

pytestmark = pytest.mark.anyio


async def test_models(serve: Serve) -> None:
    async with serve(served_model_name=["org/small", "small"]).openai() as client:
        models = (await client.models.list()).data
        assert [model.id for model in models] == ["org/small", "small"]
        assert (await client.models.retrieve("org/small")).created == 1_700_000_000
        assert (await client.completions.create(model="small", prompt="a")).model == "small"
        with pytest.raises(NotFoundError):
            await client.completions.create(model="fake", prompt="a")
        with pytest.raises(NotFoundError):
            await client.models.retrieve("other")


async def test_embeddings(openai: AsyncOpenAI) -> None:
    answer = await openai.embeddings.create(model="fake", input=["abc", "d"])  # it asks for base64
    assert [entry.index for entry in answer.data] == [0, 1]
    assert answer.data[0].embedding == pytest.approx([3 / math.sqrt(10), 1 / math.sqrt(10), 0.0])
    assert answer.usage.prompt_tokens == 4
    plain = await openai.embeddings.create(
        model="fake", input=[64, 65], encoding_format="float", extra_body={"pooling": "last", "normalize": False}
    )
    assert plain.data[0].embedding == [2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 5}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
        ({"input": ""}, "input"),
        ({"input": [999]}, "input"),
    ],
)
async def test_wrong_embeddings(serve: Serve, fields: dict[str, Any], param: str) -> None:
    answer = await serve().post("/v1/embeddings", {"input": "a", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_prompt_for_an_embedding_may_fill_the_context(serve: Serve) -> None:
    server = serve()
    assert (await server.post("/v1/embeddings", {"input": "a" * 512})).status_code == 200
    assert (await server.post("/v1/embeddings", {"input": "a" * 513})).status_code == 400


async def test_tokenize_and_back(serve: Serve) -> None:
    server = serve()
    tokens = (await server.post("/tokenize", {"prompt": "é<|end|>", "return_token_strs": True})).json()
    assert tokens["count"] == len(tokens["tokens"]) == 3
    assert tokens["tokens"][2] == 256
    assert tokens["token_strs"][2] == "<|end|>"
    assert tokens["max_model_len"] == 512
    assert (await server.post("/detokenize", {"tokens": tokens["tokens"]})).json() == {"prompt": "é<|end|>"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    asked = (await server.post("/tokenize", chat)).json()["tokens"]
    await server.post("/v1/chat/completions", chat)
    assert server.engine.requests[0].prompt_token_ids == asked
    for wrong in ({"tokens": [999]}, {"tokens": [-1]}, {"tokens": "a"}, {}):
        assert (await server.post("/detokenize", wrong)).status_code == 400
    for odd in ({}, {"prompt": "a", **chat}):
        assert (await server.post("/tokenize", odd)).status_code == 400


async def test_mii(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = FakeEngine(tokenizer, lambda request, index: f"re:{tokenizer.decode(request.prompt_token_ids)}")
    server = serve(engine, served_model_name="my-deployment")
    body = {"prompts": ["a", "bc"], "max_new_tokens": 4, "stop": ["zz"]}
    answer = (await server.post("/mii/my-deployment", body)).json()
    assert answer == [
        {"generated_text": "re:a", "prompt_length": 1, "generated_length": 4, "finish_reason": "length"},
        {"generated_text": "re:b", "prompt_length": 2, "generated_length": 4, "finish_reason": "length"},
    ]
    full = (
        await server.post("/mii/my-deployment", {"prompts": "a", "return_full_text": True, "do_sample": False})
    ).json()
    assert full[0]["generated_text"] == "are:a"
    assert engine.requests[-1].params.temperature == 0
    assert engine.requests[0].params.top_p == 0.9
    assert (await server.post("/mii/other", {"prompts": "a"})).status_code == 404
    assert (await server.post("/mii/my-deployment", {"prompts": "abc", "max_length": 3})).status_code == 400
    assert (await server.post("/mii/my-deployment", {"prompts": "a", "num_beams": 3})).status_code == 400
    assert (await server.get("/terminate")).status_code == 404


async def test_health(serve: Serve) -> None:
    server = serve()
    for path in ("/health/live", "/health/ready", "/health", "/healthz"):
        assert (await server.get(path)).json() == {"status": "ok"}
    server.engine.ready = False
    assert (await server.get("/health/live")).status_code == 200
    for path in ("/health/ready", "/health", "/healthz"):
        answer = await server.get(path)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"


async def test_version_and_status(serve: Serve) -> None:
    server = serve()
    assert (await server.get("/version")).json() == {"version": __version__}
    status = (await server.get("/status")).json()
    TypeAdapter(Status).validate_python(status)
    assert (status["model"], status["num_blocks"], status["free_blocks"]) == ("fake", 8, 7)
    assert status["last_steps"] == [[1, 5, 2, 0.5]]


async def test_metrics_count_requests(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    server = serve(FakeEngine(tokenizer, says("abc")))
    await server.post("/v1/completions", {"prompt": "ab"})
    await server.post("/v1/completions", {"prompt": "ab", "max_tokens": 2})
    text = (await server.get("/metrics")).text
    assert 'outpace:request_success_total{finished_reason="stop",model_name="fake"} 1.0' in text
    assert 'outpace:request_success_total{finished_reason="length",model_name="fake"} 1.0' in text
    assert 'outpace:request_generation_tokens_sum{model_name="fake"} 6.0' in text
    assert 'outpace:time_to_first_token_seconds_count{model_name="fake"} 2.0' in text
    assert (await serve(metrics=False).get("/metrics")).status_code == 404


async def test_the_page(serve: Serve) -> None:
    server = serve()
    page = await server.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    assert (await server.get("/web/app.js")).headers["content-type"].startswith("text/javascript")
    for path in ("/web/absent.js", "/web/../options.py", "/web/%2e%2e%2foptions.py", "/web/..%5coptions.py"):
        assert (await server.get(path)).status_code == 404


async def test_the_schema_names_every_route(serve: Serve) -> None:
    schema = (await serve().get("/openapi.json")).json()
    wanted = {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models", "/tokenize", "/detokenize"}
    wanted |= {"/mii/{deployment}", "/healthz", "/health/live", "/health/ready", "/version", "/status", "/metrics"}
    assert wanted <= schema["paths"].keys()
    assert "422" not in schema["paths"]["/v1/completions"]["post"]["responses"]
    assert schema["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False
    assert (await serve(docs=False).get("/openapi.json")).status_code == 404


def test_the_lifespan_starts_and_ends_what_chats_and_grammars_need(tokenizer: PreTrainedTokenizerFast) -> None:
    app = create_app(FakeEngine(tokenizer), ServerConfig(), tokenizer)
    with TestClient(app) as client:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert app.state.services.renderer.closed
    assert app.state.services.grammars._child is not None, "it is there before the first grammar"
    assert not app.state.services.grammars._child.alive


@pytest.mark.parametrize("path", ["/docs", "/health", "/v1/chat/completions", "/web/app.js"])
async def test_item_13_a_slash_too_many_leads_to_the_same_server(serve: Serve, path: str) -> None:
    server = serve()
    answer = await server.get(f"{path}/", headers={"host": "evil.example"})
    assert answer.status_code == 307
    assert answer.headers["location"] == f"../{path.rpartition('/')[2]}"
    assert (await server.get(f"{path}/", follow_redirects=True)).url.path == path
    assert "evil" not in answer.text + str(answer.headers)


@pytest.mark.parametrize("path", ["/nothing/", "/docs//", "/web/a%0d%0ab/c/"])
async def test_item_13_other_paths_lead_nowhere(serve: Serve, path: str) -> None:
    assert (await serve().get(path)).status_code == 404
