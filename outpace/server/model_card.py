"""What the engine process sends to the server about a loaded model: its card, and the status before any request."""

import time

from outpace.llm_engine import LLMEngine
from outpace.load_paged import PagedParts
from outpace.loading.inspect import embedding_sizes
from outpace.server.engine import EngineStatus, ModelCard


def model_card(engine: LLMEngine, parts: PagedParts) -> ModelCard:
    """The model, and what requests may ask of it."""
    return ModelCard(
        name=parts.name,
        max_model_len=engine.max_model_len,
        vocab_size=parts.vocab_size or 0,
        eos_token_ids=parts.eos_token_ids,
        dtype=str(parts.dtype).removeprefix("torch."),
        quantization=None if parts.quantized is None else "; ".join(parts.quantized.schemes),
        device=str(parts.device),
        created=int(time.time()),
        sampling=dict(parts.sampling),
        max_logprobs=engine.max_logprobs,
        embedding_sizes=embedding_sizes(parts.module),
        weight_bytes=parts.weight_bytes,
    )


def fixed_status(engine: LLMEngine, parts: PagedParts) -> EngineStatus:
    """The status before any request."""
    num_blocks, cache = engine.scheduler.pool.num_blocks, parts.config.cache
    tokens = num_blocks * cache.block_size
    return EngineStatus(
        free_blocks=num_blocks,
        num_blocks=num_blocks,
        step_limit_ms=None if engine.step_seconds is None else 1e3 * engine.step_seconds,
        cache_config={
            "kv_cache_size_tokens": str(tokens),
            "kv_cache_max_concurrency": f"{tokens / engine.max_model_len:.2f}",
            "block_size": str(cache.block_size),
            "cache_dtype": parts.config.kv_cache_dtype,
            "num_gpu_blocks": str(num_blocks),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
        },
        expert_layers=[] if engine.experts is None else list(engine.experts.layers),
        nodes=engine.ranks.nodes,
    )
