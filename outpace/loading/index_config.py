"""Reads where pip and uv look for packages, from their environment variables and configuration files."""

import configparser
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PYPI = "https://pypi.org/simple"


@dataclass(frozen=True)
class Settings:
    """The settings of pip or uv."""

    index: str | None = None
    extra: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    no_index: bool = False
    cert: str | None = None


@dataclass(frozen=True)
class Sources:
    """Places to look in, in this order: folders and pages of links, then indexes."""

    links: tuple[str, ...]
    indexes: tuple[str, ...]
    cert: str | None
    """A file with trusted certificates."""


def sources(environ: Mapping[str, str] = os.environ) -> Sources:
    """The places in the settings of pip and uv. PyPI is included unless one of them replaces it."""
    both = _uv(environ), _pip(environ)
    named = [settings.index for settings in both if settings.index]
    indexes = [*(named or [PYPI]), *(url for settings in both for url in settings.extra)]
    if any(settings.no_index for settings in both):
        indexes = []
    links = [place for settings in both for place in settings.links]
    cert = next((settings.cert for settings in both if settings.cert), None)
    return Sources(tuple(dict.fromkeys(links)), tuple(dict.fromkeys(indexes)), cert)


def _pip(environ: Mapping[str, str]) -> Settings:
    options = _pip_files(environ)
    options |= {
        name.removeprefix("PIP_").lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith("PIP_") and value
    }
    return Settings(
        options.get("index-url"),
        tuple(options.get("extra-index-url", "").split()),
        tuple(options.get("find-links", "").split()),
        _is_true(options.get("no-index")),
        options.get("cert"),
    )


def _pip_files(environ: Mapping[str, str]) -> dict[str, str]:
    """The options for `pip download` in pip's files; later files win, as in pip."""
    own = environ.get("PIP_CONFIG_FILE", "")
    if own == os.devnull:
        return {}
    home, config = _homes(environ)
    system = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf")]
    user = [] if own and Path(own).exists() else [home / ".pip" / "pip.conf", config / "pip" / "pip.conf"]
    options: dict[str, str] = {}
    for path in (*system, *user, Path(sys.prefix) / "pip.conf", *([Path(own)] if own else [])):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError, OSError):
            continue  # pip itself reports the error
        for section in ("global", "download"):
            if parser.has_section(section):
                options |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    return options


def _uv(environ: Mapping[str, str]) -> Settings:
    file = _uv_file(environ)
    listed = [entry for entry in file.get("index", []) if isinstance(entry, dict) and "url" in entry]
    default = next((str(entry["url"]) for entry in listed if entry.get("default")), file.get("index-url"))
    extra = [str(entry["url"]) for entry in listed if not entry.get("default")]
    return Settings(
        environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL") or default,
        (
            *map(_without_name, _words(environ, "UV_INDEX")),
            *_words(environ, "UV_EXTRA_INDEX_URL"),
            *extra,
            *_strings(file.get("extra-index-url")),
        ),
        (*filter(None, environ.get("UV_FIND_LINKS", "").split(",")), *_strings(file.get("find-links"))),
        _is_true(environ.get("UV_NO_INDEX")) or file.get("no-index") is True,
    )


def _uv_file(environ: Mapping[str, str]) -> dict[str, Any]:
    """The first of uv's files that exists, with its `pip` table merged on top."""
    own = environ.get("UV_CONFIG_FILE")
    _, config = _homes(environ)
    for path in [Path(own)] if own else [config / "uv" / "uv.toml", Path("/etc/uv/uv.toml")]:
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        of_pip = content.get("pip")
        return {**content, **(of_pip if isinstance(of_pip, dict) else {})}
    return {}


def _homes(environ: Mapping[str, str]) -> tuple[Path, Path]:
    """(home folder, folder of configuration files)."""
    home = Path(environ.get("HOME") or "~").expanduser()
    return home, Path(environ.get("XDG_CONFIG_HOME") or home / ".config")


def _words(environ: Mapping[str, str], name: str) -> list[str]:
    return environ.get(name, "").split()


def _without_name(index: str) -> str:
    """The URL in name=URL."""
    name, _, url = index.partition("=")
    return url if url and "://" not in name else index


def _strings(value: Any) -> Iterable[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _is_true(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on", "y", "t")
