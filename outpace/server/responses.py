"""The answers, as plain dicts with types: for /openapi.json, and for the code that writes them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import (
    Any,
    Literal,
    NotRequired,  # pydantic needs this one before Python 3.12
)

import msgspec
from pydantic import create_model
from starlette.responses import Response
from typing_extensions import TypedDict

from outpace.server.engine import EngineStatus

FinishText = Literal["stop", "length", "tool_calls", "abort", "error"]


def json_response(value: object) -> Response:
    """A response with a value as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


class ErrorText(TypedDict):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Body of every error."""

    error: ErrorText


class PromptTokensDetails(TypedDict):
    """Where tokens of prompts came from."""

    cached_tokens: int
    """Found in the prefix cache."""


class Usage(TypedDict):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: None


class CompletionLogprobs(TypedDict):
    """Log-probabilities in the style of completions: one list for each property, with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    """A token of a prompt, or a likely alternative to it."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class StructureCheckText(TypedDict):
    """Result of the check of a finished answer, for rules that grammars cannot enforce."""

    checked: list[str]
    valid: bool
    problem: str | None


class CompletionChoice(TypedDict):
    """One answer, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishText | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    structure_check: NotRequired[StructureCheckText]


class WholeAnswer(TypedDict):
    """Keys of other servers that are only in whole answers, not in chunks."""

    service_tier: NotRequired[None]
    system_fingerprint: NotRequired[None]
    kv_transfer_params: NotRequired[None]


class Completion(WholeAnswer):
    """Answer of /v1/completions, and its chunks."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TopLogprob(TypedDict):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token and the likeliest tokens at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities in the style of chats."""

    content: list[TokenLogprob]
    refusal: None


class FunctionCall(TypedDict):
    """The function and its arguments, JSON as text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call that the model asks for; only chunks have the index."""

    index: NotRequired[int]
    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(TypedDict):
    """The message of an answer."""

    role: str
    content: str | None
    tool_calls: NotRequired[list[ToolCall]]
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: None


class AnswerDelta(TypedDict):
    """What a chunk adds to a message."""

    role: NotRequired[str]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One answer of a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishText
    stop_reason: int | str | None
    token_ids: list[int] | None
    structure_check: NotRequired[StructureCheckText]


class ChatChunkChoice(TypedDict):
    """What a chunk adds to one answer."""

    index: int
    delta: AnswerDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishText | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int] | None]
    structure_check: NotRequired[StructureCheckText]


class ChatCompletion(WholeAnswer):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class ChatChunk(TypedDict):
    """One event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int] | None]


class ModelEntry(TypedDict):
    """A served name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelEntry]


class EmbeddingEntry(TypedDict):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens of the inputs."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: None


class EmbeddingList(TypedDict):
    """Answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage


class TokenizedText(TypedDict):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class AddedToken(TypedDict):
    """A token that was added to the vocabulary."""

    content: str
    special: bool


class TokenizerInfo(TypedDict):
    """Answer of /tokenizer_info: what tokenizer_config.json says."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    added_tokens_decoder: dict[str, AddedToken]
    chat_template: str | None


class DetokenizedText(TypedDict):
    """Answer of /detokenize."""

    prompt: str


class MiiResponse(TypedDict):
    """One of MII's responses."""

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: str


_ABOUT: Mapping[str, Any] = {
    "model": str,
    "max_model_len": int,
    "sampling": dict[str, float],
    "dtype": str,
    "quantization": str | None,
    "device": str,
    "in_flight": int,  # POST requests without a complete answer, in any state
}
_NUMBERS: Mapping[str, Any] = {each.name: each.type for each in fields(EngineStatus) if each.name != "expert_load"}
_STATUS: Mapping[str, Any] = {name: (kind, ...) for name, kind in {**_ABOUT, **_NUMBERS}.items()}
Status: Any = create_model("Status", __doc__="Answer of /status: the model, and numbers of its engine.", **_STATUS)
"""The fields of `EngineStatus`, without the thousands of counts of experts."""


class ExpertStatus(TypedDict):
    """Answer of /status/experts: how many tokens each expert has had since the start."""

    layers: list[int]
    """Numbers of the layers that have experts."""
    tokens: list[list[int]]
    """For each of these layers, the tokens of each expert; empty until they are known."""
    imbalance: list[float | None]
    """For each of these layers, the tokens of the busiest expert over their mean; None: no tokens yet."""


class Version(TypedDict):
    """Answer of /version."""

    version: str


class Health(TypedDict):
    """Answer of the health routes."""

    status: Literal["ok", "not ready"]
