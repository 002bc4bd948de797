"""Options that are refused: capabilities that this release lacks, and combinations that cannot work."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from outpace.config.quantization import QUANT_COMPOSITIONS, changed, chooses, weighs_int8

if TYPE_CHECKING:
    from outpace.config.inference import InferenceConfig
    from outpace.config.llm import LLMConfig
    from outpace.config.quantization import QuantizationConfig

LATER: Mapping[str, str] = {"triton_autotune": "tuning of kernels on the user's machine"}
"""Fields outside of sections whose capability is not in this release, with its name."""


def num_ranks(config: "InferenceConfig") -> int:
    """Number of ranks of an engine: pipeline stages times the ranks that share a stage's layers or experts."""
    return config.pipeline_parallel.pp_size * max(config.tensor_parallel.tp_size, config.moe.ep_size)


def is_int8(config: "InferenceConfig") -> bool:
    """Whether dtype int8 was asked for; in a process without torch the dtype is a string."""
    return str(config.dtype).removeprefix("torch.") == "int8"


def _of_quant(wrong: "Callable[[QuantizationConfig], bool]", config: "InferenceConfig") -> bool:
    return config.quant is not None and wrong(config.quant)


def _int8_beside(scheme: str, config: "InferenceConfig") -> bool:
    return is_int8(config) and config.quant is not None and config.quant.scheme == scheme


def _names_checkpoint(config: "InferenceConfig") -> bool:
    return config.checkpoint is not None or config.checkpoint_config.checkpoint_dir is not None


def _tunes(config: "InferenceConfig") -> bool:
    return (config.kernels or {}).get("linear") == "tuned"


_PAGES = ("kv", "kv_files", "kv_offloading_size", "host_pages")
"""Fields of `offload` for pages, not weights."""
_WEIGHTS = ("auto", "device_memory", "host_memory", "cpu_offload_gb")
"""Fields of `offload` for weights; each of them turns streaming on."""


def places_weights(config: "InferenceConfig") -> bool:
    """Whether layers may live outside the device. `nvme` does not count if the folder is for pages (`kv_files`)."""
    names = _WEIGHTS if config.offload.kv_files else (*_WEIGHTS, "nvme")
    return config.zero.stage == 3 or changed(config.offload, *names)


def _keeps_pages(config: "InferenceConfig") -> bool:
    """Whether `offload` gives host memory to pages."""
    return bool(config.offload.kv) or config.offload.kv_offloading_size > 0


COMPOSITIONS: Mapping[str, Callable[["InferenceConfig"], bool]] = {
    "enable_cuda_graph with tensor_parallel.tp_size > 1: a captured graph cannot span ranks; "
    "turn one of them off": lambda c: c.enable_cuda_graph and c.tensor_parallel.tp_size > 1,
    "enable_cuda_graph with pipeline_parallel.pp_size > 1: a captured graph cannot span ranks; "
    "turn one of them off": lambda c: c.enable_cuda_graph and c.pipeline_parallel.pp_size > 1,
    "pipeline_parallel.pp_size with tensor_parallel.mpu or tp_group: groups that you pass do not know the "
    "stages; give tp_size instead": lambda c: (
        c.pipeline_parallel.pp_size > 1 and (c.tensor_parallel.mpu or c.tensor_parallel.tp_group) is not None
    ),
    "pipeline_parallel.pp_size with moe.ep_group or ep_mp_group: groups that you pass do not know the stages; "
    "give moe.ep_size instead": lambda c: (
        c.pipeline_parallel.pp_size > 1 and (c.moe.ep_group or c.moe.ep_mp_group) is not None
    ),
    "enable_cuda_graph: a CPU has no CUDA graphs; "
    "leave it off, or give device='cuda' on a machine with a GPU": lambda c: (
        c.enable_cuda_graph and c.device_type == "cpu"
    ),
    "use_triton: Triton kernels run in fused layers on a GPU, where they are used anyway; give "
    "replace_with_kernel_inject=True on a machine with a GPU, or remove it": lambda c: (
        c.use_triton and (c.device_type == "cpu" or not c.replace_with_kernel_inject)
    ),
    "kernels: they run in fused layers; give replace_with_kernel_inject=True, or remove it": lambda c: (
        bool(c.kernels) and not (c.replace_with_kernel_inject or c.injection_policy)
    ),
    "kernels.linear='tuned' with offload or zero: the products of streamed layers are not tuned; remove "
    "one": lambda c: _tunes(c) and places_weights(c),
    "triangular_masking: it concerns fused layers; give replace_with_kernel_inject=True, or remove it": lambda c: (
        not c.triangular_masking and not (c.replace_with_kernel_inject or c.injection_policy)
    ),
    "return_tuple=False: a fused layer returns what the model around it expects; remove it": lambda c: (
        not c.return_tuple
    ),
    "transposed_mode: the layout of fused weights is Outpace's own; remove it": lambda c: c.transposed_mode,
    **{
        f"dtype='int8' and quant.scheme='{scheme}' (quantization) both choose the weights; give one": partial(
            _int8_beside, scheme
        )
        for scheme in ("int4", "fp8", "stored", "none")
    },
    "dtype='int8' and quant.weight with another number of bits or enabled=False both choose the weights; give "
    "one": lambda c: is_int8(c) and c.quant is not None and not weighs_int8(c.quant.weight),
    "dtype='int8' and quant.auto or quant.plan both choose the weights; give one": lambda c: (
        is_int8(c) and c.quant is not None and chooses(c.quant)
    ),
    **{message: partial(_of_quant, wrong) for message, wrong in QUANT_COMPOSITIONS.items()},
    "quant.kv_cache_dtype: only fused layers keep keys and values in pages; give replace_with_kernel_inject=True, or "
    "remove it": lambda c: c.kv_cache_dtype != "auto" and not (c.replace_with_kernel_inject or c.injection_policy),
    "tensor_parallel.enabled=False with tensor_parallel.tp_size > 1: enable it, or leave tp_size at 1": lambda c: (
        not c.tensor_parallel.enabled and c.tensor_parallel.tp_size > 1
    ),
    "moe.hot_experts and moe.expert_load go together: the number of copies, and the load that chooses their experts; "
    "give both, or neither": lambda c: bool(c.moe.hot_experts) != (c.moe.expert_load is not None),
    "moe.hot_experts: copies are for ranks that share the experts; give moe.ep_size too, or remove it": lambda c: (
        bool(c.moe.hot_experts) and c.moe.ep_size == 1 and c.moe.ep_group is None
    ),
    "moe.enabled=False with moe.ep_size > 1: enable it, or leave ep_size at 1": lambda c: (
        not c.moe.enabled and c.moe.ep_size > 1
    ),
    "moe.moe_experts and moe.type check what injection finds: give replace_with_kernel_inject=True and leave "
    "moe.enabled on, or remove them": lambda c: (
        changed(c.moe, "moe_experts", "type")
        and not (c.moe.enabled and (c.replace_with_kernel_inject or c.injection_policy))
    ),
    # both may be 1 for a model that does not generate; None is LLM's default
    "min_out_tokens must be smaller than max_out_tokens, which counts the prompt too; raise max_out_tokens": lambda c: (
        c.max_out_tokens is not None and c.min_out_tokens >= max(c.max_out_tokens, 2)
    ),
    "offload with zero: both say where weights live; give one": lambda c: (
        changed(c.offload, *_WEIGHTS, "nvme") and c.zero != type(c.zero)()
    ),
    "zero.stage: 1 and 2 divide gradients and optimizers, which inference lacks; give 3, or remove it": lambda c: (
        c.zero.stage in (1, 2)
    ),
    "zero.stage 3 without zero.offload_param.device: there is nowhere to stream layers from; give cpu or nvme, or "
    "tensor_parallel to divide them over GPUs": lambda c: c.zero.stage == 3 and c.zero.offload_param.device == "none",
    "zero: its fields concern stage 3; give stage 3, or remove them": lambda c: (
        c.zero.stage == 0 and c.zero != type(c.zero)()
    ),
    "zero.offload_param: device nvme and nvme_path go together; give both, or neither": lambda c: (
        (c.zero.offload_param.device == "nvme") != (c.zero.offload_param.nvme_path is not None)
    ),
    "zero.offload_param: buffer_count, buffer_size and max_in_cpu concern device nvme; remove them": lambda c: (
        c.zero.offload_param.device != "nvme"
        and changed(c.zero.offload_param, "buffer_count", "buffer_size", "max_in_cpu")
    ),
    "zero.aio: it concerns zero.offload_param.device nvme; remove it": lambda c: (
        c.zero.offload_param.device != "nvme" and c.zero.aio != type(c.zero.aio)()
    ),
    "zero.aio: single_submit, overlap_events=False and use_gds (GPUDirect Storage) are not supported; "
    "remove them": lambda c: c.zero.aio.single_submit or not c.zero.aio.overlap_events or c.zero.aio.use_gds,
    "offload.cpu_offload_gb with offload.host_memory: both say how much lives in host memory; give one": lambda c: (
        c.offload.cpu_offload_gb > 0 and c.offload.host_memory is not None
    ),
    "offload.slots and offload.expert_cache concern layers that are streamed: turn streaming on with "
    "offload.device_memory or another field, or remove them": lambda c: (
        changed(c.offload, "slots", "expert_cache") and not changed(c.offload, *_WEIGHTS, "nvme")
    ),
    "keep_module_on_host with offload or zero: both say where weights live; give one": lambda c: (
        places_weights(c) and c.keep_module_on_host
    ),
    "checkpoint with checkpoint_config.checkpoint_dir: both say where the weights are; give one": lambda c: (
        c.checkpoint is not None and c.checkpoint_config.checkpoint_dir is not None
    ),
    "base_dir with checkpoint_config.base_dir: both say what names are relative to; give one": lambda c: (
        c.base_dir != "" and c.checkpoint_config.base_dir is not None
    ),
    "save_mp_checkpoint_path with checkpoint_config.save_mp_checkpoint_path: both say where shards go; "
    "give one": lambda c: None not in (c.save_mp_checkpoint_path, c.checkpoint_config.save_mp_checkpoint_path),
    "base_dir, set_empty_params and training_mp_size concern a checkpoint: name it with checkpoint, or remove "
    "them": lambda c: not _names_checkpoint(c) and changed(c, "base_dir", "set_empty_params", "training_mp_size"),
    "checkpoint_config.base_dir concerns a checkpoint: name it with checkpoint, or remove it": lambda c: (
        not _names_checkpoint(c) and c.checkpoint_config.base_dir is not None
    ),
}
"""Combinations that cannot work: error message -> whether a config is wrong in this way."""

INFERENCE_COMPOSITIONS: Mapping[str, Callable[["InferenceConfig"], bool]] = {
    "offload.kv, kv_files, kv_offloading_size and host_pages concern the pages of LLM; "
    "remove them, or use LLM": lambda c: changed(c.offload, *_PAGES),
    "enable_cuda_graph with keep_module_on_host: a graph needs the module on the GPU; turn one of them off": lambda c: (
        c.enable_cuda_graph and c.keep_module_on_host
    ),
    "kernels.linear='tuned' without enable_cuda_graph: products are tuned for graphs; give enable_cuda_graph=True, or "
    "remove it": lambda c: _tunes(c) and not c.enable_cuda_graph,
    "graph_output and max_cuda_graphs concern CUDA graphs: give enable_cuda_graph=True, or remove them": lambda c: (
        not c.enable_cuda_graph and changed(c, "graph_output", "max_cuda_graphs")
    ),
    "injection_policy with replace_with_kernel_inject: a layer is injected by your policy or by ours; "
    "give one": lambda c: c.injection_policy is not None and c.replace_with_kernel_inject,
}
"""The same for `init_inference` only."""

LLM_COMPOSITIONS: Mapping[str, Callable[["LLMConfig"], bool]] = {
    "offload.kv with kv_offloading_size: both say how much host memory pages have; give one": lambda c: (
        bool(c.offload.kv) and c.offload.kv_offloading_size > 0
    ),
    "swap_space with offload.kv or kv_offloading_size: pages of preempted requests are kept in the same memory; "
    "remove swap_space": lambda c: c.cache.swap_space > 0 and _keeps_pages(c),
    "offload.kv_files without offload.kv: pages reach files through host memory; give offload.kv too": lambda c: (
        bool(c.offload.kv_files) and not _keeps_pages(c)
    ),
    "offload.kv_files with several ranks: their pages stay in host memory; remove kv_files": lambda c: (
        bool(c.offload.kv_files) and num_ranks(c) > 1
    ),
    "offload.kv_files without offload.nvme: name the folder of the files in offload.nvme": lambda c: (
        bool(c.offload.kv_files) and c.offload.nvme is None
    ),
    "offload.kv_files with enable_prefix_caching=False: files hold prefixes; "
    "turn it on, or remove kv_files": lambda c: bool(c.offload.kv_files) and not c.cache.enable_prefix_caching,
    "nodes: its fields concern several machines; give nodes.nnodes too, or remove them": lambda c: (
        c.nodes.nnodes == 1 and c.nodes != type(c.nodes)()
    ),
    "nodes.nnodes > 1 without nodes.master_addr: the nodes meet at node 0; give its address": lambda c: (
        c.nodes.nnodes > 1 and c.nodes.master_addr is None
    ),
    "nodes.node_rank: nodes are counted from 0; give one that is smaller than nodes.nnodes": lambda c: (
        c.nodes.node_rank >= c.nodes.nnodes > 1
    ),
    "nodes.nnodes: every node has the same number of ranks; give tensor_parallel_size (or another number of "
    "ranks) that is a multiple of it": lambda c: c.nodes.node_rank == 0 and num_ranks(c) % c.nodes.nnodes > 0,
    "replace_with_kernel_inject=False: LLM runs fused layers over pages; remove it, or use init_inference": lambda c: (
        not c.replace_with_kernel_inject
    ),
    "save_mp_checkpoint_path: LLM writes no shards; run `outpace shard`, or use init_inference": lambda c: (
        (c.save_mp_checkpoint_path, c.checkpoint_config.save_mp_checkpoint_path) != (None, None)
    ),
    "keep_module_on_host: LLM runs the model where it is; remove it, or give device='cpu'": lambda c: (
        c.keep_module_on_host
    ),
    "graph_output and max_cuda_graphs concern graphs of `forward`, which LLM does not call; remove them": lambda c: (
        changed(c, "graph_output", "max_cuda_graphs")
    ),
    "min_out_tokens: LLM takes it for each request; remove it, and give SamplingParams(min_tokens=...)": lambda c: (
        changed(c, "min_out_tokens")
    ),
    "kernels.linear='tuned' with enforce_eager=True or enable_cuda_graph=False: products are tuned for graphs; remove "
    "one": lambda c: _tunes(c) and (c.enforce_eager is True or c.enable_cuda_graph is False),
    "enforce_eager and enable_cuda_graph have the same value and opposite meanings; give one": lambda c: (
        c.enforce_eager is not None and c.enforce_eager == c.enable_cuda_graph
    ),
    "scheduler.max_num_batched_tokens is below scheduler.max_num_seqs: a step needs a token for each request; raise "
    "it, or lower max_num_seqs": lambda c: (
        (c.scheduler.max_num_batched_tokens or c.scheduler.max_num_seqs) < c.scheduler.max_num_seqs
    ),
    "scheduler.target_step_ms: steps are timed on a GPU only, and the model runs on a CPU; give "
    "scheduler.max_num_batched_tokens instead": lambda c: (
        c.scheduler.target_step_ms is not None and c.device_type == "cpu"
    ),
    "cache.num_blocks with cache.gpu_memory_utilization or cache.cpu_cache_space: both say how many pages there are; "
    "give one": lambda c: (
        c.cache.num_blocks is not None and changed(c.cache, "gpu_memory_utilization", "cpu_cache_space")
    ),
    "cache.gpu_memory_utilization: the model runs on a CPU; give cache.cpu_cache_space instead": lambda c: (
        changed(c.cache, "gpu_memory_utilization") and c.device_type == "cpu"
    ),
    "cache.cpu_cache_space: the model runs on a GPU; give cache.gpu_memory_utilization instead": lambda c: (
        changed(c.cache, "cpu_cache_space") and c.device_type == "cuda"
    ),
}
"""The same for `LLM` only."""
