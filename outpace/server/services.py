"""What the routes of one server share."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from outpace.log import logger
from outpace.server.async_tokenizer import AsyncTokenizer
from outpace.server.big_jobs import BigJobs
from outpace.server.caller import Callers
from outpace.server.chat import ChatPrompts, Renderer
from outpace.server.engine import Engine
from outpace.server.grammars import GrammarService
from outpace.server.metrics import Metrics
from outpace.server.options import ApiKey, ServerConfig
from outpace.server.problems import ApiError
from outpace.server.structures import Structures
from outpace.server.tools import Style, style_of
from outpace.server.validate import Validator

_MOST_WAITING = 64  # large bodies of one key


@dataclass(frozen=True, slots=True)
class Services:
    """The engine, and everything between it and the routes."""

    engine: Engine
    options: ServerConfig
    tokenizer: AsyncTokenizer
    renderer: Renderer
    validator: Validator
    metrics: Metrics
    style: Style
    """How the model writes tool calls."""
    grammars: GrammarService
    bodies: BigJobs
    """Large bodies, while they are read."""
    answers: BigJobs
    """Large answers, while they are written."""

    def close(self) -> None:
        """End threads and processes of the HTTP side; the engine is closed by its owner."""
        self.renderer.close()
        self.grammars.close()
        self.tokenizer.close()
        self.bodies.close()
        self.answers.close()


def make_services(
    engine: Engine, options: ServerConfig, tokenizer: PreTrainedTokenizerBase, keys: Sequence[ApiKey]
) -> Services:
    """Make the services of one server."""
    async_tokenizer, renderer = AsyncTokenizer(tokenizer), Renderer(options)
    chats = ChatPrompts(tokenizer, options, renderer)
    try:
        template = chats.template(tools=True)
        if wrong := chats.error(tools=False) or chats.error(tools=True):
            logger.warning("%s: every chat will fail; give another one with --chat-template", wrong)
    except ApiError:
        template = ""
    style, grammars = style_of(template, options.tool_call_parser), GrammarService(tokenizer, engine.card, options)
    structures, callers = Structures(options, style, grammars), Callers(options, keys)
    validator = Validator(engine.card, options, async_tokenizer, chats, structures, callers)
    metrics = Metrics(validator.names[0], engine.status, experts=options.expert_metrics)
    jobs = BigJobs("large bodies", _MOST_WAITING), BigJobs("large answers")
    return Services(engine, options, async_tokenizer, renderer, validator, metrics, style, grammars, *jobs)
