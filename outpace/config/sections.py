"""The sections of the config tree, with all defaults (`quant` is in quantization.py)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from outpace.config.base import ConfigModel
from outpace.config.values import Budget, ExpertLoads, NamedPath, PathText


class TensorParallelConfig(ConfigModel):
    """How the weights of one layer are divided among ranks."""

    enabled: bool = True
    """False forbids tensor parallelism."""
    tp_size: int = Field(default=1, ge=1)
    """Number of ranks that share each layer."""
    tp_grain_size: int = Field(default=64, ge=1)
    """Shards of MLP and head are multiples of this."""
    mpu: Any = None
    """A Megatron-style model-parallel unit that provides process groups."""
    tp_group: Any = None
    """An existing process group to use instead of making one."""


class PipelineParallelConfig(ConfigModel):
    """How the layers of a model are divided into stages, each on ranks of its own."""

    pp_size: int = Field(default=1, ge=1)
    """Number of stages that the layers are divided into. There are `pp_size` times `tensor_parallel.tp_size` ranks."""
    layers: tuple[int, ...] | None = None
    """Number of layers of each stage, first to last; None: the division with the fastest slowest stage."""
    micro_batches: int | None = Field(default=None, ge=1)
    """Number of parts that the batch of a `forward` is cut into; None: four for each stage, but at most one for each
    row."""

    @model_validator(mode="after")
    def _one_for_each_stage(self) -> Self:
        if self.layers is not None and (len(self.layers) != self.pp_size or min(self.layers) < 1):
            raise ValueError(
                f"layers: {self.layers!r} must be a number of layers, at least 1, for each of pp_size={self.pp_size} "
                f"stages; give pp_size={len(self.layers)}, or other layers"
            )
        return self


class MoEConfig(ConfigModel):
    """Mixture of experts."""

    aliases: ClassVar[Mapping[str, str]] = {
        "num_experts": "moe_experts",
        "expert_group": "ep_group",
        "expert_mp_group": "ep_mp_group",
    }

    enabled: bool = True
    """False: the engine does not look for expert layers, and injection leaves experts as they are."""
    ep_size: int = Field(default=1, ge=1)
    """Number of ranks that share the experts."""
    moe_experts: tuple[int, ...] = (1,)
    """Number of experts in each expert layer, or one number for all; it must be what injection finds. (1,): not
    checked."""
    type: Literal["standard", "residual"] = "standard"
    """residual: experts and a dense MLP run in parallel and are summed with weights. It must be what injection
    finds."""
    hot_experts: int = Field(default=0, ge=0)
    """Number of copies of busy experts that each rank holds in addition to its own, chosen by `expert_load`."""
    expert_load: ExpertLoads | None = None
    """Tokens of each expert, for each layer that has experts: the result of `LLM.expert_load()`, or a JSON file of
    it."""
    ep_mp_group: Any = None
    """Process group whose ranks each hold a slice of every expert."""
    ep_group: Any = None
    """Process group whose ranks share the experts."""


class CheckpointConfig(ConfigModel):
    """Where checkpoints are read and written."""

    checkpoint_dir: NamedPath | None = None
    """Folder of the checkpoint."""
    save_mp_checkpoint_path: NamedPath | None = None
    """The same as `save_mp_checkpoint_path` outside this section."""
    base_dir: PathText | None = None
    """Folder the names in the checkpoint description are relative to."""


class OffloadParamConfig(ConfigModel):
    """ZeRO's offload of parameters."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where the parameters of layers live while they are not used."""
    nvme_path: NamedPath | None = None
    """Folder on the NVMe drive."""
    pin_memory: bool = True
    """Page-locked host memory, from which copies overlap with the computation."""
    buffer_count: int = Field(default=5, ge=1)
    """Number of buffers in host memory for reads from NVMe."""
    buffer_size: int = Field(default=100_000_000, ge=1)
    """Number of parameters in one buffer. All buffers together always hold at least two layers."""
    max_in_cpu: int = Field(default=1_000_000_000, ge=0)
    """Number of parameters kept in host memory when NVMe is used."""


class AioConfig(ConfigModel):
    """How layers are read from NVMe."""

    block_size: int | None = Field(default=None, ge=4096, multiple_of=4096)
    """Bytes of one read; None: Outpace's own choice."""
    queue_depth: int | None = Field(default=None, ge=1)
    """Maximum number of reads in flight."""
    thread_count: int | None = Field(default=None, ge=1, le=256)
    """Number of threads that read."""
    single_submit: bool = False
    """Only False is accepted: each thread reads one block at a time."""
    overlap_events: bool = True
    """Only True is accepted: reads overlap with everything else."""
    use_gds: bool = False
    """Only False is accepted: reads go through page-locked host memory."""


class ZeroConfig(ConfigModel):
    """ZeRO-Inference: the part of DeepSpeed's `zero_optimization` that concerns inference."""

    aliases: ClassVar[Mapping[str, str]] = {
        "stage3_prefetch_bucket_size": "prefetch_bucket_size",
        "stage3_param_persistence_threshold": "param_persistence_threshold",
        "stage3_model_persistence_threshold": "model_persistence_threshold",
        "stage3_max_live_parameters": "max_live_parameters",
        "stage3_max_reuse_distance": "max_reuse_distance",
    }
    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "elastic_checkpoint"),
            *("gather_16bit_weights_on_model_save", "load_from_fp32_weights", "memory_efficient_linear"),
            *("offload_optimizer", "overlap_comm", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients"),
            *("stage3_gather_16bit_weights_on_model_save", "sub_group_size"),
        ),
        "it concerns training, or layers that ranks gather from each other; remove it",
    )

    stage: Literal[0, 1, 2, 3] = 0
    """3 streams the parameters of layers; 1 and 2 concern training."""
    offload_param: OffloadParamConfig = OffloadParamConfig()
    """Where the parameters are stored."""
    aio: AioConfig = AioConfig()
    """How they are read from NVMe."""
    prefetch_bucket_size: int = Field(default=50_000_000, ge=0)
    """Number of parameters to prefetch, at least one layer; 0: no prefetch, every layer is waited for."""
    param_persistence_threshold: int = Field(default=100_000, ge=0)
    """Tensors with fewer parameters than this stay on the device."""
    model_persistence_threshold: int = Field(default=2**63 - 1, ge=0)
    """Maximum number of parameters that stay on the device for that reason."""
    max_live_parameters: int = Field(default=1_000_000_000, ge=0)
    """Maximum number of parameters of layers on the device at a time: at least two layers; the rest is for layers that
    stay."""
    max_reuse_distance: int = Field(default=1_000_000_000, ge=0)
    """Layers may stay only if all layers together have at most this many parameters: the distance until a layer is used
    again."""


class CacheConfig(ConfigModel):
    """The paged key-value cache of `LLM`."""

    block_size: Literal[16, 32, 64, 128, 256] = 64
    """Tokens in one page."""
    num_blocks: int | None = Field(default=None, ge=1)
    """Number of pages; None: as many as fit into memory."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Fraction of the GPU's memory that Outpace may use."""
    cpu_cache_space: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """GiB of pages when the model runs on a CPU."""
    enable_prefix_caching: bool = True
    """Share the pages of requests with equal prefixes."""
    swap_space: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB of host memory for the pages of preempted requests; pages that do not fit are recomputed."""


class SchedulerConfig(ConfigModel):
    """Continuous batching in `LLM`."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Maximum number of requests in one step."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Token budget of one step. None: on a GPU the one with the most tokens/s, found by timing steps at the start."""
    target_step_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Maximum milliseconds of a step while a request is streamed (on a GPU). None: 50, or 5 times a step of
    max_num_seqs tokens if that is longer; if max_num_batched_tokens is given, it is the only limit."""
    max_chunk_beside_decodes: int | None = Field(default=None, ge=1)
    """Maximum prefill tokens of one prompt in a step that also decodes. None: while a request is streamed, as many as
    make a step take 2.3 times a step of 32 decodes, at most a quarter of the token budget; on a CPU a quarter, at most
    384."""
    policy: Literal["arrival", "longest_first"] = "arrival"
    """Which waiting request is admitted next. longest_first: the one with the most new tokens, with prompts spread over
    the steps; for offline work with known lengths, refused by `outpace serve`."""
    max_waiting: int = Field(default=4096, ge=1)
    """Maximum number of waiting requests; more are refused with `Overloaded`."""
    async_scheduling: bool | None = None
    """Schedule and launch the next step while one runs; None: on a GPU only, since a CPU has no device to overlap
    with."""


class NodesConfig(ConfigModel):
    """One model over several machines."""

    nnodes: int = Field(default=1, ge=1)
    """Number of machines; each runs the same number of ranks."""
    node_rank: int = Field(default=0, ge=0)
    """The number of this machine, from 0. Node 0 answers requests; the others work for it."""
    master_addr: str | None = Field(default=None, min_length=1)
    """Address of node 0, to which the other nodes connect."""
    master_port: int = Field(default=29500, ge=1, le=65534)
    """Port of node 0 for control; torch.distributed connects at the next one."""
    interface: str | None = Field(default=None, min_length=1)
    """Network interface for all traffic between nodes; None: the one that leads to `master_addr`."""
    join_timeout: float = Field(default=25.0, gt=0, allow_inf_nan=False)
    """Seconds to wait for the other nodes, at the start and after a loss."""
    link_timeout: float = Field(default=10.0, ge=1, allow_inf_nan=False)
    """Seconds without a heartbeat until a node counts as lost; the value of node 0 is used."""


class OffloadConfig(ConfigModel):
    """Models larger than the device: layers are stored in host memory or on NVMe and streamed to the device."""

    aliases: ClassVar[Mapping[str, str]] = {"nvme_path": "nvme"}

    auto: bool = False
    """Keep as many layers as fit on the device and the others in host memory; offload="auto" means the same."""
    device_memory: Budget | None = None
    """Maximum memory of the device for weights, pages and steps: "20GB", or a fraction. On a CPU: memory for weights.
    None: `gpu_memory_utilization`."""
    host_memory: Budget | None = None
    """Maximum host memory for layers, of all ranks of a machine together: "64GB", or a fraction of the free memory; 0:
    none. None: 0.8 of the free memory."""
    nvme: NamedPath | None = None
    """Folder on an NVMe drive, for layers that do not fit into host memory."""
    cpu_offload_gb: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """At least this many GiB of layers live in host memory (vLLM's option)."""
    kv: Budget | None = None
    """Host memory for pages of `LLM`, of all ranks together: a second level of the prefix cache, and room for preempted
    requests. "32GB", or a fraction of the free memory."""
    kv_offloading_size: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB of host memory for pages (vLLM's option); `kv` means the same."""
    kv_files: Budget | None = None
    """Size of a file in `nvme` for pages that do not fit into host memory (`kv`): "200GB", or a fraction of the free
    disk space."""
    host_pages: Budget | None = None
    """Host memory for more pages of running requests; attention reads them over the link. For contexts that are longer
    than the device's pages; it is slow, and used for as few layers as possible."""
    slots: int | None = Field(default=None, ge=1, le=16)
    """Number of streamed layers on the device at a time; None: 2."""
    expert_cache: Budget | None = None
    """Device memory that caches the last used experts of streamed layers: "4GB", or a fraction of `device_memory`; 0:
    no cache, an expert is fetched whenever tokens go to it. None: a quarter of the device memory for layers, or what
    the slots leave of it."""
