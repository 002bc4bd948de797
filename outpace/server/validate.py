"""The one validation layer: requests become token ids and sampling parameters, or errors, before any queue."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outpace.server.async_tokenizer import AsyncTokenizer
from outpace.server.caller import Callers
from outpace.server.chat import ChatPrompts
from outpace.server.chat_protocol import ChatMessage, ToolSpec
from outpace.server.engine import EngineRequest, ModelCard
from outpace.server.fields import within
from outpace.server.options import ServerConfig
from outpace.server.problems import ApiError, at_most, bad
from outpace.server.protocol import ChatRequest, CompletionRequest, EmbeddingRequest, MiiRequest, SamplingFields
from outpace.server.structures import Structures
from outpace.types import SamplingParams

_SAME_NAMES = (
    *("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "seed", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "prompt_logprobs"),
)
"""Fields of requests that SamplingParams has by the same name."""


class Validator:
    """Knows the model and the limits."""

    def __init__(
        self,
        card: ModelCard,
        options: ServerConfig,
        tokenizer: AsyncTokenizer,
        chats: ChatPrompts,
        structures: Structures,
        callers: Callers,
    ) -> None:
        self._card, self._options, self._tokenizer, self._chats = card, options, tokenizer, chats
        self._structures, self._callers = structures, callers
        self.names = options.served_model_name or (card.name,)
        """Served names of the model."""

    @property
    def chat_template(self) -> str | None:
        """The template that chats are written with, if there is one."""
        try:
            return self._chats.template(tools=False)
        except ApiError:
            return None

    def model(self, asked: str | None) -> str:
        """The served name that was asked for."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise ApiError(
                404,
                f"model: there is no {asked[:100]!r} here; GET /v1/models lists the names",
                param="model",
                code="model_not_found",
            )
        return asked

    async def completion(self, request: CompletionRequest) -> list[EngineRequest]:
        """The prompts of /v1/completions."""
        self._check_limits(request, request.logprobs)
        prompts = []
        shared = _logprobs(request, request.logprobs)
        if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
            shared["prompt_logprobs"] = request.logprobs
        new = 16 if request.max_tokens is None else request.max_tokens
        for prompt in _prompts(request.prompt, self._options.max_prompts, "prompt"):
            keep, least = request.truncate_prompt_tokens, min(new, 1)
            ids = await self._encode("prompt", prompt, request.add_special_tokens, keep, new=least, asked=new)
            text = None
            if request.echo:
                cut = request.truncate_prompt_tokens is not None
                text = prompt if isinstance(prompt, str) and not cut else await self._tokenizer.decode(ids)
            prompts.append(self._request(request, ids, new, shared, text))
        grammar, field = await self._structures.grammar(request)
        return self._of_caller([replace(each, grammar=grammar, structure=field) for each in prompts], "prompt")

    async def chat(self, request: ChatRequest) -> EngineRequest:
        """The prompt of /v1/chat/completions."""
        top = (request.top_logprobs or 0) if request.logprobs else None
        self._check_limits(request, top)
        tools = request.tools if request.tools and request.tool_choice != "none" else []
        pieces = await self.chat_pieces(
            request.messages,
            tools,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            chat_template=request.chat_template,
            documents=request.documents,
            variables=request.template_variables(),
        )
        asked = request.max_completion_tokens or request.max_tokens
        special, keep = bool(request.add_special_tokens), request.truncate_prompt_tokens
        ids = await self._encode("messages", pieces, special, keep, asked=asked)
        logprobs = _logprobs(request, top)
        prompt = self._request(request, ids, asked or self._usual_length(request, len(ids), logprobs), logprobs, None)
        grammar, field = await self._structures.grammar(request)
        return self._of_caller([replace(prompt, grammar=grammar, structure=field)], "n")[0]

    async def chat_pieces(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], **how: Any) -> list[str]:
        """A conversation as text in pieces, see `ChatPrompts.write`."""
        at_most("messages", len(messages), self._options.max_messages, "messages")
        at_most("tools", len(tools), self._options.max_tools, "tools")
        return await self._chats.write(messages, tools, **how)

    async def embedding(self, request: EmbeddingRequest) -> list[EngineRequest]:
        """The inputs of /v1/embeddings."""
        self._check_dimensions(request.dimensions)
        longest, keep = self._card.max_model_len, request.truncate_prompt_tokens
        if keep is not None and not 0 < (keep := longest if keep < 0 else keep) <= longest:
            raise bad("truncate_prompt_tokens", f"expected 1 to {longest} (what the model takes), or -1 for {longest}")
        params, prompts = SamplingParams(max_tokens=0), []
        for prompt in _prompts(request.input, self._options.max_embedding_inputs, "input"):
            ids = await self._encode("input", prompt, request.add_special_tokens, keep, new=0)
            priority = self._callers.priority(None)
            prompts.append(
                EngineRequest(prompt_token_ids=ids, params=params, pooling=request.pooling, priority=priority)
            )
        return self._of_caller(prompts, "input")

    def _check_dimensions(self, asked: int | None) -> None:
        sizes = self._card.embedding_sizes
        if asked is None or asked in sizes:
            return
        if not sizes:
            raise bad("dimensions", "vectors of this model have only one width; do not set it")
        raise bad("dimensions", f"this model was trained for {f'{sizes}':.80}; use one of these")

    async def mii(self, request: MiiRequest) -> list[EngineRequest]:
        """The prompts of /mii/{deployment}: `max_length` counts the prompt."""
        self._check_stops(request.stop or [])
        longest = min(request.max_length or self._card.max_model_len, self._card.max_model_len)
        prompts = []
        for prompt in _prompts(request.prompts, self._options.max_prompts, "prompts"):
            ids = await self._encode("prompts", prompt, None, None)
            room = longest - len(ids)
            if room < 1:
                raise bad("max_length", f"a prompt of {len(ids)} tokens leaves no room in {longest}")
            new = min(request.max_new_tokens or room, room)
            if request.min_new_tokens > new:
                raise bad("min_new_tokens", f"{request.min_new_tokens} is more than the {new} there is room for")
            params = SamplingParams(
                max_tokens=new,
                min_tokens=request.min_new_tokens,
                temperature=(request.temperature or 1.0) if request.do_sample else 0.0,
                top_p=request.top_p,
                top_k=request.top_k or 0,
                stop=request.stop or (),
                ignore_eos=request.ignore_eos,
                seed=request.seed,
            )
            priority = self._callers.priority(None)
            prompts.append(EngineRequest(prompt_token_ids=ids, params=params, text=str(prompt), priority=priority))
        return self._of_caller(prompts, "prompts")

    def _of_caller(self, prompts: list[EngineRequest], field: str) -> list[EngineRequest]:
        """Add the caller and its salt to the prompts of a request. ApiError: they exceed the limits of one key."""
        most, count = self._options.max_sequences_per_key, sum(each.params.n for each in prompts)
        if most is not None and count > most:
            said = f"the request has {count} sequences (prompts times n), max_sequences_per_key={most} is the limit"
            raise bad(field, f"{said}; send fewer in one request", "limit_exceeded")
        self._check_logprobs(prompts, "top_logprobs" if field == "n" else "logprobs")
        caller = self._callers.current()
        return [replace(each, caller=caller, cache_salt=self._callers.salt(each.cache_salt)) for each in prompts]

    def _check_logprobs(self, prompts: list[EngineRequest], of_answers: str) -> None:
        """Limit the log-probabilities of a request: all are in memory together when its answer is written."""
        most = self._options.max_logprobs_per_request
        old = sum(self._prompt_entries(each.params, len(each.prompt_token_ids)) for each in prompts)
        new = sum(self._entries(each.params) * (each.params.max_tokens or 0) for each in prompts)
        if old + new > most:
            raise bad(
                "prompt_logprobs" if old > most else of_answers,
                f"the request asks for {old + new} log-probabilities in all, max_logprobs_per_request={most} is "
                "the limit; ask for fewer, or for fewer or shorter prompts and answers",
                "limit_exceeded",
            )

    def _entries(self, params: SamplingParams) -> int:
        """Log-probabilities of one new token of each answer."""
        named = params.logprob_token_ids
        return params.n * (self._with_own(params.logprobs) if named is None else 1 + len(named))

    def _prompt_entries(self, params: SamplingParams, num_tokens: int) -> int:
        """Log-probabilities of a prompt: each answer repeats them."""
        return params.n * num_tokens * self._with_own(params.prompt_logprobs)

    def _with_own(self, asked: int | None) -> int:
        """Log-probabilities at a token: the requested number, and its own."""
        return 0 if asked is None else self._card.vocab_size if asked < 0 else 1 + asked

    def _usual_length(self, request: ChatRequest, num_tokens: int, logprobs: dict[str, Any]) -> int:
        """`max_tokens` of a chat that sets none: what the context and the limit of log-probabilities leave."""
        room = max(1, self._card.max_model_len - num_tokens)
        usual = min(int(self._card.sampling.get("max_tokens", room)), room)
        params = SamplingParams(n=request.n or 1, prompt_logprobs=request.prompt_logprobs, **logprobs)
        left = self._options.max_logprobs_per_request - self._prompt_entries(params, num_tokens)
        each = self._entries(params)
        return min(usual, max(1, left // each)) if each else usual

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Refuse token ids that the model does not have: on a GPU they would crash the engine."""
        if not within(ids, self._card.vocab_size - 1):
            raise bad(name, f"expected token ids from 0 to {self._card.vocab_size - 1}")

    async def _encode(
        self,
        name: str,
        prompt: str | list[int] | list[str],
        special: bool | None,
        keep: int | None,
        *,
        new: int = 1,
        asked: int | None = None,
    ) -> list[int]:
        """Token ids of a prompt (a text, its pieces, or ids), with room for `new` more. asked: for the error message,
        how many more the request asks for."""
        if isinstance(prompt, str):
            prompt = [prompt]
        if prompt and isinstance(prompt[0], str):
            pieces: Any = prompt
            ids = await self._tokenizer.encode(pieces, add_special_tokens=special is not False)
        else:
            given: Any = prompt
            ids = list(given)
        if keep is not None:
            ids = ids[-keep:]
        if not ids:
            raise bad(name, "has no tokens")
        most = self._options.max_prompt_tokens
        if most is not None and len(ids) > most:
            raise bad(name, f"has {len(ids)} tokens; this server takes {most} at most", "context_length_exceeded")
        self._check_length(name, len(ids), new, asked=asked)
        self.check_ids(name, ids)  # last: now the prompt is known to be short
        return ids

    def _check_length(
        self, name: str, prompt: int, new: int, param: str | None = None, *, asked: int | None = None
    ) -> None:
        longest = self._card.max_model_len
        if prompt + new > longest:
            new = asked or new
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens. However, you requested {prompt + new} "
                f"tokens ({prompt} in the {name}, {new} in the completion). Please reduce the length of either.",
                param=param or name,
                code="context_length_exceeded",
            )

    def _request(
        self, request: SamplingFields, ids: list[int], max_tokens: int, extra: dict[str, Any], text: str | None
    ) -> EngineRequest:
        given = {name: value for name in _SAME_NAMES if (value := getattr(request, name)) is not None}
        params = SamplingParams(**{**self._card.sampling, **given, "max_tokens": max_tokens, **extra})
        name = "messages" if isinstance(request, ChatRequest) else "prompt"
        of_answer = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
        self._check_length(name, len(ids), max_tokens, of_answer if max_tokens > 1 else name)
        return EngineRequest(
            prompt_token_ids=ids,
            params=params,
            text=text,
            bad_words=self._tokenizer.bad_words(request.bad_words or ()),
            priority=self._callers.priority(request.priority),
            cache_salt=request.cache_salt or request.prompt_cache_key or "",
        )

    def _check_limits(self, request: SamplingFields, logprobs: int | None) -> None:
        options = self._options
        at_most("n", request.n or 1, options.max_n, "answers")
        self._check_stops(request.stop or [])
        at_most("stop_token_ids", len(request.stop_token_ids or ()), options.max_stop, "entries")
        name = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
        for field, count in ((name, logprobs or 0), ("prompt_logprobs", request.prompt_logprobs or 0)):
            self._check_count(field, count)
        at_most("logit_bias", len(request.logit_bias or ()), options.max_logit_bias, "entries")
        at_most("allowed_token_ids", len(request.allowed_token_ids or ()), options.max_allowed_tokens, "entries")
        at_most("bad_words", len(request.bad_words or ()), options.max_bad_words, "entries")
        for word in request.bad_words or ():
            at_most("bad_words", len(word), options.max_stop_chars, "characters each")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            self.check_ids(name, getattr(request, name) or ())
        self.check_ids("logit_bias", list(request.logit_bias or ()))

    def _check_count(self, field: str, count: int) -> None:
        """Limit the log-probabilities at a token; -1 is the whole vocabulary."""
        most, all_of_them = self._card.max_logprobs, self._card.vocab_size
        if (all_of_them if count < 0 else count) > most:
            said = f"-1 is the whole vocabulary ({all_of_them} tokens)" if count < 0 else f"{count} is too many"
            raise bad(field, f"{said}; this server takes at most {most} (its option --max-logprobs)", "limit_exceeded")

    def _check_stops(self, stops: Sequence[str]) -> None:
        at_most("stop", len(stops), self._options.max_stop, "strings")
        for stop in stops:
            at_most("stop", len(stop), self._options.max_stop_chars, "characters each")


def _logprobs(request: SamplingFields, count: int | None) -> dict[str, Any]:
    """The log-probabilities of new tokens: those of the named tokens, or else of the likeliest."""
    named = request.logprob_token_ids
    return {"logprobs": count} if named is None else {"logprob_token_ids": named}


def _prompts(prompt: Any, most: int, name: str) -> list[str | list[int]]:
    """One prompt or several, as a list."""
    several = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
    at_most(name, len(several), most, "prompts")
    return several
