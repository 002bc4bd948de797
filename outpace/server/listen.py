"""The socket that `outpace serve` listens on."""

import errno
import resource
import socket
import sys

from outpace.errors import ConfigError
from outpace.log import logger
from outpace.server.options import ServerConfig

BACKLOG = 2048  # connections that wait to be accepted


def allow_files(count: int) -> None:
    """Raise the limit of open files (1,024 is usual) as far as the system allows: connections are files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        logger.warning("the system allows %d open files; max_connections would need %d", wanted, count)


def bound(config: ServerConfig) -> socket.socket:
    """The socket to listen on. It listens at once, so that a second server on the same port fails at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # IPPROTO_TCP tells asyncio to turn off Nagle's algorithm, which delays each answer by 40 ms
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # close connections whose client does not read
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * config.keep_alive_timeout))
        sock.bind((config.host, config.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        name = "host" if is_host else "port"
        remedy = "an address of this machine" if is_host else "another port, or 0 for a free one"
        said = f"{name}: cannot listen on {config.host} port {config.port} ({error.strerror}); give {remedy}"
        raise ConfigError(said) from None
    return sock


def bound_unix(path: str) -> socket.socket:
    """A Unix socket at a path; the permissions of its folder say who may connect."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
