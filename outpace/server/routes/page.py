"""The page: files of the package, held in memory and found by their exact names."""

import mimetypes
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from outpace.server.problems import ApiError
from outpace.server.services import Services

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
}


_DOCS_LINK = b'<a href="docs">API</a>'


def router(services: Services) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    folder = files("outpace.server").joinpath("web")
    contents = {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()} if folder.is_dir() else {}
    if not services.options.docs and "index.html" in contents:
        contents["index.html"] = contents["index.html"].replace(_DOCS_LINK, b"")

    @routes.get("/web/{name}", include_in_schema=False, response_model=None)
    async def file(name: str) -> Response:
        if name not in contents:
            raise ApiError(404, "There is no such file.", code="not_found")
        kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0]
        return Response(contents[name], headers=_HEADERS, media_type=kind or "application/octet-stream")

    @routes.get("/", include_in_schema=False, response_model=None)
    async def index() -> Response:
        return await file("index.html")

    if services.options.docs:

        @routes.get("/docs", include_in_schema=False, response_model=None)
        async def docs() -> Response:
            return await file("docs.html")

    return routes
