"""B-11: keys open every route but health."""

import base64
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError
from starlette.routing import Route

from outpace.errors import ConfigError
from outpace.server.guard import OPEN, Keys
from outpace.server.options import ServerConfig
from tests.server.conftest import Serve, Served

pytestmark = pytest.mark.anyio


def paths(server: Served) -> list[tuple[str, str]]:
    """Every route of the app, as (method, path)."""

    def walk(routes: Any) -> list[tuple[str, str]]:
        found = []
        for route in routes:
            if isinstance(route, Route):
                found += [(method, route.path) for method in route.methods or ()]
            elif "routes" in dir(route):
                found += walk(route.routes)
        return found

    declared = server.app.openapi()["paths"]
    named = [(method.upper(), path) for path, methods in declared.items() for method in methods]
    return sorted({*walk(server.app.routes), *named, ("GET", "/"), ("GET", "/web/app.js"), ("GET", "/docs")})


HEADERS = [
    *(None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer righ", "Bearer rightx", "Bearer Right", "right"),
    *("Basic right", "Basic " + base64.b64encode(b"right:wrong").decode(), "Token right", "Bearer r\xefght"),
]


@pytest.mark.parametrize("header", HEADERS)
async def test_b11_every_route_but_health_needs_a_key(serve: Serve, header: str | None) -> None:
    server = serve(api_keys="right", docs=True, access_log=False)
    headers = {} if header is None else {b"authorization": header.encode("latin-1")}
    seen = 0
    async with server.http() as client:
        for method, path in paths(server):
            answer = await client.request(method, path, headers=headers)
            if path in OPEN:
                assert answer.status_code in (200, 405), (method, path)
            else:
                seen += 1
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"]
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert seen > 12
    assert server.engine.requests == []


async def test_b11_paths_cannot_be_dressed_up(serve: Serve) -> None:
    server = serve(api_keys="right")
    for path in (
        "//v1/models",
        "/health/../v1/models",
        "/health/live/../../v1/models",
        "/HEALTH",
        "/health/",
        "/v1/models?x=/health",
    ):
        assert (await server.get(path)).status_code == 401, path


async def test_any_of_several_keys_opens(serve: Serve) -> None:
    server = serve(api_keys=["one", "two"])
    for key in ("one", "two"):
        async with server.openai(key) as client:
            assert (await client.models.list()).data[0].id == "fake"
    async with server.openai("three") as client:
        with pytest.raises(AuthenticationError):
            await client.models.list()


async def test_a_browser_may_send_the_key_as_a_password(serve: Serve) -> None:
    server = serve(api_keys="right")
    refused = await server.get("/")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic")
    header = "Basic " + base64.b64encode(b"anyone:right").decode()
    assert (await server.get("/v1/models", headers={"authorization": header})).status_code == 200


async def test_without_keys_the_server_is_open_but_not_to_other_sites(serve: Serve) -> None:
    server = serve()
    answer = await server.get("/v1/models", headers={"origin": "http://evil"})
    assert answer.status_code == 200
    assert not any(name.startswith("access-control") for name in answer.headers)
    async with server.http() as client:
        asked = {"origin": "http://evil", "access-control-request-method": "POST"}
        preflight = await client.options("/v1/completions", headers=asked)
    assert preflight.status_code == 405
    assert not any(name.startswith("access-control") for name in preflight.headers)


def test_keys_come_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# team\nalpha\n\n beta \n")
    monkeypatch.setenv("OUTPACE_API_KEYS", "gamma, delta,")
    config = ServerConfig(api_keys=["own"], api_key_file=str(file))
    assert config.all_api_keys() == ("own", "alpha", "beta", "gamma", "delta")
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="api_key_file"):
        config.all_api_keys()
    with pytest.raises(ConfigError, match="api_key_file"):
        ServerConfig(api_key_file=str(tmp_path / "absent")).all_api_keys()
    with pytest.raises(ConfigError, match="api_keys"):
        ServerConfig(api_keys=[""])


def test_b11_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compare(left: bytes, right: bytes) -> bool:
        calls.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr("outpace.server.guard.hmac.compare_digest", compare)
    keys = Keys(["one", "twotwotwo", "three"])
    assert keys.find("Bearer one") == 0
    assert keys.find("Bearer x") is None
    assert calls == [(32, 32)] * 6
