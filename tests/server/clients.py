"""What people do with other clients, in the words of those clients: `python tests/server/clients.py NAME URL [FOLDER]`.

It runs in an environment that has the client and nothing of Outpace, against a running server whose model is called
"tiny" (and lies in the folder), and prints the version of the client. A flow fails if the client cannot use an answer.
Prompts are short: the model of the tests has 1024 tokens, one for each character.
"""

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

MODEL = "tiny"
SHORT: dict[str, Any] = {"max_tokens": 6, "temperature": 0}
LONG: dict[str, Any] = {"max_tokens": 200, "temperature": 0}
PICK = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "pick", "description": "Pick.", "parameters": PICK}}
TURN = {"role": "user", "content": "Hi"}


def with_openai(url: str) -> None:
    """Two turns, a stream, a tool loop, a parsed answer, completions, embeddings, models."""
    from openai import OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        city: Literal["Rome", "Oslo"]

    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions
        assert MODEL in [model.id for model in client.models.list()]
        history: list[Any] = [TURN]
        first = chat.create(model=MODEL, messages=history, store=False, metadata={"run": "1"}, **SHORT)
        assert first.usage is not None
        assert first.usage.prompt_tokens_details is not None
        history += [first.choices[0].message, TURN]
        stream = chat.create(
            model=MODEL, messages=history, stream=True, stream_options={"include_usage": True}, **SHORT
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].usage is not None
        tools: list[Any] = [TOOL]
        history = [TURN]
        called = chat.create(model=MODEL, messages=history, tools=tools, tool_choice="required", **LONG)
        call: Any = (called.choices[0].message.tool_calls or [None])[0]
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
        history += [called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
        assert chat.create(model=MODEL, messages=history, tools=tools, **SHORT).choices[0].finish_reason == "length"
        parsed = chat.parse(model=MODEL, messages=[TURN], response_format=City, **LONG)  # type: ignore[list-item]
        assert parsed.choices[0].message.parsed is not None
        scored = client.completions.create(model=MODEL, prompt="hello", echo=True, logprobs=1, max_tokens=0)
        assert scored.choices[0].logprobs is not None
        assert len(client.embeddings.create(model=MODEL, input=["a", "b"]).data) == 2


def with_litellm(url: str) -> None:
    """Two turns with the message as an object and as a dict, a stream, a tool loop, completions, embeddings."""
    import litellm

    asked: Any = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    for echoed in (lambda message: message, lambda message: message.model_dump()):
        history: list[Any] = [TURN]
        first = litellm.completion(messages=history, **asked, **SHORT)
        history += [echoed(first.choices[0].message), TURN]
        assert litellm.completion(messages=history, user="u", **asked, **SHORT).choices[0].message.content
        history = [TURN]
        called = litellm.completion(messages=history, tools=[TOOL], tool_choice="required", **LONG, **asked)
        (call, *_) = called.choices[0].message.tool_calls
        history += [
            echoed(called.choices[0].message),
            {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "ok"},
        ]
        assert litellm.completion(messages=history, tools=[TOOL], **asked, **SHORT).usage.total_tokens
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=[TURN], **options, **asked, **SHORT))
    whole = litellm.stream_chunk_builder(chunks, messages=[TURN])
    assert whole.usage.completion_tokens == SHORT["max_tokens"]
    effort = {"reasoning_effort": "low", "drop_params": False, "allowed_openai_params": ["reasoning_effort"]}
    assert litellm.completion(messages=[TURN], **effort, **asked, **SHORT).choices
    assert litellm.text_completion(prompt="hello", **asked, **SHORT).choices[0].text
    assert len(litellm.embedding(input=["a", "b"], **asked).data) == 2


def with_langchain_openai(url: str) -> None:
    """Two turns, a stream, a tool loop, a structured answer, embeddings."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
    from pydantic import BaseModel

    class City(BaseModel):
        city: Literal["Rome", "Oslo"]

    @tool  # type: ignore[untyped-decorator]
    def pick(city: Literal["Rome", "Oslo"]) -> str:
        """Pick."""
        return city

    where: Any = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    chat = ChatOpenAI(**where, **SHORT)
    history: list[Any] = [HumanMessage("Hi")]
    history += [chat.invoke(history), HumanMessage("Hi")]
    answer = chat.invoke(history)
    assert answer.usage_metadata["output_tokens"] == SHORT["max_tokens"]
    assert "".join(chunk.content for chunk in ChatOpenAI(stream_usage=True, **where, **SHORT).stream(history))
    history = [HumanMessage("Hi")]
    long = ChatOpenAI(**where, **LONG)
    called = long.bind_tools([pick], tool_choice="any").invoke(history)
    (call, *_) = called.tool_calls
    history += [called, ToolMessage(pick.invoke(call["args"]), tool_call_id=call["id"])]
    assert chat.bind_tools([pick]).invoke(history).response_metadata["finish_reason"] == "length"
    for method in ("json_schema", "function_calling"):
        assert isinstance(long.with_structured_output(City, method=method).invoke([HumanMessage("Hi")]), City)
    vectors = OpenAIEmbeddings(**where, check_embedding_ctx_length=False).embed_documents(["a", "b"])
    assert len(vectors) == 2


def with_instructor(url: str) -> None:
    """A response model by each way to ask for one, and a conversation that goes on after it."""
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        city: Literal["Rome", "Oslo"]

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
        asked: Any = {"model": MODEL, "response_model": City, "max_retries": 1, **LONG}
        city, completion = client.chat.completions.create_with_completion(messages=[TURN], **asked)
        assert isinstance(city, City)
        message = completion.choices[0].message
        history: list[Any] = [TURN, message.model_dump()]
        if message.tool_calls:
            history.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"})
        if mode is not instructor.Mode.TOOLS_STRICT:
            assert isinstance(client.chat.completions.create(messages=[*history, TURN], **asked), City)


def with_lm_eval(url: str) -> None:
    """local-completions with the server's own tokenizer: choices, perplexity, generation."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        model=MODEL, base_url=f"{url}/v1/completions", max_length=64, max_gen_toks=6, batch_size=2, max_retries=1
    )
    assert model.tokenizer_backend == "remote"

    def ask(kind: str, *arguments: Any) -> list[Any]:
        return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]

    for total, is_greedy in model.loglikelihood(ask("loglikelihood", ("two and", " two"), ("two and", " three"))):
        assert total < 0
        assert isinstance(is_greedy, bool)
    assert all(value < 0 for value in model.loglikelihood_rolling(ask("loglikelihood_rolling", ("a long text " * 8,))))
    until = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False, "temperature": 0}
    assert len(model.generate_until(ask("generate_until", ("hello", until), ("other", until)))) == 2


def with_guidellm(url: str, folder: str) -> None:
    """A benchmark of each kind of request."""
    command = str(Path(sys.executable).with_name("guidellm"))
    for path in ("/v1/completions", "/v1/chat/completions"):
        with tempfile.TemporaryDirectory() as output:
            report = Path(output) / "report.json"
            arguments = [
                *("--backend", f"kind=openai_http,target={url},request_format={path},http2=false"),
                *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=2"),
                *("--tokenizer", f"kind=huggingface_auto,model={folder}"),
                *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=6,turns=2"),
                *("--output", f"kind=json,path={report}", "--disable-console"),
            ]
            subprocess.run([command, "run", *arguments], check=True, cwd=output)
            (benchmark,) = json.loads(report.read_text())["benchmarks"]
            assert benchmark["requests"]["successful"]
            assert not benchmark["requests"]["errored"]


FLOWS: dict[str, tuple[Callable[..., None], bool]] = {
    "openai": (with_openai, False),
    "litellm": (with_litellm, False),
    "langchain-openai": (with_langchain_openai, False),
    "instructor": (with_instructor, False),
    "lm_eval": (with_lm_eval, False),
    "guidellm": (with_guidellm, True),
}
"""Names of packages -> what is done with them, and whether that needs the folder of the model."""


def main(name: str, url: str, folder: str = "") -> None:
    """Run a flow."""
    flow, needs_folder = FLOWS[name]
    flow(url, folder) if needs_folder else flow(url)
    print(f"{name} {importlib.metadata.version(name)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
