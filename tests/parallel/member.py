"""A world of ranks that runs cases and says what was wrong with each: python -m tests.parallel.member < CASES."""

import copy
import datetime
import json
import logging
import os
import pickle
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import outpace
from outpace.inject.modules import FusedLayer
from tests.inject.checks import padded_prompts
from tests.inject.own_mixtures import WIDTH
from tests.offload.placed import deep
from tests.parallel import staged
from tests.parallel.engines import (
    NEW,
    TOLERANCE,
    Button,
    Shown,
    engine_of,
    folder_of,
    largest,
    model_of,
    of_first,
    same_logits,
    stored,
)  # fmt: skip
from tests.parallel.steps import tokens_alone, tokens_over_ranks


def compare(name: str, options: Mapping[str, Any]) -> None:
    """Logits and tokens of an engine over all ranks, beside those of Hugging Face, or of an engine in one process."""
    model, inputs = model_of(name), padded_prompts(97)
    plain, size = copy.deepcopy(model), stored(model)
    engine = engine_of(model, options)
    if plain.config.is_encoder_decoder:
        inputs = {**inputs, "decoder_input_ids": inputs["input_ids"][:, :5]}
    with torch.no_grad():
        same_logits(engine, plain, inputs, of_first(lambda: plain(**inputs).logits))
    assert largest(engine) < size, "a rank has all weights"
    if not hasattr(plain, "generate") or not plain.can_generate():
        return
    inputs.pop("decoder_input_ids", None)
    greedy = {"max_new_tokens": NEW, "do_sample": False}
    want = of_first(lambda: plain.generate(**inputs, **greedy))
    assert torch.equal(engine.generate(**inputs, **greedy), want), "greedy tokens differ"
    sampled = {"max_new_tokens": NEW, "do_sample": True, "top_k": 20, "seed": 3}
    tokens = engine.generate(**inputs, **sampled)
    every = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tokens)
    assert all(torch.equal(tokens, other) for other in every), "ranks have sampled different tokens"
    if dist.get_rank() == 0:
        alone = engine_of(plain, {key: options[key] for key in ("replace_with_kernel_inject",) if key in options})
        assert torch.equal(tokens, alone.generate(**inputs, **sampled)), "one process samples other tokens"


def quantized(name: str, options: Mapping[str, Any]) -> None:
    """As near to the plain model as one process with the same scheme: scales of cut rows are each rank's own."""
    model, inputs = model_of(name), padded_prompts(97)
    plain, size = copy.deepcopy(model), stored(model)
    alone = engine_of(copy.deepcopy(model), {"quant": options["quant"]})
    engine = engine_of(model, options)
    keep = inputs["attention_mask"].bool()
    with torch.no_grad():
        want, theirs, ours = (each(**inputs).logits[keep] for each in (plain, alone, engine))
    errors = [(found - want).norm(dim=1).median().item() for found in (theirs, ours)]
    assert errors[1] <= 1.5 * errors[0], f"errors are {errors[1]:.1e}, those of one process {errors[0]:.1e}"
    assert largest(engine) < 0.3 * size, "a rank has all weights, or they are not quantized"


def copies(name: str, options: Mapping[str, Any]) -> None:
    """Ranks with prompts of their own, and answers of different lengths."""
    model, rank = model_of(name), dist.get_rank()
    tp = options.get("tensor_parallel", {}).get("tp_size", 1)
    stages = options.get("pipeline_parallel", {}).get("pp_size", 1)
    own = rank % (dist.get_world_size() // stages) // tp
    inputs = padded_prompts(97, batch=2 + own % 2, length=9 + own, seed=own)
    plain = copy.deepcopy(model)
    engine = engine_of(model, options)
    same_logits(engine, plain, inputs)
    more = {"max_new_tokens": 3 + 2 * own, "do_sample": False}
    assert torch.equal(engine.generate(**inputs, **more), plain.generate(**inputs, **more)), "greedy tokens differ"


def grain(name: str, options: Mapping[str, Any]) -> None:
    """Parts of the MLP are multiples of the grain."""
    engine = engine_of(model_of(name), options)
    size = options["tensor_parallel"]["tp_grain_size"]
    layers = [layer for layer in engine.module.modules() if isinstance(layer, FusedLayer)]
    widths = {layer.up.out_features // 2 for layer in layers if layer.up is not None}
    assert widths, "there are layers"
    assert all(width % size == 0 for width in widths), widths


class Unit:
    """As Megatron's."""

    def get_tensor_model_parallel_group(self) -> Any:
        """All ranks."""
        return dist.group.WORLD


def own_groups(name: str, options: Mapping[str, Any]) -> None:
    """A group, and a model-parallel unit, that the caller brings; two engines with different groups in one process."""
    for given in ({"tp_group": dist.group.WORLD}, {"mpu": Unit()}):
        model = model_of(name)
        plain = copy.deepcopy(model)
        same_logits(engine_of(model, {"tensor_parallel": given}), plain, padded_prompts(97))
    alone = dist.new_subgroups(1)[0]
    model = model_of(name)
    plain = copy.deepcopy(model)
    same_logits(engine_of(model, {"tensor_parallel": {"tp_group": alone}}), plain, padded_prompts(97))


def sliced_experts(name: str, options: Mapping[str, Any]) -> None:
    """Experts over one group, each of them over another: ranks 0 and 1 have the same tokens, as 2 and 3 do."""
    ranks = dist.get_world_size()
    across = [dist.new_group([rank, rank + 2]) for rank in range(ranks // 2)]
    beside = [dist.new_group([rank, rank + 1]) for rank in range(0, ranks, 2)]
    mine = dist.get_rank()
    moe = {"ep_group": across[mine % 2], "ep_mp_group": beside[mine // 2]}
    model = model_of(name)
    plain = copy.deepcopy(model)
    same_logits(engine_of(model, {**options, "moe": moe}), plain, padded_prompts(97))


def checkpoint(name: str, options: Mapping[str, Any]) -> None:
    """A folder, of which each rank reads its part: the same logits, and fewer bytes."""
    model = model_of(name)
    folder = folder_of(model)
    shards = f"{folder}/shards"
    for given in ({"checkpoint": folder, "save_mp_checkpoint_path": shards}, {"checkpoint": shards}):
        with outpace.OnDevice("meta"):
            empty = type(model)(model.config)
        engine = engine_of(empty, {**options, **given})
        same_logits(engine, model, padded_prompts(97))
    with pytest.raises(outpace.OutpaceError, match="save_mp_checkpoint_path"):
        engine_of(model_of(name), {**options, "save_mp_checkpoint_path": f"{folder}/config.json"})
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def streamed(name: str, options: Mapping[str, Any]) -> None:
    """Each rank streams its part: the bits of resident ranks, the tokens of one process, and a file of each rank."""
    model, inputs = deep(name), padded_prompts(97)
    folder = folder_of(model)
    files = Path(folder) / "files"
    files.mkdir(exist_ok=True)
    wanted = engine_of(copy.deepcopy(model), options)(**inputs).logits
    more = {"max_new_tokens": NEW, "do_sample": False}
    tokens = model.generate(**inputs, **more)
    kept = []
    for place in ("host", "disk", "disk"):
        given: dict[str, Any] = {"offload": {"cpu_offload_gb": 1.0}}
        if place == "disk":
            within = {"device": "nvme", "nvme_path": str(files), "max_in_cpu": 0}
            given = {"zero": {"stage": 3, "offload_param": within, "max_live_parameters": 0}}
            given["zero"] |= {"param_persistence_threshold": 0, "prefetch_bucket_size": 1000}
        with outpace.OnDevice("meta"):
            empty = type(model)(model.config)
        engine = engine_of(empty, {**options, **given, "checkpoint": folder})
        assert engine.streaming is not None, "its layers stay"
        for _ in range(2):
            assert torch.equal(engine(**inputs).logits, wanted), "logits are not those of resident layers"
        assert torch.equal(engine.generate(**inputs, **more), tokens), "greedy tokens differ"
        engine.destroy()
        dist.barrier()
        kept.append({path.name: path.stat().st_mtime_ns for path in files.iterdir()} if files.exists() else {})
    found = tokens_over_ranks(Path(folder), {**options, "offload": {"cpu_offload_gb": 1.0, "kv": "1MB"}})
    dist.barrier()
    if dist.get_rank() == 0:
        assert found == tokens_alone(Path(folder)), "LLM has other tokens than one process"
        shutil.rmtree(folder)
    assert len(kept[1]) == dist.get_world_size(), f"a file for each rank, not {sorted(kept[1])}"
    assert kept[1] == kept[2], "files are written again"


def streamed_badly(name: str, options: Mapping[str, Any]) -> None:
    """A rank whose folder is no folder fails, and the others with it."""
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryDirectory() as folder:
        bad = dist.get_rank() == 1
        offload = {"device_memory": 10**9, "nvme": file.name if bad else folder}
        with pytest.raises(outpace.OutpaceError) as caught:
            engine_of(deep(name), {**options, "offload": offload})
        assert ("is not a folder" if bad else "another rank cannot place its layers") in str(caught.value)


def on_a_gpu(name: str, options: Mapping[str, Any]) -> None:
    """All ranks on one GPU: fp32 as one process has it, bf16 as near to fp32 as one process is."""
    inputs = {key: value.cuda() for key, value in padded_prompts(97).items()}
    more = {"max_new_tokens": NEW, "do_sample": False}
    logits, tokens = {}, {}
    for dtype in ("fp32", "bf16"):
        for ranks, given in (("all", options), ("one", {})):
            engine = outpace.init_inference(
                model_of(name), dtype=dtype, replace_with_kernel_inject=True, device="cuda", **given
            )
            logits[dtype, ranks] = engine(**inputs).logits[inputs["attention_mask"].bool()].double()
            tokens[dtype, ranks] = engine.generate(**inputs, **more)
    want = logits["fp32", "one"]
    error = ((logits["fp32", "all"] - want).abs().max() / want.abs().max()).item()
    assert error <= 10 * TOLERANCE, f"logits differ by {error:.1e} in fp32"
    assert torch.equal(tokens["fp32", "all"], tokens["fp32", "one"]), "greedy tokens differ in fp32"
    ours, theirs = ((logits["bf16", ranks] - want).norm(dim=1).median().item() for ranks in ("all", "one"))
    assert ours <= 1.5 * theirs, f"errors in bf16 are {ours:.1e}, those of one process {theirs:.1e}"


def own_mixture(name: str, options: Mapping[str, Any]) -> None:
    """Somebody's module with experts, each rank with rows of its own where they exchange them."""
    model = model_of(name)
    plain, size = copy.deepcopy(model), stored(model)
    engine = engine_of(model, options)
    rank = dist.get_rank() if "tensor_parallel" not in options else 0
    x = torch.randn(2 + rank, 5, WIDTH, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        want, found = plain(x), engine(x)
    assert (found - want).abs().max() <= TOLERANCE * want.abs().max(), "results differ"
    assert largest(engine) < size, "a rank has all weights"


class NoUnit:
    """Megatron's before it is initialized."""

    def __init__(self, *, asserts: bool) -> None:
        self.asserts = asserts

    def get_model_parallel_group(self) -> None:
        """There is none."""
        assert not self.asserts, "model parallel group is not initialized"


def calls(name: str, options: Mapping[str, Any]) -> None:
    """What is another call on another rank is refused on all of them; what only one of them may have works."""
    engine, ids, rank = engine_of(model_of(name), options), padded_prompts(97)["input_ids"][:1], dist.get_rank()
    more = {"max_new_tokens": 6, "do_sample": False}
    want = engine.generate(ids, **more)
    shown = Shown()
    assert torch.equal(engine.generate(ids, **more, **({"streamer": shown} if rank == 0 else {})), want)
    assert shown.tokens == (want[0].tolist() if rank == 0 else [])
    end = ids.shape[1] + 2
    button = engine.generate(ids, **more, stopping_criteria=[Button(end, pressed=rank == 0)])
    assert torch.equal(button, want[:, :end]), "the first rank's button counts, and no other's"
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: engine.generate(ids + rank, **more), "generate: the ranks .* make different calls"),
        (lambda: engine.generate(ids, **{**more, "max_new_tokens": 6 + rank}), "make different calls"),
        (lambda: engine.generate(ids, max_new_tokens=3, do_sample=True, seed=rank), "make different calls"),
        (lambda: engine(ids[:, rank:]), "forward: the ranks .* make different calls"),
        (lambda: engine.generate(ids) if rank else engine(ids), "make different calls"),
        (lambda: engine.generate(ids, **more, max_time=9.0), "max_time: ranks would stop"),
        (lambda: pickle.dumps(engine.mesh.together), "pickle: .* save_mp_checkpoint_path"),
        (lambda: engine_of(model_of(name), {"tensor_parallel": {"mpu": NoUnit(asserts=False)}}), "mpu: this rank is"),
        (lambda: engine_of(model_of(name), {"tensor_parallel": {"mpu": NoUnit(asserts=True)}}), "mpu: .*not initial"),
    ]
    for call, says in wrong:
        with pytest.raises(outpace.OutpaceError, match=says):
            call()
    torch.testing.assert_close(copy.deepcopy(engine.module)(ids).logits, engine(ids).logits)


def refused(name: str, options: Mapping[str, Any]) -> None:
    """An error of Outpace that says this."""
    with pytest.raises(outpace.OutpaceError, match=options["says"]):
        engine_of(model_of(name), {key: value for key, value in options.items() if key != "says"})


class Lines(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.lines.append(record.getMessage())


def logged(name: str, options: Mapping[str, Any]) -> None:
    """Lines of the log, each once."""
    lines, logger = Lines(), logging.getLogger("outpace")
    before = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        engine_of(model_of(name), {key: value for key, value in options.items() if key != "says"})
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)
    for text in options["says"]:
        found = [line for line in lines.lines if re.search(text, line)]
        assert len(found) == 1, (text, lines.lines)


def llm(name: str, options: Mapping[str, Any]) -> None:
    """Tokens of `LLM`'s engine over all ranks, greedy and drawn, are those of one rank."""
    folder = Path(folder_of(model_of(name)))
    found = tokens_over_ranks(folder, dict(options))
    dist.barrier()
    if dist.get_rank() == 0:
        precise = ("quantization", "kv_cache_dtype", "deterministic")
        want = tokens_alone(folder, {key: options[key] for key in precise if key in options})
        shutil.rmtree(folder)
        assert found == want, f"tokens differ: {found} instead of {want}"


_ALL = (
    compare, llm, quantized, copies, grain, own_groups, sliced_experts, checkpoint, on_a_gpu, own_mixture, refused,
    logged, calls, streamed, streamed_badly, *staged.KINDS,
)  # fmt: skip
KINDS: Mapping[str, Callable[..., None]] = {kind.__name__: kind for kind in _ALL}


def fork_ranks() -> None:
    """Fork all ranks but the first; in each process RANK is set afterwards. The others are silent."""
    os.environ["RANK"] = "0"
    for rank in range(1, int(os.environ["WORLD_SIZE"])):
        if os.fork() == 0:
            os.environ["RANK"] = str(rank)
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            return


def main() -> None:
    """Run the cases of a file; the first rank prints a line of JSON for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = json.load(sys.stdin)
    fork_ranks()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    for case in cases:
        problem = None
        try:
            KINDS[case["kind"]](case["name"], case["options"])
        except (Exception, pytest.fail.Exception):
            problem = traceback.format_exc(limit=-6)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, problem)
        if dist.get_rank() == 0:
            wrong = [f"rank {rank}: {text}" for rank, text in enumerate(every) if text]
            print(json.dumps([case["name"], "\n".join(wrong)]), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads need not be waited for


if __name__ == "__main__":
    main()
