"""ServerConfig: every option of the HTTP side, with every limit that a request meets before it reaches the engine."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from outpace.config.base import ConfigModel
from outpace.errors import ConfigError

KEYS_VARIABLE = "OUTPACE_API_KEYS"
"""Environment variable with API keys, separated by commas."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, and what requests that carry it may do."""

    secret: str = field(repr=False)
    weight: float = 1.0
    """Its share of the engine, relative to the other keys'."""
    min_priority: int | None = None
    max_priority: int | None = None


class ServerConfig(ConfigModel):
    """Options of `outpace serve` besides those of the engine; vLLM's names where they mean the same."""

    aliases: ClassVar[Mapping[str, str]] = {"api_key": "api_keys", "ssl_cert": "ssl_certfile", "ssl_key": "ssl_keyfile"}

    host: str = "127.0.0.1"
    """Address to listen on; the default serves only this machine."""
    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port; 0 takes a free one."""
    ssl_certfile: str | None = None
    """Certificate for TLS."""
    ssl_keyfile: str | None = None
    """Its private key."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may have in the Host header; * allows any. On a loopback address only these and the names of
    this machine are allowed, so that pages of other sites cannot reach the server through a name of their own. On other
    addresses, any name is allowed if none is given."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Number of servers on this machine behind the one port, each with its own engine (and GPUs). A request goes to the
    one with the least to do, or to one that has had a prompt with the same beginning."""
    root_path: str = Field(default="", pattern=r"^(/[^/?#]+)*$")
    """Path prefix under which a proxy shows the server, such as /llm; requests may come with it or without."""

    api_keys: tuple[SecretStr, ...] = ()
    """API keys; each request needs one of them. Without any, no key is needed. More come from `api_key_file` and
    OUTPACE_API_KEYS."""
    api_key_file: str | None = None
    """File with one key in each line; empty lines and lines that begin with # are ignored. After the key a line may
    give its share of the engine and its bounds, as in KEY weight=2 min_priority=-10 max_priority=0."""
    share_prefix_cache: bool = False
    """Let API keys share cached prefixes. Without this, the time to the first token shows no key what others have
    sent."""
    allow_priority: bool = False
    """Let requests set `priority` (smaller is sooner), within the bounds of their key. Requests without one have 0, or
    the bound that is nearest to it."""
    min_priority: int = -100
    """Smallest priority of a request whose key has no bound of its own in `api_key_file`."""
    max_priority: int = 100
    """Largest priority of such a request."""

    served_model_name: tuple[str, ...] = ()
    """Names of the model in requests; answers have the first. Without any, the model's own name."""
    chat_template: str | None = None
    """Template instead of the tokenizer's own: its text, or the path of its file."""
    allow_request_chat_template: bool = False
    """Let requests bring their own chat template. It runs in a sandbox, but costs up to `template_timeout` each."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "none"] = "auto"
    """How tool calls are written in the model's answers; auto looks at the chat template."""
    strict_fields: bool = False
    """Refuse fields that are otherwise accepted because other clients send them: history echoed back with fields of
    answers, and fields of other servers at values that change nothing."""
    response_role: str = Field(default="assistant", min_length=1)
    """Role of chat answers."""

    max_body_bytes: int = Field(default=2 * 2**20, ge=1024)
    """Longest body of a request."""
    max_headers: int = Field(default=64, ge=1)
    """Most headers of a request."""
    max_header_bytes: int = Field(default=16 * 2**10, ge=256)
    """Most bytes of all headers together."""
    max_json_depth: int = Field(default=64, ge=4, le=200)
    """Deepest nesting of a body."""
    max_json_keys: int = Field(default=4096, ge=64)
    """Most names in one JSON object."""
    max_json_containers: int = Field(default=2**15, ge=64)
    """Most arrays and objects in a body; it may have four times as many strings."""
    max_prompts: int = Field(default=32, ge=1)
    """Most prompts of a request."""
    max_embedding_inputs: int = Field(default=2048, ge=1)
    """Most inputs of an embeddings request; 32 of them are computed at a time."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one prompt; None: as many as the model takes."""
    max_messages: int = Field(default=2048, ge=1)
    """Most messages of a chat."""
    max_tools: int = Field(default=128, ge=0)
    """Most tools of a chat."""
    max_schema_bytes: int = Field(default=64 * 2**10, ge=1)
    """Longest JSON schema of a structured output, and of all tools together."""
    max_schema_depth: int = Field(default=32, ge=1, le=64)
    """Deepest nesting of a JSON schema."""
    max_regex_chars: int = Field(default=2 * 2**10, ge=1)
    """Longest regular expression of a structured output."""
    max_grammar_bytes: int = Field(default=16 * 2**10, ge=1)
    """Longest grammar of a structured output."""
    max_choices: int = Field(default=1024, ge=1)
    """Most texts of a choice, as a structured output."""
    max_n: int = Field(default=16, ge=1, le=128)
    """Most answers to a prompt."""
    max_logprobs_per_request: int = Field(default=2**22, ge=1)
    """Most log-probabilities of a request: those of its prompts, and of as many tokens as its answers may have. Chats
    that do not set max_tokens get fewer tokens instead. The engine's `max_logprobs` counts those of one token."""
    max_stop: int = Field(default=8, ge=0)
    """Most stop strings, and most stop tokens."""
    max_stop_chars: int = Field(default=256, ge=1)
    """Longest stop string."""
    max_logit_bias: int = Field(default=1024, ge=0)
    """Most tokens with a bias."""
    max_allowed_tokens: int = Field(default=1024, ge=1)
    """Most entries of `allowed_token_ids`."""
    max_bad_words: int = Field(default=128, ge=0)
    """Most bad words."""
    max_concurrent_requests: int = Field(default=1024, ge=1)
    """Most requests in the server at once, whatever their state; more get 429. At this limit only API keys with more
    than their fair part of it (the limit divided by the keys that have requests) are refused."""
    max_requests_per_key: int | None = Field(default=None, ge=1)
    """Most requests of one API key at once; more get 429. Without keys all requests count as those of one key."""
    max_sequences_per_key: int | None = Field(default=None, ge=1)
    """Most sequences (prompts times answers) of one API key at once, waiting and running; more get 429. Without keys
    all requests count as those of one key."""
    max_waiting_tokens_per_key: int | None = Field(default=None, ge=1)
    """Most prompt tokens of one API key that wait for the engine; more get 429. Without keys all requests count as
    those of one key."""
    max_waiting_tokens: int = Field(default=2**20, ge=1)
    """Most prompt tokens that wait for the engine; more get 429. The engine's `max_waiting` counts the requests.
    Both limits are shared between API keys like `max_concurrent_requests`."""
    retry_after: int = Field(default=1, ge=1)
    """Seconds that clients are told to wait after 429 and 503."""

    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds until a request times out, counted from the end of its headers."""
    body_timeout: float = Field(default=30.0, gt=0)
    """Seconds a client may take to send its body."""
    max_connections: int = Field(default=4096, ge=1)
    """Most open connections; one more is closed at once."""
    max_connections_per_address: int | None = Field(default=None, ge=1)
    """Most open connections from one address (of IPv6, one /64 network); one more is closed at once. None: half of
    `max_connections`. Clients behind one proxy share its address."""
    keep_alive_timeout: float = Field(default=60.0, gt=0)
    """Seconds until an idle connection is closed, or (on Linux) one whose client does not read its answer."""
    sse_ping_seconds: float = Field(default=15.0, ge=0)
    """Seconds of silence in a stream until a comment is sent, so that no proxy closes it; 0: none is sent."""
    shutdown_timeout: float = Field(default=30.0, ge=0)
    """Seconds that running requests get after SIGTERM; 0 ends them at once."""
    stall_timeout: float = Field(default=120.0, gt=0)
    """Seconds without a step of the engine while it has work, or without a sign of life while it has none, until it
    counts as dead and is restarted."""
    ready_timeout: float = Field(default=5.0, gt=0)
    """Seconds without a sign of life of the engine (a message, or on Linux work of its process) until /health/ready
    is 503. The engine is restarted only after `stall_timeout`; when it gives a sign of life, it is ready again."""
    template_timeout: float = Field(default=2.0, gt=0)
    """Seconds a chat template may take."""
    template_max_chars: int = Field(default=4 * 2**20, ge=1024)
    """Longest text a chat template may make."""
    template_memory_mb: int = Field(default=256, ge=64)
    """Memory a chat template may use, where the system can limit it."""
    template_processes: int = Field(default=2, ge=1)
    """Processes that render chats with the template."""
    grammar_timeout: float = Field(default=2.0, gt=0)
    """Seconds that compiling a grammar (of any structured output) may take."""
    grammar_memory_mb: int = Field(default=1024, ge=64)
    """Memory that compiling a grammar may use, where the system can limit it."""
    grammar_cache_mb: int = Field(default=64, ge=1)
    """Memory for compiled grammars that are kept."""

    access_log: bool = True
    """One log line for each request; /health*, /metrics and /status have one only if they fail."""
    access_log_probes: bool = False
    """A log line also for each request of /health*, /metrics and /status."""
    log_json: bool = False
    """Log lines as JSON."""
    metrics: bool = True
    """Offer /metrics."""
    expert_metrics: bool = False
    """Show in /metrics how many tokens each expert of each layer has had, for models that have experts. These are
    thousands of numbers; without it only the imbalance of each layer is shown."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span for each request; needs outpace[tracing]."""
    tokenizer_info: bool = True
    """Offer /tokenizer_info, which shows special tokens and the chat template."""
    docs: bool = True
    """Offer /docs and /openapi.json."""

    @field_validator("api_keys", "served_model_name", "allowed_hosts", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("api_keys")
    @classmethod
    def _no_empty_key(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not all(_is_key(key.get_secret_value()) for key in value):
            raise ValueError("a key is empty or has characters that no header can carry; use printable ASCII")
        return value

    @model_validator(mode="after")
    def _priorities_in_order(self) -> "ServerConfig":
        if self.min_priority > self.max_priority:
            raise ValueError(f"min_priority: {self.min_priority} is more than max_priority={self.max_priority}")
        return self

    @model_validator(mode="after")
    def _both_parts_of_tls(self) -> "ServerConfig":
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile belong together; give both or none")
        return self

    def keys(self) -> tuple[ApiKey, ...]:
        """The keys from the option, the file and the environment; values from the file win."""
        of_file = {} if self.api_key_file is None else self._keys_of_file(Path(self.api_key_file))
        given = [key.get_secret_value() for key in self.api_keys]
        found = {secret: ApiKey(secret) for secret in (*given, *of_file, *keys_in(os.environ))} | of_file
        if not all(map(_is_key, found)):
            raise ConfigError("api_keys: a key has characters that no header can carry; use printable ASCII")
        return tuple(found.values())

    def _keys_of_file(self, path: Path) -> dict[str, ApiKey]:
        found: dict[str, ApiKey] = {}
        for number, line in _lines_of_keys(path):
            where = f"api_key_file: {path}:{number}"
            key = _key_of_line(line, where)
            if key.secret in found:
                raise ConfigError(f"{where}: this key has a line already; remove one")
            self._check_bounds(key, where)
            found[key.secret] = key
        if not found:
            raise ConfigError(f"api_key_file: {path} holds no key; write one in each line")
        return found

    def _check_bounds(self, key: ApiKey, where: str) -> None:
        bounded = key.min_priority is not None or key.max_priority is not None
        if bounded and not self.allow_priority:
            raise ConfigError(f"{where}: min_priority and max_priority act only with the option allow_priority")
        low, high = self.priorities(key)
        if low > high:
            raise ConfigError(f"{where}: min_priority={low} is more than max_priority={high}")

    def priorities(self, key: ApiKey | None) -> tuple[int, int]:
        """The bounds of priorities, of a key or of requests without one."""
        low = self.min_priority if key is None or key.min_priority is None else key.min_priority
        high = self.max_priority if key is None or key.max_priority is None else key.max_priority
        return low, high

    def all_api_keys(self) -> tuple[str, ...]:
        """The secrets of all keys."""
        return tuple(key.secret for key in self.keys())

    @property
    def is_local(self) -> bool:
        """Whether the server listens on a loopback address."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def no_key_warning(self) -> str | None:
        """A warning if anyone who reaches the port may use the server."""
        if self.is_local or self.all_api_keys():
            return None
        return (
            f"WARNING: this server listens on {self.host} port {self.port} without an API key: anyone who can reach it "
            "may use it. Set --api-key-file, or --host 127.0.0.1."
        )

    @property
    def connections_per_address(self) -> int:
        """`max_connections_per_address`, or its default."""
        return self.max_connections_per_address or (self.max_connections + 1) // 2

    def hosts(self) -> tuple[str, ...]:
        """The names in `Host` that are taken by a server that listens on `host`; empty: all are."""
        if "*" in self.allowed_hosts or not (self.allowed_hosts or self.is_local):
            return ()
        own = (self.host, "localhost", "127.0.0.1", "::1") if self.is_local else ()
        return tuple(dict.fromkeys((*own, *self.allowed_hosts)))

    def template_text(self) -> str | None:
        """The chat template of the option, read from its file if it is a path."""
        given = self.chat_template
        if given is None or "{" in given:
            return given
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError):
            raise ConfigError(f"chat_template: cannot read {given}; give a template, or the path of one") from None


def keys_in(environment: Mapping[str, str]) -> list[str]:
    """The API keys in the environment."""
    return [key.strip() for key in environment.get(KEYS_VARIABLE, "").split(",") if key.strip()]


def _is_key(key: str) -> bool:
    return bool(key) and key.isascii() and key.isprintable() and key == key.strip()


def _lines_of_keys(path: Path) -> list[tuple[int, str]]:
    """Lines with a key, with their numbers."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        raise ConfigError(f"api_key_file: cannot read {path}; give a text file with one key in each line") from None
    return [(number, line) for number, line in enumerate(lines, start=1) if line and not line.startswith("#")]


def _key_of_line(line: str, where: str) -> ApiKey:
    """A key, and what follows it as name=value. Errors show nothing of the line, which may be a secret."""
    secret, *given = line.split()
    values: dict[str, Any] = {}
    for word in given:
        name, _, value = word.partition("=")
        read = _KEY_VALUES.get(name)
        try:
            values[name] = read(value) if read is not None else None
        except ValueError:
            read = None
        if read is None:
            raise ConfigError(
                f"{where}: cannot read what follows the key; a key has no spaces, and after it come weight=2 (0.01 to "
                "100), min_priority=-10 or max_priority=0"
            )
    return ApiKey(secret, **values)


def _weight(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 100:
        raise ValueError("from 0.01 to 100")
    return value


_KEY_VALUES: Mapping[str, Callable[[str], float | int]] = {"weight": _weight, "min_priority": int, "max_priority": int}


def local_url(host: str, port: int, *, tls: bool) -> str:
    """The URL of a server for clients on its own machine. host: where it listens."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    if host.count(":") > 1 and not host.startswith("["):
        return host.lower()  # an IPv6 address as it is
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.rstrip(".").lower()
