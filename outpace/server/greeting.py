"""The lines that a server prints when it is ready."""

import json
import shlex
import socket
from pathlib import Path
from typing import Any

from outpace.server.options import ServerConfig, local_url


def greeting(name: str, took: str, config: ServerConfig, sock: socket.socket, *, has_template: bool) -> list[str]:
    """How long the start took, the URL of the server, and a first request to try.

    A server on a Unix socket is a replica; its router prints the rest.
    """
    if sock.family == socket.AF_UNIX:
        return [f"{Path(sock.getsockname()).stem} is ready ({took})"]
    host, port = sock.getsockname()[:2]
    url = local_url(host, port, tls=config.ssl_certfile is not None)
    served = config.served_model_name[0] if config.served_model_name else name
    body: dict[str, Any] = {"model": served, "max_tokens": 64}
    if has_template:
        route = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "What is a paged cache?"}]
    else:
        route = "/v1/completions"
        body["prompt"] = "A paged cache is"
    key = " -H 'authorization: Bearer KEY'" if config.all_api_keys() else ""
    return [
        *filter(None, [config.no_key_warning()]),  # again: the first warning may have scrolled away
        f"{served} is ready ({took})",
        url,
        f"curl {url}{route} -H 'content-type: application/json'{key} -d {shlex.quote(json.dumps(body))}",
    ]
