"""Downloads one known file from a package index without pip, which environments made by uv do not have."""

import hashlib
import html.parser
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import url2pathname

import msgspec

from outpace.errors import DownloadError
from outpace.loading.index_config import Sources, sources

if TYPE_CHECKING:
    import httpx

PAGE_BYTES = 32 * 2**20
CHUNK = 2**20
TIMEOUT_S = 15.0
"""Timeout in seconds without data."""
JSON = "application/vnd.pypi.simple.v1+json"


@dataclass(frozen=True)
class Wanted:
    """The file to download, identified by its hash."""

    project: str
    file: str
    sha256: str
    most_bytes: int


def fetch(wanted: Wanted, target: Path, limit_s: float) -> None:
    """Download the file to `target` from the first place that has it: the places of pip and uv, or PyPI.

    Its hash is checked. Raises DownloadError with the error of each place.
    """
    import httpx

    found = sources()
    errors: list[str] = []
    try:
        client = _client(found)
    except (ImportError, ValueError, OSError) as error:  # an unusable proxy, an invalid file of certificates
        raise DownloadError(f"no connection can be made ({error})") from None
    with client:
        getter = _Getter(client, time.monotonic() + limit_s)
        for place in (*found.links, *(f"{url.rstrip('/')}/{wanted.project}/" for url in found.indexes)):
            try:
                getter.get(wanted, place, target)
                return
            except (_Refused, httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, OSError, ValueError) as error:
                errors.append(f"{_shown(place)}: {str(error) or type(error).__name__}")
    raise DownloadError("; ".join(errors) or "the settings of pip or uv allow no index")


class _Refused(Exception):
    """A place does not have the file, or has a different one."""


@dataclass
class _Getter:
    client: "httpx.Client"
    deadline: float

    def get(self, wanted: Wanted, place: str, target: Path) -> None:
        """Download the file from a folder, a page of links, or a project's page of an index."""
        part = target.with_name(f"{target.name}.part")
        digest, size = hashlib.sha256(), 0
        with self._opened(self._find(wanted, place)) as (chunks, _), part.open("wb") as file:
            for chunk in chunks:
                size += len(chunk)
                if size > wanted.most_bytes:
                    raise _Refused(f"{wanted.file} is longer than {wanted.most_bytes} bytes: it was not used")
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != wanted.sha256:
            raise _Refused(f"{wanted.file} has sha256 {digest.hexdigest()}, not {wanted.sha256}: it was not used")
        part.replace(target)

    def _find(self, wanted: Wanted, place: str) -> str:
        folder = _local(place)
        if folder is not None and not (folder / "index.html").is_file():
            if (folder / wanted.file).is_file():
                return str(folder / wanted.file)
            raise _Refused(f"it has no {wanted.file}")
        page = place if folder is None else str(folder / "index.html")
        with self._opened(page) as (chunks, base):
            text = b""
            for chunk in chunks:
                text += chunk
                if len(text) > PAGE_BYTES:
                    raise _Refused("its page is too long")
        for link, sha256 in _links(text):
            if unquote(urlsplit(link).path).rpartition("/")[2] == wanted.file:
                if sha256 not in (None, wanted.sha256):
                    raise _Refused(f"its {wanted.file} has sha256 {sha256}, not {wanted.sha256}: it was not used")
                return _joined(base, link)
        raise _Refused(f"it has no {wanted.file}")

    @contextmanager
    def _opened(self, place: str) -> Iterator[tuple[Iterator[bytes], str]]:
        """(chunks of the content, final URL after redirects)."""
        path = _local(place)
        if path is not None:
            with path.open("rb") as file:
                yield iter(lambda: file.read(CHUNK), b""), path.absolute().as_uri()
            return
        with self.client.stream("GET", place, headers={"accept": f"{JSON}, text/html;q=0.1"}) as reply:
            if reply.status_code != 200:
                raise _Refused(f"status {reply.status_code}")
            yield self._in_time(reply), str(reply.url)

    def _in_time(self, reply: "httpx.Response") -> Iterator[bytes]:
        for chunk in reply.iter_bytes(CHUNK):
            if time.monotonic() > self.deadline:
                raise _Refused("it took too long")
            yield chunk


def _client(found: Sources) -> "httpx.Client":
    import httpx

    trusted: Any = ssl.create_default_context(cafile=found.cert) if found.cert else True
    return httpx.Client(verify=trusted, timeout=TIMEOUT_S, follow_redirects=True)


def _local(place: str) -> Path | None:
    """The path of a file:// URL or a plain path; None: an http URL."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return None if parts.scheme in ("http", "https") else Path(place).expanduser()


def _joined(base: str, link: str) -> str:
    """Resolve a link of a page. Only local pages may link to local files. Only links to the same host get its
    credentials."""
    url = urljoin(base, link)
    parts, page = urlsplit(url), urlsplit(base)
    if parts.scheme not in ("http", "https") and page.scheme != "file":
        raise _Refused(f"its link leads to {parts.scheme}:")
    if "@" not in parts.netloc and parts.netloc == page.netloc.rpartition("@")[2] and parts.scheme == page.scheme:
        return parts._replace(netloc=page.netloc).geturl()
    return url


def _links(page: bytes) -> Iterator[tuple[str, str | None]]:
    """The links of a JSON or HTML page, each with its sha256 if it has one."""
    if page.lstrip().startswith(b"{"):
        for file in msgspec.json.decode(page, type=_Page).files:
            yield file.url, file.hashes.get("sha256")
        return
    parser = _Anchors()
    parser.feed(page.decode(errors="replace"))
    for link in parser.found:
        name, _, value = urlsplit(link).fragment.partition("=")
        yield link, value if name == "sha256" else None


class _File(msgspec.Struct):
    url: str
    hashes: dict[str, str] = {}


class _Page(msgspec.Struct):
    files: list[_File]


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _shown(place: str) -> str:
    """A place without credentials."""
    parts = urlsplit(place)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
