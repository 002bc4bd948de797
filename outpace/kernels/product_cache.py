"""Results of product searches, in a file for each device and version, read by later starts."""

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from outpace.kernels.cublaslt import ALGORITHM_BYTES, DTYPES, Product, reductions
from outpace.kernels.limits import device_name
from outpace.log import logger

FORMAT = 1
NAMES: Mapping[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
WAIT = 5.0  # seconds for another process that writes the same file


def identity(device: torch.device, version: int) -> dict[str, Any]:
    """All that an algorithm depends on apart from the product; version: cublasLt's."""
    found = torch.cuda.get_device_properties(device)
    return {
        "format": FORMAT,
        "device": found.name,
        "processors": found.multi_processor_count,
        "cublasLt": version,
        "torch": torch.__version__,
        "reductions": [reductions(dtype) for dtype in DTYPES],
    }


def cache_file(folder: Path, device: torch.device, known_by: Mapping[str, Any]) -> Path:
    """The file for a device and versions."""
    key = hashlib.sha256(json.dumps(known_by, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "products" / f"{device_name(device)}-{key}.json"


class ProductCache:
    """A file of results. Several processes may read and write it: it is always replaced as a whole."""

    def __init__(self, file: Path, known_by: Mapping[str, Any]) -> None:
        self._file = file
        self._known_by = dict(known_by)

    def read(self) -> dict[Product, bytes | None]:
        """The results in the file; none if it is missing or invalid."""
        try:
            content = json.loads(self._file.read_text())
            if content["known by"] != self._known_by:
                raise ValueError("it is of another device or version")
            return from_names(content["products"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            logger.debug("products: %s is ignored (%s: %s)", self._file, type(error).__name__, error)
            return {}

    def add(self, found: Mapping[Product, bytes | None]) -> None:
        """Add results to those in the file now, if the file can be written."""
        if not found:
            return
        partial = self._file.with_name(f".{self._file.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._file.with_name(f".{self._file.name}.lock"), timeout=WAIT):
                content = {"known by": self._known_by, "products": by_names({**self.read(), **found})}
                partial.write_text(json.dumps(content, indent=1) + "\n")
                partial.replace(self._file)
        except (OSError, Timeout) as error:
            logger.warning("products: they cannot be kept in %s (%s), and are searched again", self._file.parent, error)


def by_names(found: Mapping[Product, bytes | None]) -> dict[str, str | None]:
    """The results in the types of JSON."""
    return {_name(product): None if data is None else data.hex() for product, data in found.items()}


def from_names(found: Mapping[str, str | None]) -> dict[Product, bytes | None]:
    """The reverse of `by_names`; raises ValueError, KeyError or TypeError for invalid content."""
    return {_product(name): _data(text) for name, text in found.items()}


def _name(product: Product) -> str:
    dtype = str(product.dtype).removeprefix("torch.")
    more = [name for name in ("bias", "add") if getattr(product, name)]
    return " ".join([f"{product.rows}x{product.outputs}x{product.depth}", dtype, *more])


def _product(name: str) -> Product:
    """Raises ValueError or KeyError for an invalid name."""
    size, dtype, *more = name.split(" ")
    rows, outputs, depth = map(int, size.split("x"))
    found = Product(rows, outputs, depth, NAMES[dtype], "bias" in more, "add" in more)
    if _name(found) != name:
        raise ValueError(f"{name!r:.80} is no product")
    return found


def _data(text: str | None) -> bytes | None:
    data = None if text is None else bytes.fromhex(text)
    if data is not None and len(data) != ALGORITHM_BYTES:
        raise ValueError("an algorithm has another size")
    return data
