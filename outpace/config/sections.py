"""The sections of the config tree, with every default."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from outpace.config.base import ConfigModel
from outpace.config.values import Budget, CalibrationText, ExpertLoads, NamedPath, PathText, PlanSource, Size


class TensorParallelConfig(ConfigModel):
    """How the weights of one layer are divided among ranks."""

    enabled: bool = True
    """False forbids tensor parallelism."""
    tp_size: int = Field(default=1, ge=1)
    """Number of ranks that share each layer."""
    tp_grain_size: int = Field(default=64, ge=1)
    """Shards of MLP and head are multiples of this."""
    mpu: Any = None
    """A Megatron-style model-parallel unit that brings its own groups."""
    tp_group: Any = None
    """A ready process group to use instead of making one."""


class PipelineParallelConfig(ConfigModel):
    """How the layers of a model are divided into stages, each on ranks of its own."""

    pp_size: int = Field(default=1, ge=1)
    """Stages that the layers are divided into. Ranks in all: so many times `tensor_parallel.tp_size`."""
    layers: tuple[int, ...] | None = None
    """Layers of each stage, first to last; None: so that the slowest stage is as fast as can be."""
    micro_batches: int | None = Field(default=None, ge=1)
    """Parts that the batch of a `forward` is cut into; None: four for each stage, if there are so many rows."""

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
    """Experts in each expert layer, or one number for all: it must be what injection finds. (1,): not said."""
    type: Literal["standard", "residual"] = "standard"
    """Residual: experts beside a dense MLP, each with its share of the sum. It must be what injection finds."""
    hot_experts: int = Field(default=0, ge=0)
    """Copies of busy experts that each rank holds beside its own, chosen by `expert_load`."""
    expert_load: ExpertLoads | None = None
    """Tokens of each expert, of each layer that has experts: what `LLM.expert_load()` gives, or a JSON file of it."""
    ep_mp_group: Any = None
    """Process group that slices one expert."""
    ep_group: Any = None
    """Process group that shares the experts."""


class BaseQuantConfig(ConfigModel):
    """How one kind of tensor is quantized."""

    enabled: bool = True
    """Quantize this kind of tensor."""
    num_bits: Literal[4, 8] = 8
    """Bits per value."""
    q_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """Symmetric keeps no zero point."""
    q_groups: int = Field(default=1, ge=1)
    """Groups of a row that have a scale of their own; 1: one scale a row."""


class GroupQuantConfig(ConfigModel):
    """A rule of DeepSpeed's weight-only quantization."""

    num_bits: Literal[4, 8] = 8
    """Bits per value."""
    group_size: int | None = Field(default=None, ge=8)
    """Columns of a row that share a scale; None: the whole row, of 4 bits 128 columns or as many as fit."""
    group_dim: Literal[1, -1] = 1
    """Only the columns are grouped."""
    symmetric: bool = False
    """Symmetric keeps no zero point."""


class WeightQuantConfig(BaseQuantConfig):
    """How weights are quantized."""

    group_size: int | None = Field(default=None, ge=8)
    """Columns of a row that share a scale, instead of `q_groups`."""
    per_tensor: bool = False
    """One scale for each tensor of the model: q, k and v have one each, fused or not."""
    quantized_initialization: GroupQuantConfig | None = None
    """How all weights are quantized, as DeepSpeed's ZeRO-Inference has it."""
    post_init_quant: dict[str, GroupQuantConfig] | None = None
    """The same by a part of the name of a weight; weights that are not named stay as they are."""


class QKVQuantConfig(ConfigModel):
    """Whether the attention projections are quantized too."""

    enabled: bool = True
    """Quantize the attention projections."""


class CalibrationConfig(ConfigModel):
    """The text that a model is run on to choose or make quantized weights."""

    text: CalibrationText | None = None
    """The path of a text file in UTF-8, or token ids; None: the built-in text."""
    tokens: int = Field(default=2048, ge=16)
    """Tokens of the text that are used, from its beginning."""


class AutoQuantConfig(ConfigModel):
    """A scheme for each weight, chosen by measuring: the fewest bytes under a bound, or the best within a size."""

    max_perplexity_increase: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Most that the perplexity on the calibration text may grow by, relative: 0.01 is 1 %."""
    max_bytes: Size | None = None
    """Most bytes of all weights of the model in memory: a number, or text such as "4GB"."""
    bits_per_weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Most bits of a weight on average, over all linears, scales among them."""
    schemes: tuple[Literal["int4", "int8", "fp8", "w8a8"], ...] = ("int4", "int8")
    """What weights may become; each may stay as it is, too."""
    out: NamedPath | None = None
    """A .json file that the plan is written to; its table (.md) and its picture (.png) are put beside it."""


class QuantizationConfig(ConfigModel):
    """Weight and activation quantization."""

    keeps_auto: ClassVar[frozenset[str]] = frozenset({"kv_cache_dtype", "scheme"})

    enabled: bool = True
    """False: as if `quant` had not been given; not with `scheme` or `kv_cache_dtype`."""
    scheme: Literal["int8", "int4", "fp8", "w8a8", "stored", "none"] | None = None
    """A usual combination: int8 weights, int4 weights in groups, fp8 or int8 (w8a8) weights and activations. stored:
    weights that the checkpoint stores quantized run from their own bits, the default on a GPU; none: they are converted
    to the model's dtype, the default on a CPU."""
    activation: BaseQuantConfig | None = None
    """Activations: not quantized unless this is given."""
    weight: WeightQuantConfig = WeightQuantConfig()
    """Weights."""
    qkv: QKVQuantConfig = QKVQuantConfig()
    """Attention projections."""
    kv_cache_dtype: Literal["auto", "int8", "fp8", "fp8_e4m3"] = "auto"
    """Keys and values in pages: int8 or fp8 (e4m3, the same as fp8_e4m3), with a scale for each token and head; auto:
    as the model computes them."""
    method: Literal["rtn", "gptq"] = "rtn"
    """How weights are rounded: to nearest, or by GPTQ, which `outpace quantize` does ahead of time."""
    smooth: float | None = Field(default=None, ge=0, le=1)
    """SmoothQuant's alpha, which `outpace quantize` takes too; None: outliers of activations stay in them."""
    calibration: CalibrationConfig = CalibrationConfig()
    """The text that is calibrated with."""
    auto: AutoQuantConfig | None = None
    """A scheme for each weight, chosen by measuring on the calibration text."""
    plan: PlanSource | None = None
    """What `auto` chose another time: the path of its JSON file, or what that holds. Nothing is measured."""

    @field_validator("scheme", mode="before")
    @classmethod
    def _no_scheme(cls, value: object) -> object:
        if value == "auto":
            raise ValueError(
                "'auto' is no scheme; let one be measured for each weight with "
                'quant={"auto": {"max_perplexity_increase": 0.01}}, or leave it out'
            )
        return value

    @property
    def reads_text(self) -> bool:
        """Whether a calibration text has to be read with a tokenizer."""
        return self.auto is not None and not isinstance(self.calibration.text, tuple)

    @property
    def only_cache(self) -> bool:
        """Whether the cache is all that was asked to be quantized."""
        given = {name for name, value in self.given().items() if value is not None}
        return given - {"enabled"} == {"kv_cache_dtype"}


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
    """Page-locked host memory, from which copies run beside the computation."""
    buffer_count: int = Field(default=5, ge=1)
    """Buffers in host memory that reads from NVMe go to."""
    buffer_size: int = Field(default=100_000_000, ge=1)
    """Parameters of one buffer. Together they hold two layers at least, whatever is said here."""
    max_in_cpu: int = Field(default=1_000_000_000, ge=0)
    """Parameters kept in host memory when NVMe is used."""


class AioConfig(ConfigModel):
    """How layers are read from NVMe."""

    block_size: int | None = Field(default=None, ge=4096, multiple_of=4096)
    """Bytes of one read; None: Outpace's own choice."""
    queue_depth: int | None = Field(default=None, ge=1)
    """Most reads under way."""
    thread_count: int | None = Field(default=None, ge=1, le=256)
    """Threads that read."""
    single_submit: bool = False
    """Only False is accepted: a thread asks for one block at a time."""
    overlap_events: bool = True
    """Only True is accepted: reads run beside everything else."""
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
        "it concerns training, or layers that ranks gather from each other; leave it out",
    )

    stage: Literal[0, 1, 2, 3] = 0
    """3 streams the parameters of layers; 1 and 2 concern training."""
    offload_param: OffloadParamConfig = OffloadParamConfig()
    """Where the parameters live."""
    aio: AioConfig = AioConfig()
    """How they are read from NVMe."""
    prefetch_bucket_size: int = Field(default=50_000_000, ge=0)
    """Parameters fetched ahead: one layer at least; 0: none, each layer is waited for."""
    param_persistence_threshold: int = Field(default=100_000, ge=0)
    """Parameters with fewer values than this stay on the device."""
    model_persistence_threshold: int = Field(default=2**63 - 1, ge=0)
    """Most values that stay on the device for that reason."""
    max_live_parameters: int = Field(default=1_000_000_000, ge=0)
    """Most values of layers on the device at a time: two layers at least, the rest of them for layers that stay."""
    max_reuse_distance: int = Field(default=1_000_000_000, ge=0)
    """A layer stays if it is used again within so many values: all layers in between are counted, once around."""


class CacheConfig(ConfigModel):
    """The paged key-value cache of `LLM`."""

    block_size: Literal[16, 32, 64, 128, 256] = 64
    """Tokens in one page."""
    num_blocks: int | None = Field(default=None, ge=1)
    """Number of pages; None: what the memory has room for."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Fraction of the GPU's memory that Outpace may use."""
    cpu_cache_space: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """GiB of pages when the model runs on a CPU."""
    enable_prefix_caching: bool = True
    """Share the pages of equal prefixes."""
    swap_space: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB of host memory for the pages of preempted requests; without room there they are computed again."""


class SchedulerConfig(ConfigModel):
    """Continuous batching in `LLM`."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Most requests in one step."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in one step; None: on a GPU what fits in 50 ms, or in the time of 5 steps of max_num_seqs tokens."""
    max_chunk_beside_decodes: int | None = Field(default=None, ge=1)
    """Most tokens of one prompt beside decodes; None: a quarter of max_num_batched_tokens, at most 384."""
    max_waiting: int = Field(default=4096, ge=1)
    """Most requests that wait; more are refused with `Overloaded`."""
    async_scheduling: bool | None = None
    """Schedule and launch the next step while one runs; None: on a GPU, since a CPU has nobody to leave it to."""


class NodesConfig(ConfigModel):
    """One model over several machines."""

    nnodes: int = Field(default=1, ge=1)
    """Machines that the ranks are spread over, as many on each."""
    node_rank: int = Field(default=0, ge=0)
    """Which of them this is. Node 0 answers requests; the others work for it."""
    master_addr: str | None = Field(default=None, min_length=1)
    """Address of node 0, where the others meet."""
    master_port: int = Field(default=29500, ge=1, le=65534)
    """Port there for control, and the next one for torch.distributed to meet at."""
    interface: str | None = Field(default=None, min_length=1)
    """Network interface that all traffic between nodes uses; None: the one that leads to `master_addr`."""
    join_timeout: float = Field(default=25.0, gt=0, allow_inf_nan=False)
    """Seconds to wait for the other nodes, at the start and after a loss."""
    link_timeout: float = Field(default=10.0, ge=1, allow_inf_nan=False)
    """Seconds without a sign of life of a node until it counts as lost; node 0's value counts."""


class OffloadConfig(ConfigModel):
    """Models larger than the device: layers in host memory or on NVMe, streamed to where they run."""

    aliases: ClassVar[Mapping[str, str]] = {"nvme_path": "nvme"}

    auto: bool = False
    """Keep on the device what fits, and the rest in host memory; offload="auto" says the same."""
    device_memory: Budget | None = None
    """Most memory of the device, for weights, pages and steps: "20GB", or a fraction. On a CPU: memory for weights.
    None: `gpu_memory_utilization`."""
    host_memory: Budget | None = None
    """Most host memory for layers: "64GB", or a fraction of what is free; 0: none. None: 0.8 of what is free. Of all
    ranks of a machine together."""
    nvme: NamedPath | None = None
    """Folder on an NVMe drive, for layers that host memory has no room for."""
    cpu_offload_gb: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB of layers that live in host memory, at least, as vLLM has it."""
    kv: Budget | None = None
    """Host memory for pages of `LLM`: a second level of the prefix cache, and preempted requests. "32GB", or a fraction
    of what is free; of all ranks together."""
    kv_offloading_size: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB of host memory for pages, as vLLM has it; `kv` says the same."""
    kv_files: Budget | None = None
    """Room in a file in `nvme` for pages that host memory (`kv`) has no room for: "200GB", or a fraction of what is
    free there."""
    host_pages: Budget | None = None
    """Host memory for pages of running requests, beside the device's: attention reads them over the link. For contexts
    longer than the device has pages for; it is slow, and used for as few layers as possible."""
    slots: int | None = Field(default=None, ge=1, le=16)
    """Layers on the device at a time of those that are streamed; None: 2."""
    expert_cache: Budget | None = None
    """Device memory for the experts of streamed layers that were used last: "4GB", or a fraction of `device_memory`; 0:
    none, each is fetched when tokens go to it. None: a quarter of what the device has for layers, or what is left of it
    beside the slots."""
