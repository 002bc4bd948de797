"""The partner of `chat` and `complete`: any OpenAI-compatible server, or a model in this process."""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
import typer

from outpace.errors import InputError, ModelError, OutpaceError

if TYPE_CHECKING:
    import httpx

    from outpace.llm import LLM

Message = dict[str, str]
CONNECT_SECONDS = 10.0
KEY_VARIABLE = "OUTPACE_API_KEY"

Url = Annotated[str | None, typer.Option(help="An OpenAI-compatible server, instead of a model in this process.")]
ApiKey = Annotated[str | None, typer.Option(envvar=KEY_VARIABLE, help="The server's key.", show_default=False)]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most new tokens.", show_default="as many as fit")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", show_default="the model's own")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens with this total probability.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
GenerationConfig = Annotated[
    str | None,
    typer.Option(help="Sampling defaults: auto (the model's generation_config.json), none, or a folder."),
]
DType = Annotated[str | None, typer.Option(help="fp32, fp16 or bf16.", show_default="the checkpoint's own")]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Weights in int8 or int4, with activations in fp8 or w8a8, as stored, or none.", show_default=False
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option("--tensor-parallel-size", "--tp", min=1, help="Tensor parallel ranks.", show_default="1"),
]
Stages = Annotated[int | None, typer.Option("--pp", "--pipeline-parallel-size", help="Pipeline stages.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="the first GPU")]


class Talker(Protocol):
    """Yields pieces of an answer's text. Closing the iterator stops the answer."""

    name: str

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Iterator[str]:
        """Answer a conversation."""

    def complete(self, prompt: str, options: Mapping[str, Any]) -> Iterator[str]:
        """Continue a text."""

    def close(self) -> None:
        """Close the connection or free the model."""


def talker(model: str | None, url: str | None, key: str | None, **options: str | None) -> Talker:
    """A server if there is a URL, otherwise a model with these engine options."""
    if url is not None:
        if first := next(iter(given(**options)), None):
            raise InputError(f"{first}: the server at url has its own; remove it")
        return Remote(url, key, model)
    if key is not None:
        raise InputError("api-key: it is for a server; give its url too")
    return Local(model, **given(**options))


def given(**options: Any) -> dict[str, Any]:
    """The options that were set."""
    return {name: value for name, value in options.items() if value is not None}


def base_of(url: str) -> str:
    """The root of the API: .../v1."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"url: expected http://host:port or https://..., got {url!r}")
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def headers_of(key: str | None) -> dict[str, str]:
    """The headers of a request with this API key."""
    return {"authorization": f"Bearer {key}"} if key else {}


def message_of(body: bytes) -> str:
    """The message of an error body."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip() or "no reason was given"


class Remote:
    """A `Talker` over a server."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        import httpx

        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._client = httpx.Client(base_url=base_of(url), headers=headers_of(key), timeout=timeout)
        try:
            self.name = model or self._first_model()
        except OutpaceError:
            self.close()
            raise

    def close(self) -> None:
        self._client.close()

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Iterator[str]:
        for choice in self._stream("/chat/completions", {"messages": list(messages), **options}):
            yield choice.get("delta", {}).get("content") or ""

    def complete(self, prompt: str, options: Mapping[str, Any]) -> Iterator[str]:
        for choice in self._stream("/completions", {"prompt": prompt, **options}):
            yield choice.get("text") or ""

    def _first_model(self) -> str:
        with self._reached():
            reply = self._client.get("/models")
        _check(reply)
        try:
            return str(reply.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise InputError("url: the server lists no models; name the model") from None

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """The choices of a stream's chunks."""
        body = {"model": self.name, "stream": True, **body}
        with self._reached(), self._client.stream("POST", path, json=body) as reply:
            if reply.status_code != 200:
                reply.read()
            _check(reply)
            for line in reply.iter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    chunk = msgspec.json.decode(data)
                    if "error" in chunk:
                        raise OutpaceError(f"the server gave up: {message_of(data.encode())}")
                    yield from chunk["choices"]

    @contextmanager
    def _reached(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.HTTPError as error:
            raise OutpaceError(f"url: {self._client.base_url}: {error or type(error).__name__}") from None


def need_tokenizer(llm: "LLM") -> None:
    """Raise if a model has no tokenizer."""
    if llm.tokenizer is None:
        raise ModelError(f"model: {llm.name} has no tokenizer, which text needs; put its files into the model's folder")


class Local:
    """A `Talker` over a model in this process."""

    def __init__(self, model: str | None, **options: Any) -> None:
        from outpace.llm import LLM

        self._llm = LLM(model, max_num_seqs=1, **options)
        need_tokenizer(self._llm)
        self.name = self._llm.name

    def close(self) -> None:
        self._llm.shutdown()

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Iterator[str]:
        yield from self._stream(self._llm.apply_chat_template(list(messages)), options)

    def complete(self, prompt: str, options: Mapping[str, Any]) -> Iterator[str]:
        if not prompt:
            try:
                self._llm.tokenize(prompt)  # many tokenizers begin a text with a token of their own
            except InputError:
                raise InputError(
                    "prompt: it is empty, and this model needs a token to continue from; give a text, or use "
                    "`outpace generate`, which adds the chat template"
                ) from None
        yield from self._stream(prompt, options)

    def _stream(self, prompt: str | list[int], options: Mapping[str, Any]) -> Iterator[str]:
        from outpace.types import SamplingParams

        ids = self._llm.tokenize(prompt)
        room = self._llm.max_model_len - len(ids)
        if room < 1:
            raise InputError(f"prompt: its {len(ids)} tokens leave no room in {self._llm.max_model_len}; shorten it")
        usual = self._llm.engine.sampling_defaults
        params = SamplingParams(**{**usual, "max_tokens": min(room, int(usual.get("max_tokens", room))), **options})
        shown = 0
        with _interrupts_wait() as interrupted:
            for output in self._llm.stream(ids, params):
                text = output.outputs[0].text
                yield text[shown:]
                shown = len(text)
                if interrupted():
                    raise KeyboardInterrupt


@contextmanager
def _interrupts_wait() -> Iterator[Callable[[], bool]]:
    """Checks for Ctrl-C between steps, since inside one it would corrupt the engine. A second one does not wait."""
    came = False

    def on_interrupt(*_: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


def _check(reply: "httpx.Response") -> None:
    if reply.status_code != 200:
        raise OutpaceError(f"the server answered {reply.status_code}: {message_of(reply.content)}")
