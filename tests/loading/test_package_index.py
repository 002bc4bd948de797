"""A file of a package without pip: where it is looked for, what is refused, and what is said."""

import json
from pathlib import Path

import pytest

from outpace.errors import DownloadError
from outpace.loading.index_config import PYPI, Sources, sources
from outpace.loading.package_index import Wanted, fetch
from tests.loading.index import HttpIndex, folder_index, sha256, tell_nothing

DATA = b"a wheel" * 1000
FILE = "a_b-1.0-py3-none-any.whl"
WANTED = Wanted("a-b", FILE, sha256(DATA), len(DATA))


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tell_nothing(monkeypatch)


def html(link: str) -> bytes:
    return f'<!DOCTYPE html><a href="/other-1.0.whl">other</a> <A class=x HREF="{link}">{FILE}</A>'.encode()


def as_json(link: str, digest: str) -> bytes:
    return json.dumps({"files": [{"filename": FILE, "url": link, "hashes": {"sha256": digest}}]}).encode()


@pytest.mark.parametrize(
    "page",
    [
        html(f"../../files/{FILE}"),
        html(f"/files/{FILE}#sha256={WANTED.sha256}"),
        as_json(f"/files/{FILE}", WANTED.sha256),
    ],
)
@pytest.mark.parametrize("variable", ["PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_EXTRA_INDEX_URL"])
def test_item_18_a_file_comes_from_the_index_that_is_configured(
    page: bytes, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HttpIndex({"/simple/a-b/": page, f"/files/{FILE}": DATA}).running() as index:
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")  # unless it is the one that is set
        monkeypatch.setenv(variable, f"{index.url}/simple/")
        fetch(WANTED, tmp_path / FILE, 100)
    assert (tmp_path / FILE).read_bytes() == DATA
    assert index.asked == ["/simple/a-b/", f"/files/{FILE}"]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_item_18_the_password_in_an_index_is_used_for_its_host_alone_and_never_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HttpIndex({}, password="secret").running() as index, HttpIndex({}).running() as other:
        place = index.url.replace("//", "//me:secret@")
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{place}/simple")
        index.pages = {"/simple/a-b/": html(f"{index.url}/{FILE}"), f"/{FILE}": DATA}
        fetch(WANTED, tmp_path / FILE, 100)
        index.pages = {"/simple/a-b/": html(f"{other.url}/{FILE}")}
        with pytest.raises(DownloadError, match=f"^{index.url}/simple/a-b/: status 404$"):
            fetch(WANTED, tmp_path / FILE, 100)
        assert other.asked == [f"/{FILE}"]


def test_item_18_folders_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / FILE).write_bytes(DATA)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path / 'nowhere'} {tmp_path / 'links'}")
    fetch(WANTED, tmp_path / "first", 100)
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(DownloadError, match="allow no index"):
        fetch(WANTED, tmp_path / "none", 100)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", folder_index(tmp_path / "i", "a-b", tmp_path / "links" / FILE).as_uri())
    fetch(WANTED, tmp_path / "second", 100)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes() == DATA


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        ({}, "status 404"),
        ({"/a-b/": b"<a href=/x.whl>x</a>"}, f"it has no {FILE}"),
        ({"/a-b/": b"{}"}, "missing required field `files`"),
        ({"/a-b/": html(f"/{FILE}"), f"/{FILE}": DATA[1:] + b"x"}, "has sha256 .*: it was not used"),
        ({"/a-b/": html(f"/{FILE}#sha256={'0' * 64}")}, "has sha256 0000.*: it was not used"),
        ({"/a-b/": html(f"/{FILE}"), f"/{FILE}": DATA + b"x"}, f"longer than {len(DATA)} bytes: it was not used"),
        ({"/a-b/": html(f"file:///etc/{FILE}")}, "its link leads to file:"),
        ({"/a-b/": html(f"ftp://x/{FILE}")}, "its link leads to ftp:"),
    ],
)
def test_item_18_what_is_not_the_file_is_not_kept(
    pages: dict[str, bytes], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HttpIndex(pages).running() as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        with pytest.raises(DownloadError, match=said):
            fetch(WANTED, tmp_path / FILE, 100)
    assert not (tmp_path / FILE).exists()


def test_item_18_a_download_has_a_limit_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HttpIndex({"/a-b/": html(f"/{FILE}"), f"/{FILE}": DATA}).running() as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        with pytest.raises(DownloadError, match="it took too long"):
            fetch(WANTED, tmp_path / FILE, -1.0)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "PIP_CERT"])
def test_item_18_a_connection_that_cannot_be_made(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "what://is/this")
    with pytest.raises(DownloadError, match="no connection can be made"):
        fetch(WANTED, tmp_path / FILE, 100)


# what pip and uv are told


def test_item_18_without_configuration_it_is_pypi() -> None:
    assert sources() == Sources((), (PYPI,), None)


def test_item_18_files_of_pip(tmp_path: Path) -> None:
    home, own = tmp_path / "home", tmp_path / "own.conf"
    (home / ".config/pip").mkdir(parents=True)
    (home / ".config/pip/pip.conf").write_text(
        "[global]\nindex-url = https://user\nextra_index_url =\n  https://x\n  https://y\n"
        "find-links = /links\ncert = c\n"
    )
    own.write_text("[global]\nindex-url = https://own\n[download]\nno-index = true\n")
    environ = {"HOME": str(home), "UV_CONFIG_FILE": "/dev/null"}
    assert sources(environ) == Sources(("/links",), ("https://user", "https://x", "https://y"), "c")
    assert sources({**environ, "PIP_INDEX_URL": "https://env", "PIP_EXTRA_INDEX_URL": ""}).indexes[0] == "https://env"
    assert sources({**environ, "PIP_CONFIG_FILE": str(own)}).indexes == ()
    assert sources({**environ, "PIP_CONFIG_FILE": "/dev/null"}) == Sources((), (PYPI,), None)
    (home / ".config/pip/pip.conf").write_text("no section\n")
    assert "https://user" not in sources(environ).indexes


def test_item_18_files_and_variables_of_uv(tmp_path: Path) -> None:
    file = tmp_path / "uv.toml"
    file.write_text(
        'find-links = ["/a"]\n[[index]]\nurl = "https://d"\ndefault = true\n[[index]]\nurl = "https://e"\n'
        '[pip]\nextra-index-url = ["https://f"]\n'
    )
    environ = {"UV_CONFIG_FILE": str(file), "PIP_CONFIG_FILE": "/dev/null"}
    assert sources(environ) == Sources(("/a",), ("https://d", "https://e", "https://f"), None)
    told = {"UV_INDEX": "name=https://g https://h?i=1", "UV_FIND_LINKS": "/b,/c", "UV_DEFAULT_INDEX": "https://z"}
    found = sources({**environ, **told})
    assert found.links == ("/b", "/c", "/a")
    assert found.indexes == ("https://z", "https://g", "https://h?i=1", "https://e", "https://f")
    assert sources({**environ, "UV_NO_INDEX": "true"}).indexes == ()
    file.write_text("= broken")
    assert sources(environ).indexes == (PYPI,)
