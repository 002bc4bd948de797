"""Text to tokens and back, as vLLM has it."""

from fastapi import APIRouter
from starlette.responses import Response

from outpace.server.body import StrictRoute
from outpace.server.protocol import DetokenizeRequest, TokenizeRequest
from outpace.server.responses import DetokenizedText, TokenizerInfo, Tokens
from outpace.server.routes.documented import answers
from outpace.server.routes.openai import json_response, long_list
from outpace.server.serving import Serving

_MANY = 4096  # tokens


def router(serving: Serving) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=StrictRoute, tags=["Text"])
    validator, tokens = serving.validator, serving.tokens

    @routes.post("/tokenize", response_model=None, responses=answers(Tokens, "The tokens."))
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
        ids = await tokens.encode(pieces, add_special_tokens=special)
        longest, named = serving.engine.card.max_model_len, bool(body.return_token_strs)

        def make() -> Response:
            result: Tokens = {
                "count": len(ids),
                "max_model_len": longest,
                "tokens": long_list(ids),
                "token_strs": long_list(tokens.names(ids)) if named else None,
            }
            return json_response(result)

        return make() if len(ids) < _MANY else await serving.answers.run(make)

    @routes.post("/detokenize", response_model=None, responses=answers(DetokenizedText, "The text."))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids, special ones too."""
        validator.model(body.model)
        if len(body.tokens) < _MANY:
            validator.check_ids("tokens", body.tokens)
        else:
            await serving.bodies.run(validator.check_ids, "tokens", body.tokens)
        result: DetokenizedText = {"prompt": await tokens.decode(body.tokens)}
        return json_response(result)

    if serving.options.tokenizer_info:

        @routes.get("/tokenizer_info", response_model=None, responses=answers(TokenizerInfo, "The tokenizer."))
        async def tokenizer_info() -> Response:
            """How texts become tokens, and the chat template."""
            return json_response(tokens.info(serving.engine.card.max_model_len, validator.chat_template))

    return routes
