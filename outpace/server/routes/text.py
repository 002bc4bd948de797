"""Text to tokens and back, as in vLLM."""

from fastapi import APIRouter
from starlette.responses import Response

from outpace.server.body import StrictRoute
from outpace.server.protocol import DetokenizeRequest, TokenizeRequest
from outpace.server.responses import DetokenizedText, TokenizedText, TokenizerInfo, json_response
from outpace.server.routes.documented import answers
from outpace.server.routes.openai import long_list
from outpace.server.services import Services

_MANY = 4096  # tokens; more are written or checked in a thread


def router(services: Services) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=StrictRoute, tags=["Text"])
    validator, tokenizer = services.validator, services.tokenizer

    @routes.post("/tokenize", response_model=None, responses=answers(TokenizedText, "The tokens."))
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text, or of a conversation as the model sees it."""
        validator.model(body.model)
        if body.messages is None:
            pieces, special = [body.prompt or ""], body.add_special_tokens is not False
        else:
            pieces = await validator.chat_pieces(
                body.messages,
                body.tools or [],
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
                variables=body.chat_template_kwargs,
            )
            special = bool(body.add_special_tokens)
        ids = await tokenizer.encode(pieces, add_special_tokens=special)
        longest, named = services.engine.card.max_model_len, bool(body.return_token_strs)

        def make() -> Response:
            result: TokenizedText = {
                "count": len(ids),
                "max_model_len": longest,
                "tokens": long_list(ids),
                "token_strs": long_list(tokenizer.names(ids)) if named else None,
            }
            return json_response(result)

        return make() if len(ids) < _MANY else await services.answers.run(make)

    @routes.post("/detokenize", response_model=None, responses=answers(DetokenizedText, "The text."))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids, including special tokens."""
        validator.model(body.model)
        if len(body.tokens) < _MANY:
            validator.check_ids("tokens", body.tokens)
        else:
            await services.bodies.run(validator.check_ids, "tokens", body.tokens)
        result: DetokenizedText = {"prompt": await tokenizer.decode(body.tokens)}
        return json_response(result)

    if services.options.tokenizer_info:

        @routes.get("/tokenizer_info", response_model=None, responses=answers(TokenizerInfo, "The tokenizer."))
        async def tokenizer_info() -> Response:
            """How texts become tokens, and the chat template."""
            return json_response(tokenizer.info(services.engine.card.max_model_len, validator.chat_template))

    return routes
