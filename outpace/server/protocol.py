"""The requests: OpenAI's fields, vLLM's extra fields, MII's. An unknown field is refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from outpace.server.chat_protocol import ChatMessage, NamedTool, ToolSpec, check_continuation
from outpace.server.fields import (
    Biases,
    Body,
    FirstError,
    Prompt,
    Prompts,
    SomeTokenIds,
    Strings,
    Text,
    TokenIds,
    because,
)

_One = Annotated[float, Field(ge=1, le=1)]


class StreamOptions(Body):
    """What a stream sends besides the answer."""

    lenient: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    """Send a last chunk with the usage."""
    continuous_usage_stats: bool = False
    """Send the usage so far in each chunk."""
    include_obfuscation: Annotated[Literal[False] | None, because("chunks are not padded")] = None


class ResponseFormat(Body):
    """The format of the answer, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    """name, schema, strict; the schema is always enforced, strict or not."""

    @model_validator(mode="after")
    def _schema_is_there(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema: missing; the type json_schema needs it")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError(f"json_schema: not with the type {self.type}; set it to json_schema")
        given = self.json_schema
        if given is None:
            return self
        kinds = {"name": str, "description": str, "schema": dict, "strict": bool}
        said = {str: "text", dict: "an object", bool: "true or false"}
        for name, value in given.items():
            if name not in kinds:
                raise ValueError(f"json_schema: {name[:80]!r} is unknown; it takes name, description, schema, strict")
            if value is not None and not isinstance(value, kinds[name]):
                raise ValueError(f"json_schema: {name}: expected {said[kinds[name]]}")
        if not given.get("name") or given.get("schema") is None:
            raise ValueError("json_schema: name and schema are needed")
        return self


class SamplingFields(Body):
    """Fields that completions and chat share."""

    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("logits_processors", "vllm_xargs", "lora_path"), "requests cannot extend this server"),
        **dict.fromkeys(
            ("mm_processor_kwargs", "media_io_kwargs", "use_audio_in_video"), "this server takes only text"
        ),
        **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "data_parallel_rank"), "there is one engine"),
        "guided_decoding_backend": "there is one; remove it",
        "guided_whitespace_pattern": "remove it",
        "structural_tag": "use tools",
        "prompt_embeds": "send text or token ids",
        "request_id": "send it as the header x-request-id",
        "thinking_token_budget": "not in this release",
        "repetition_detection": "not in this release",
    }
    lenient: ClassVar[frozenset[str]] = frozenset(
        {
            *("best_of", "use_beam_search", "length_penalty", "early_stopping", "store", "metadata", "service_tier"),
            *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        }
    )

    model: str | None = None
    """One of the served names; null is the only model."""
    n: int | None = Field(default=None, ge=1)
    """Answers to each prompt."""
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=100)
    """0 is greedy."""
    top_p: float | None = Field(default=None, ge=1e-9, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    """Same seed, same text."""
    stop: Strings | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Biases = None
    """Token ids (as strings) -> what is added to their logits."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    """The format of the answer, in vLLM's words: one of json, regex, choice, grammar, json_object."""
    guided_json: dict[str, Any] | str | None = None
    """Older name of structured_outputs.json. guided_regex, guided_choice and guided_grammar are alike."""
    guided_regex: str | None = None
    guided_choice: Annotated[list[Text], FirstError(), Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    """Name of the user, for the access log."""

    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    """0 and -1 are all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=1e-3, le=1e3)
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    allowed_token_ids: SomeTokenIds | None = None
    bad_words: Annotated[list[Text], FirstError()] | None = None
    prompt_logprobs: int | None = Field(default=None, ge=-1)
    """Log-probabilities of this many likeliest tokens at each token of the prompt; -1 is the whole vocabulary."""
    logprob_token_ids: SomeTokenIds | None = None
    """With logprobs: log-probabilities of these tokens and of the chosen one, instead of the likeliest."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """Keep this many tokens at the end of the prompt."""
    add_special_tokens: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    """Smaller is sooner."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Prefixes are shared only between requests with the same salt."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens as "token_id:7"."""

    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    """Used as cache_salt if that is not given."""
    best_of: Annotated[Literal[1] | None, because("ask for n answers instead")] = None
    """This and the fields below are accepted only with values that change nothing."""
    use_beam_search: Annotated[Literal[False] | None, because("beam search is not in this release")] = None
    length_penalty: Annotated[_One | None, because("beam search is not in this release")] = None
    early_stopping: Annotated[Literal[False] | None, because("beam search is not in this release")] = None
    store: Annotated[Literal[False] | None, because("nothing is stored")] = None
    metadata: dict[str, Any] | None = None
    service_tier: Annotated[Literal["auto", "default"] | None, because("there is one tier")] = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream=true")
        return self


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    lenient: ClassVar[frozenset[str]] = SamplingFields.lenient | {"suffix"}

    prompt: Prompt
    """Text, token ids, or a list of either."""
    echo: bool | None = None
    """Put the prompt in front of each answer."""
    logprobs: int | None = Field(default=None, ge=-1)
    """Log-probabilities of this many likeliest tokens at each new token; -1 is the whole vocabulary."""
    suffix: Annotated[Literal[""] | None, because("the model writes forward only")] = None

    @model_validator(mode="after")
    def _fits_together(self) -> "CompletionRequest":
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise ValueError("logprob_token_ids: only with logprobs")
        if self.max_tokens == 0 and self.logprob_token_ids is not None:
            raise ValueError("logprob_token_ids: not with max_tokens=0, which makes no new tokens")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens: 0 computes only the prompt; it needs echo or prompt_logprobs")
        return self


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    refused: ClassVar[Mapping[str, str]] = {
        **SamplingFields.refused,
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "this server makes only text",
        "prediction": "remove it",
        "moderation": "there is none",
        "prompt_cache_options": "use cache_salt",
        "web_search_options": "this server fetches nothing",
    }
    lenient: ClassVar[frozenset[str]] = SamplingFields.lenient | {
        *("modalities", "echo", "reasoning_effort", "verbosity", "include_reasoning"),
    }

    messages: Annotated[list[ChatMessage], FirstError(), Field(min_length=1)]
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=-1)
    """-1 is the whole vocabulary."""
    tools: Annotated[list[ToolSpec], FirstError()] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """required: the answer is only calls; the name of a tool: a call of that tool."""
    parallel_tool_calls: bool | None = None
    """false: only the first call."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Continue the last message instead of starting a new one."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template."""
    documents: Annotated[list[dict[str, str]], FirstError()] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """A variable for the template; it also sets enable_thinking, unless chat_template_kwargs does."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """A variable for the template."""
    modalities: Annotated[list[Literal["text"]] | None, because("this server makes only text")] = None
    """This and the fields below are accepted only with values that change nothing."""
    echo: Annotated[Literal[False] | None, because("use /v1/completions")] = None
    include_reasoning: Annotated[Literal[True] | None, because("reasoning stays in the content")] = None

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_completion_tokens: differs from max_tokens; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs=true")
        if self.logprob_token_ids is not None and not self.logprobs:
            raise ValueError("logprob_token_ids: only with logprobs=true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice: only with tools")
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            if all(tool.function.name != wanted for tool in self.tools or ()):
                raise ValueError(f"tool_choice: {wanted[:64]!r} is not among the tools")
        if self.continue_final_message:
            check_continuation(self.messages, self.add_generation_prompt)
        return self

    def template_variables(self) -> dict[str, Any]:
        """Variables of the template besides the conversation."""
        effort = self.reasoning_effort
        given: dict[str, Any] = {} if effort is None else {"enable_thinking": effort != "none"}
        given |= self.chat_template_kwargs or {}
        named = {"reasoning_effort": effort, "verbosity": self.verbosity}
        return given | {name: value for name, value in named.items() if value is not None}


class EmbeddingRequest(Body):
    """POST /v1/embeddings."""

    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "last"] = "mean"
    """The vector is the mean of the hidden states of the last layer, or the last of them."""
    normalize: bool = True
    """Vectors of length 1, as OpenAI's are."""
    dimensions: int | None = Field(default=None, ge=1, lt=2**31)
    """Cut vectors to this length, if the model was trained for it."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=2**31)
    """Keep this many tokens at the end of each input; -1 is as many as the model takes."""
    add_special_tokens: bool | None = None
    user: Annotated[str, Field(max_length=256)] | None = None


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], FirstError(), Field(min_length=1)] | None = None
    tools: Annotated[list[ToolSpec], FirstError()] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        if self.continue_final_message:
            check_continuation(self.messages or (), self.add_generation_prompt)
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class MiiRequest(Body):
    """POST /mii/{deployment}: the arguments of MII's generate."""

    prompts: Prompts
    max_length: int | None = Field(default=None, ge=1, lt=2**31)
    """Most tokens of prompt and answer together."""
    max_new_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    min_new_tokens: int = Field(default=0, ge=0, lt=2**31)
    do_sample: bool = True
    top_p: float = Field(default=0.9, ge=1e-9, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    temperature: float | None = Field(default=None, gt=0, le=100)
    stop: Strings | None = None
    ignore_eos: bool = False
    return_full_text: bool = False
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stream: Literal[False] = False
