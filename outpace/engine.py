"""InferenceEngine: makes the user's module ready to run; it can still be used like that module."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from rich.console import Console
from torch import nn

from outpace import generation
from outpace.config import InferenceConfig
from outpace.errors import ConfigError, ModelError, NotSupported, StateError
from outpace.inject.injection import Fused
from outpace.log import chosen
from outpace.parallel.calls import check_alike, common_generate
from outpace.parallel.group import same_draws
from outpace.parallel.mesh import NO_MESH
from outpace.prepare import Prepared, prepare
from outpace.profile import Profiler
from outpace.runner.fast_generate import FastGenerate
from outpace.runner.graphs import ForwardGraphs
from outpace.tree import moved

_SEEDING = threading.Lock()  # seeded calls of a process take turns: Hugging Face samples from torch's one generator


class InferenceEngine(nn.Module):
    """A converted model on its device, called with `engine(...)` and `engine.generate(...)`.

    Attributes the engine does not have are the model's own: `engine.config`, `engine.get_input_embeddings()`, ...
    The model is changed in place, not copied.
    """

    module: nn.Module

    def __init__(self, model: nn.Module, config: InferenceConfig) -> None:
        super().__init__()
        if isinstance(model, InferenceEngine):
            raise ModelError("model: it is an engine already; use it, or give init_inference its module")
        prepared = prepare(model, config)
        self.module = prepared.module
        self.inference_config = config
        self.info, self._dtype, self._device = prepared.info, prepared.dtype, prepared.device
        self.mesh = prepared.mesh
        """The ranks that run it together: each of them must make the same calls."""
        self._cut = prepared.cut
        if self.mesh is not NO_MESH:
            self.module.requires_grad_(False)  # gradients do not cross ranks
        self._fused = isinstance(prepared.injection, Fused)
        self._profiler = Profiler(self._device)
        self.streaming = prepared.streaming
        """Layers that are streamed to the device; None: all layers stay there."""
        self._graphs = self._make_graphs(config)
        self._fast = self._make_fast(prepared, config)
        self.eval()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self._dtype

    @property
    def generation_config(self) -> Any:
        """The generation config of the model; setting it changes the model's."""
        return self._alive().generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self._alive().generation_config = value

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, with CUDA graphs if they are turned on. Inputs are moved to its device."""
        module = self._alive()
        self._refuse_attentions(kwargs.get("output_attentions"))
        if self._graphs is None:
            args, kwargs = self._here((args, kwargs))
            check_alike(self.mesh.together, "forward", (args, kwargs), self._device)
            if self._cut is None:
                return module(*args, **kwargs)
            return self._cut.forward(args, kwargs, self.inference_config.pipeline_parallel.micro_batches)
        if self._graphs.uncapturable is not None:
            return self._graphs(*self._here(args), **self._here(kwargs))
        if self.streaming is not None:
            self.streaming.restore()  # a graph expects the first layers; a call that failed may have left others
        with self._profiler.measure("forward"), self._profiler.paused():
            return self._graphs(*args, **kwargs)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's `generate`, with its arguments and results; a prompt may be padded on either side.

        seed: makes this call repeatable; it overrides the config's seed. torch's global generator does not change.
        """
        module = self._alive()
        seed = kwargs.pop("seed", None)
        seed = self.inference_config.seed if seed is None else seed
        if isinstance(kwargs.get("assistant_model"), InferenceEngine):
            kwargs["assistant_model"] = kwargs["assistant_model"].module
        args, kwargs = self._here((args, kwargs))
        call = generation.check_call(module, self.info, self.inference_config, args, kwargs)
        self._refuse_attentions(call.setting("output_attentions"))
        if self._cut is not None:
            self._cut.refuse_outputs(call.setting)
        also = seed, self.generation_config
        common = common_generate(self.mesh.together, call.kwargs, also, self._device, call.setting("max_time"))
        call = replace(call, kwargs=common)
        if seed is None:
            same_draws(self.mesh.together, self._device)
        with self._profiler.measure("generate"), self._seeded(seed):
            return call.restore(self._generate(module, call))

    def _generate(self, module: nn.Module, call: generation.Call) -> Any:
        generate: Callable[..., Any] = module.generate  # type: ignore[assignment]
        if self.mesh.ep.size > 1 and not self.mesh.experts_like_layers:
            return generate(**call.kwargs, synced_gpus=True)  # tokens of others may need the experts of this rank
        if self._fast is None:
            return generate(**call.kwargs)
        plain = self._fast.greedy(call.kwargs, call.mask, call.setting)
        if plain is not None:
            return plain
        loop = self._fast.loop(call.kwargs, call.mask, call.setting)
        return generate(**call.kwargs) if loop is None else generate(**call.kwargs, custom_generate=loop)

    @contextmanager
    def _seeded(self, seed: int | None) -> Iterator[None]:
        if seed is None:
            yield
            return
        devices = [self._device] if self._device.type == "cuda" else []
        with _SEEDING, torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield

    def _refuse_attentions(self, asked: object) -> None:
        if asked and self._fused:
            raise NotSupported("output_attentions: fused layers keep no attention weights; leave kernel injection off")

    def profile_model_time(self, use_cuda_events: bool = True, *, modules: bool = False) -> None:
        """Measure the time of every forward and generate from now on. modules: also of every submodule."""
        graphs = self._graphs is not None
        self._profiler.start(self._alive(), use_cuda_events=use_cuda_events, modules=modules, graphs=graphs)

    def model_times(self) -> list[float]:
        """Milliseconds of each forward since the last call; a generate has one for each of its steps."""
        return self._profiler.take_times()

    def profile_summary(self, console: Console | None = None) -> None:
        """Print count, mean, p50 and p95 of forward, generate and the submodules."""
        (console or Console()).print(self._profiler.table())

    def destroy(self) -> None:
        """Free the model, the graphs and their memory. The engine cannot be used afterwards."""
        self._profiler.stop()
        if self._graphs is not None:
            self._graphs.clear()
        self._graphs = self._fast = None
        self._modules.pop("module", None)
        if self.streaming is not None:
            self.streaming.close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self.__dict__.get("_modules", {}):
                raise
        return getattr(self.module, name)

    def _alive(self) -> nn.Module:
        module = self._modules.get("module")
        if module is None:
            raise StateError("the engine is destroyed; make a new one with outpace.init_inference")
        return module

    def _here(self, value: Any) -> Any:
        return moved(value, self._device)

    def _make_graphs(self, config: InferenceConfig) -> ForwardGraphs | None:
        if not config.enable_cuda_graph:
            return None
        if self.streaming is not None and not self.streaming.capturable:
            raise ConfigError(
                "enable_cuda_graph: layers that come from a file, from memory that is not page-locked, or with experts "
                "that are fetched when they are chosen cannot be part of a graph; remove it, or give more memory"
            )
        if self.info.graphs_itself:
            chosen("cuda graphs", "local", "a submodule captures its own; the engine runs eager around it")
            return None
        return ForwardGraphs(
            self.module, self._device, limit=config.max_cuda_graphs, static_output=config.graph_output == "static"
        )

    def _make_fast(self, prepared: Prepared, config: InferenceConfig) -> FastGenerate | None:
        paged = prepared.paged() if self.info.can_generate else None
        if paged is None:
            return None
        return FastGenerate(
            self.module,
            paged,
            max_tokens=min(config.max_out_tokens, self.info.max_positions or config.max_out_tokens),
            graphs=config.enable_cuda_graph,
            measure=lambda: self._profiler.measure("forward"),
            kv_cache_dtype=config.kv_cache_dtype,
        )
