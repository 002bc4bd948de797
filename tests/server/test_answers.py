"""Item 24: what is in answers, under the names and with the nulls that other servers have."""

from typing import Any

import pytest
from jinja2 import Environment
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedTokenizerFast

from tests.server.conftest import Serve
from tests.server.fake import FakeEngine
from tests.server.live import MAX_MODEL_LEN, A, B, Live
from tests.server.test_completions import events

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
PROMPT: Any = {"prompt": "ab", "max_tokens": 5}
STREAM: Any = {"stream": True, "stream_options": {"include_usage": True}}
BODIES = {CHAT: HI, COMPLETIONS: PROMPT}


def long_prompt(route: str, text: str) -> dict[str, Any]:
    """A prompt of several blocks."""
    text += " and so on and so forth" * 6
    return {"messages": [{"role": "user", "content": text}]} if route == CHAT else {"prompt": text}


@pytest.mark.parametrize("route", BODIES)
def test_item_24_cached_tokens_are_in_the_usage(live: Live, route: str) -> None:
    with live.http() as client:
        body = {**long_prompt(route, f"cached {route}"), "max_tokens": 2}
        plain = [client.post(route, json=body).json()["usage"] for _ in range(2)]
        streamed = events(client.post(route, json={**body, **STREAM}).text)
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (*plain, streamed[-1]["usage"])]
    assert cached[0] == 0
    assert cached[1] == cached[2] >= 16
    assert all(usage["prompt_tokens"] == plain[0]["prompt_tokens"] for usage in plain)


async def test_item_24_cached_tokens_of_several_prompts_are_added_up(
    serve: Serve, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = FakeEngine(tokenizer, num_cached_tokens=3)
    answer = (await serve(engine).post(COMPLETIONS, {"prompt": ["abcd", "efgh"], "n": 2})).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_item_24_keys_without_a_value_are_null_where_vllm_has_them(serve: Serve) -> None:
    server = serve()
    chat, completion = [(await server.post(route, body)).json() for route, body in BODIES.items()]
    shared = ("service_tier", "system_fingerprint", "kv_transfer_params")
    of_chat = ("prompt_logprobs", "prompt_token_ids")
    assert [chat[name] for name in (*shared, *of_chat)] == [None] * 5
    assert [completion[name] for name in shared] == [None] * 3
    assert [chat["choices"][0][name] for name in ("logprobs", "token_ids")] == [None] * 2
    message = chat["choices"][0]["message"]
    assert [message[name] for name in ("refusal", "annotations", "audio", "function_call", "reasoning")] == [None] * 5
    assert "tool_calls" not in message
    names = ("logprobs", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids")
    assert [completion["choices"][0][name] for name in names] == [None] * 5
    assert chat["usage"].keys() >= {"prompt_tokens_details", "completion_tokens_details"}


async def test_item_24_nulls_of_chunks(serve: Serve) -> None:
    server = serve()
    first, second, *_ = events((await server.post(CHAT, {**HI, "stream": True})).text)
    assert first["prompt_token_ids"] is None
    assert "token_ids" not in first["choices"][0]
    assert "prompt_token_ids" not in second
    assert second["choices"][0]["token_ids"] is None
    chunks = events((await server.post(COMPLETIONS, {**PROMPT, "stream": True})).text)
    assert all({"token_ids", "prompt_token_ids", "stop_reason"} <= chunk["choices"][0].keys() for chunk in chunks)


@pytest.mark.parametrize("route", BODIES)
async def test_item_24_token_ids_in_a_stream(serve: Serve, route: str) -> None:
    body = {**BODIES[route], "stream": True, "return_token_ids": True}
    server = serve()
    chunks = events((await server.post(route, body)).text)
    holders = [chunk if route == CHAT else chunk["choices"][0] for chunk in chunks]
    assert holders[0]["prompt_token_ids"] == server.engine.requests[0].prompt_token_ids
    assert all(holder.get("prompt_token_ids") is None for holder in holders[1:])
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == server.engine.answer(server.engine.requests[0], 0)[0]


async def test_item_24_continuous_usage_begins_at_nothing(serve: Serve) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    server = serve()
    for route, counts in ((CHAT, [0, 1, 2, 3, 4, 5, 5]), (COMPLETIONS, [1, 2, 3, 4, 5, 5])):
        usages = [chunk["usage"] for chunk in events((await server.post(route, {**BODIES[route], **options})).text)]
        assert [usage["completion_tokens"] for usage in usages] == counts
        assert all(usage["total_tokens"] - usage["completion_tokens"] == usage["prompt_tokens"] > 0 for usage in usages)


@pytest.mark.parametrize("route", BODIES)
async def test_item_24_the_whole_vocabulary_and_named_tokens(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, route: str
) -> None:
    whole = len(tokenizer)
    asked = {"logprobs": True, "top_logprobs": -1} if route == CHAT else {"logprobs": -1}
    engine = FakeEngine(tokenizer, max_logprobs=whole)
    server = serve(engine)
    assert (await server.post(route, {**BODIES[route], **asked, "prompt_logprobs": -1})).status_code == 200
    assert (engine.requests[0].params.logprobs, engine.requests[0].params.prompt_logprobs) == (-1, -1)
    named = {**asked, "logprob_token_ids": [A, B]}
    assert (await server.post(route, {**BODIES[route], **named})).status_code == 200
    assert (engine.requests[1].params.logprobs, engine.requests[1].params.logprob_token_ids) == (None, (A, B))
    few = serve()
    for field, fields in (
        ("top_logprobs" if route == CHAT else "logprobs", asked),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("logprob_token_ids", {"logprob_token_ids": [A]}),
        ("logprob_token_ids", {"logprobs": route == CHAT or 1, "logprob_token_ids": [whole]}),
    ):
        error = (await few.post(route, {**BODIES[route], **fields})).json()["error"]
        assert error["param"] == field, error


async def test_item_24_tokenizer_info(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    info = (await serve(chat_template=template).get("/tokenizer_info")).json()
    assert info["eos_token"] == tokenizer.eos_token
    assert (info["bos_token"], info["model_max_length"], info["chat_template"]) == (None, 512, template)
    assert info["added_tokens_decoder"][str(tokenizer.eos_token_id)] == {
        "content": tokenizer.eos_token,
        "special": True,
    }
    assert isinstance(info["tokenizer_class"], str)
    assert not any("/" in str(value) for name, value in info.items() if name != "chat_template")  # no paths
    Environment().from_string(info["chat_template"])
    assert (await serve(tokenizer_info=False).get("/tokenizer_info")).status_code == 404


async def test_item_24_tokens_are_spelled_as_in_the_vocabulary(
    serve: Serve, tokenizer: PreTrainedTokenizerFast
) -> None:
    answer = (await serve().post("/tokenize", {"prompt": "a é", "return_token_strs": True})).json()
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])


@pytest.mark.parametrize(
    "fields",
    [{"prompt": "a"}, {"add_generation_prompt": True}, {"messages": [{"role": "user", "content": "a"}]}],
)
async def test_item_24_tokenize_has_a_message_to_continue(serve: Serve, fields: dict[str, Any]) -> None:
    last = {"role": "assistant", "content": "Well"}
    body = {"continue_final_message": True, **({} if "prompt" in fields else {"messages": [last]}), **fields}
    error = (await serve().post("/tokenize", body)).json()["error"]
    assert error["param"] == "continue_final_message"


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_item_24_a_root_path_serves_both_forms(serve: Serve, prefix: str) -> None:
    server = serve(root_path="/llm", api_keys=["k"])
    allowed = {"authorization": "Bearer k"}
    assert (await server.get(f"{prefix}/health")).status_code == 200
    assert (await server.get(f"{prefix}/v1/models")).status_code == 401
    assert (await server.get(f"{prefix}/v1/models", headers=allowed)).status_code == 200
    assert (await server.post(f"{prefix}{CHAT}", HI, headers=allowed)).status_code == 200
    assert (await server.get("/other/v1/models", headers=allowed)).status_code == 404


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0].content.text.more }}", "'str object' has no attribute 'text'"),
        ("{{ enabled.value }}", "'enabled' is undefined"),
        ("{% for m in missing.messages %}{% endfor %}", "'missing' is undefined"),
    ],
)
async def test_item_24_a_template_error_says_what_is_undefined(serve: Serve, template: str, said: str) -> None:
    answer = await serve(chat_template=template).post(CHAT, HI)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def iterations(live: Live) -> tuple[float, float]:
    """How many steps there were, and their tokens."""
    with live.http() as client:
        families = text_string_to_metric_families(client.get("/metrics").text)
    found = {sample.name: sample.value for family in families for sample in family.samples}
    return found["outpace:iteration_tokens_total_count"], found["outpace:iteration_tokens_total_sum"]


def test_item_24_iteration_tokens_as_vllm_counts_them(live: Live) -> None:
    """Prompts and new tokens, the first of which comes with the last step of its prompt."""
    steps, tokens = iterations(live)
    with live.http() as client:
        for number in range(3):
            body = {"prompt": [number, 1, 2, 3], "max_tokens": 6, "ignore_eos": True}
            client.post(COMPLETIONS, json=body).raise_for_status()
        for _ in range(2000):  # the engine tells its numbers when it is idle
            more, all_of_them = iterations(live)
            if all_of_them - tokens >= 3 * (4 + 6):
                break
    assert (more - steps, all_of_them - tokens) == (3 * 6, 3 * (4 + 6))


@pytest.mark.parametrize("streamed", [False, True])
def test_item_24_scoring_makes_no_tokens(live: Live, streamed: bool) -> None:
    with live.http() as client:
        score: Any = {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 2}
        with_one = client.post(COMPLETIONS, json={**score, "max_tokens": 1}).json()["choices"][0]["logprobs"]
        answer = client.post(COMPLETIONS, json={**score, **(STREAM if streamed else {})})
    if streamed:
        (chunk, last) = events(answer.text)
        choice, usage = chunk["choices"][0], last["usage"]
    else:
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, 6)
    for name, values in choice["logprobs"].items():
        assert len(values) == 6
        if name == "token_logprobs":
            assert values[0] is None
            assert values[1:] == pytest.approx(with_one[name][1:6], abs=1e-4)
        elif name != "top_logprobs":
            assert values == with_one[name][:6]
    assert all(len(top) in (2, 3) for top in choice["logprobs"]["top_logprobs"][1:])


def test_item_24_a_prompt_that_fills_the_model_can_be_scored(live: Live) -> None:
    with live.http() as client:
        body = {"prompt": [A] * MAX_MODEL_LEN, "max_tokens": 0, "prompt_logprobs": 0}
        choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
        assert (choice["text"], len(choice["prompt_logprobs"])) == ("", MAX_MODEL_LEN)
        several = client.post(COMPLETIONS, json={**body, "prompt": ["ab", "abc"], "n": 2}).json()["choices"]
    assert [len(each["prompt_logprobs"]) for each in several] == [3, 3, 4, 4]


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "echo": True, "logprobs": 1, "logprob_token_ids": [A]}, "logprob_token_ids"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
async def test_item_24_no_tokens_are_refused_where_they_mean_nothing(
    serve: Serve, route: str, fields: dict[str, Any], param: str
) -> None:
    answer = await serve().post(route, {**BODIES[route], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_item_24_embeddings_are_cut_where_the_model_allows(
    serve: Serve, tokenizer: PreTrainedTokenizerFast
) -> None:
    server = serve(FakeEngine(tokenizer, embedding_sizes=(1, 2)))
    body = {"input": "abc", "encoding_format": "float", "dimensions": 2}
    answer = (await server.post("/v1/embeddings", body)).json()
    assert answer["data"][0]["embedding"] == pytest.approx([3 / 10**0.5, 1 / 10**0.5])  # of (3, 1, 0), and of length 1
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 3,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
    for other, size in ((server, 3), (server, 0), (serve(), 2)):
        error = (await other.post("/v1/embeddings", {**body, "dimensions": size})).json()["error"]
        assert error["param"] == "dimensions"


@pytest.mark.parametrize(("keep", "count"), [(2, 2), (512, 512), (-1, 512), (0, None), (513, None), (-2, None)])
async def test_item_24_inputs_of_embeddings_are_truncated(serve: Serve, keep: int, count: int | None) -> None:
    answer = (await serve().post("/v1/embeddings", {"input": "a" * 600, "truncate_prompt_tokens": keep})).json()
    if count is None:
        assert answer["error"]["param"] == "truncate_prompt_tokens"
    else:
        assert answer["usage"]["prompt_tokens"] == count


def test_item_24_metrics_as_vllm_names_them(live: Live) -> None:
    with live.http() as client:
        found = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    reasons = {sample.labels["reason"] for sample in found["outpace:num_requests_waiting_by_reason"].samples}
    assert reasons == {"capacity", "deferred"}
    (about,) = found["outpace:cache_config_info"].samples
    assert int(about.labels["kv_cache_size_tokens"]) == int(about.labels["num_gpu_blocks"]) * int(
        about.labels["block_size"]
    )
    assert float(about.labels["kv_cache_max_concurrency"]) > 1
