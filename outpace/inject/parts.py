"""Parts of a model by path."""

import difflib
from collections.abc import Sequence

from torch import Tensor, nn

from outpace.errors import ModelError


class Parts:
    """Submodules by path; a wrong path raises an error with the nearest right ones."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modules = dict(module.named_modules())

    def __call__(self, path: str) -> nn.Module:
        if path not in self._modules:
            raise self.missing(path)
        return self._modules[path]

    def ending_in(self, name: str) -> list[str]:
        """Paths with this ending, in DeepSpeed's form: `output.dense`, or `.fc2`."""
        return [path for path in self._modules if path and f".{path}".endswith(f".{name.removeprefix('.')}")]

    def optional(self, path: str | None) -> nn.Module | None:
        """The submodule; None: there is none, as in some sizes of a family."""
        return None if path is None else self._modules.get(path)

    def tensor(self, path: str) -> Tensor:
        tensors = {**dict(self._module.named_buffers()), **dict(self._module.named_parameters())}
        if path not in tensors:
            raise self.missing(path, list(tensors))
        return tensors[path]

    def missing(self, path: str, names: Sequence[str] | None = None) -> ModelError:
        """The error for a wrong path. names: the right ones; None: all submodules."""
        known = list(self._modules) if names is None else names
        close = difflib.get_close_matches(path, [name for name in known if name], n=3, cutoff=0.3)
        return ModelError(
            f"injection: {type(self._module).__name__} has no {path!r}; nearest: {', '.join(close) or 'none'}"
        )
