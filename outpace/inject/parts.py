"""Parts of somebody's model by their paths."""

import difflib
from collections.abc import Sequence

from torch import Tensor, nn

from outpace.errors import ModelError


class Parts:
    """Submodules by path; a path that leads nowhere raises with the nearest ones that lead somewhere."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modules = dict(module.named_modules())

    def __call__(self, path: str) -> nn.Module:
        if path not in self._modules:
            raise self.missing(path)
        return self._modules[path]

    def ending_in(self, name: str) -> list[str]:
        """Paths that end in this name, as DeepSpeed writes it: `output.dense`, or `.fc2`."""
        return [path for path in self._modules if path and f".{path}".endswith(f".{name.removeprefix('.')}")]

    def optional(self, path: str | None) -> nn.Module | None:
        """The submodule, or None where there is none: a part that only some sizes of a family have."""
        return None if path is None else self._modules.get(path)

    def parameter(self, path: str) -> nn.Parameter:
        parameters = dict(self._module.named_parameters())
        if path not in parameters:
            raise self.missing(path, list(parameters))
        return parameters[path]

    def buffer(self, path: str) -> Tensor:
        buffers = dict(self._module.named_buffers())
        if path not in buffers:
            raise self.missing(path, list(buffers))
        return buffers[path]

    def tensor(self, path: str) -> Tensor:
        """A parameter or a buffer."""
        return self.parameter(path) if path in dict(self._module.named_parameters()) else self.buffer(path)

    def missing(self, path: str, names: Sequence[str] | None = None) -> ModelError:
        """The error for a path that leads nowhere; names: what there is, submodules unless given."""
        known = list(self._modules) if names is None else names
        close = difflib.get_close_matches(path, [name for name in known if name], n=3, cutoff=0.3)
        return ModelError(
            f"injection: {type(self._module).__name__} has no {path!r}; nearest: {', '.join(close) or 'none'}"
        )
