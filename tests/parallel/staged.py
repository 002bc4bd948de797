"""Cases of a world whose ranks are the stages of a pipeline: see `member`."""

import copy
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import outpace
from outpace import LLM, SamplingParams
from outpace.llm_engine import LLMEngine
from outpace.offload.units import find_layers
from outpace.types import Step, Way
from tests.inject.checks import padded_prompts
from tests.parallel.engines import (
    NEW,
    TOLERANCE,
    engine_of,
    folder_of,
    gathered,
    model_of,
    of_first,
    same_logits,
    stored,
)
from tests.parallel.steps import over_ranks

INJECTED = "replace_with_kernel_inject"


def near(found: Tensor, want: Tensor) -> None:
    """Up to the last bits."""
    error = ((found - want).abs().max() / want.abs().max()).item()
    assert error <= TOLERANCE, f"results differ by {error:.1e}"


def marks(model: nn.Module) -> list[list[float]]:
    """What tells each layer from the others: sums of its weights."""
    return [[each.double().sum().item() for each in layer.parameters()] for _, layer in find_layers(model)]


def held(name: str, options: Mapping[str, Any]) -> None:
    """From a folder: a stage has its layers, and no others, and the caller's config stays as it is."""
    model = model_of(name)
    folder, layers = folder_of(model), model.config.num_hidden_layers
    with outpace.OnDevice("meta"):
        empty = type(model)(model.config)
    engine = engine_of(empty, {**options, "checkpoint": folder})
    alone = {key: options[key] for key in (INJECTED,) if key in options}
    whole = engine_of(copy.deepcopy(model), alone)
    every = gathered((engine.mesh.stage.number, marks(engine.module), stored(engine.module)))
    assert [mark for _, own, _ in sorted(every) for mark in own] == marks(whole.module), "each layer in one stage"
    assert max(size for _, _, size in every) < stored(model), "a rank has all weights"
    tied = stored(model.get_input_embeddings()) if model.config.tie_word_embeddings else 0
    tables = stored(model.get_input_embeddings()) + stored(model.get_output_embeddings()) - tied
    rest = stored(model) - tables - sum(stored(layer) for _, layer in find_layers(model))
    sizes = sum(size for _, _, size in every)
    assert sizes == stored(model) + tied + (len(every) - 1) * rest, "of layers and tables, what is needed where it is"
    if (asked := options["pipeline_parallel"].get("layers")) is not None:
        assert [len(own) for _, own, _ in sorted(every)] == asked
    assert engine.module.config is not model.config
    assert model.config.num_hidden_layers == layers
    same_logits(engine, model, padded_prompts(97))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def forwards(name: str, options: Mapping[str, Any]) -> None:
    """Batches of several sizes, with a cache that a following call goes on with, and without."""
    model = model_of(name)
    plain = copy.deepcopy(model)
    engine = engine_of(model, options)
    for rows in (1, 3, 5):
        inputs = padded_prompts(97, batch=rows)
        keep = inputs["attention_mask"].bool()
        with torch.no_grad():
            want = plain(**inputs, use_cache=True)
            found = engine(**inputs, use_cache=True)
            near(found.logits[keep], want.logits[keep])
            ids = want.logits[:, -1:].argmax(-1)
            mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids)], 1)
            for given in (want, found):
                given.next = {"attention_mask": mask, "past_key_values": given.past_key_values}
            near(engine(ids, **found.next).logits, plain(ids, **want.next).logits)
            assert found.past_key_values.get_seq_length() == mask.shape[1]
            without = engine(inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False)
            assert without.past_key_values is None
            near(without.logits[keep], want.logits[keep])
            labels = {"labels": inputs["input_ids"]}
            near(engine(**inputs, **labels).loss, plain(**inputs, **labels).loss)
            near(engine(**inputs, return_dict=False)[0][keep], want.logits[keep])
    for asked in ("output_hidden_states", "output_attentions", "output_router_logits"):
        with pytest.raises(outpace.NotSupported, match=rf"{asked}: (no stage|fused layers keep)"):
            engine(padded_prompts(97)["input_ids"], **{asked: True})
    engine.module.config.output_hidden_states = True
    with pytest.raises(outpace.NotSupported, match="output_hidden_states: no stage"):
        engine(padded_prompts(97)["input_ids"])
    engine.module.config.output_hidden_states = False


CALLS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"do_sample": False},
    "an end": {"do_sample": False, "eos_token_id": list(range(3, 50, 4)), "pad_token_id": 1},
    "processors": {"do_sample": False, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "no cache": {"do_sample": False, "use_cache": False},
}
DRAWN: Mapping[str, Any] = {"do_sample": True, "top_k": 20, "seed": 3, "num_return_sequences": 2}


def fails(name: str, options: Mapping[str, Any]) -> None:
    """An error in one stage is an error on all ranks, and the engine works afterwards."""
    model = model_of(name)
    plain = copy.deepcopy(model)
    engine, inputs = engine_of(model, options), padded_prompts(97)
    stage, layers = engine.mesh.stage, [layer for _, layer in find_layers(engine.module)]

    def broken(*_: object) -> None:
        raise ZeroDivisionError("in one stage")

    for number in range(stage.count):
        hook = layers[-1].register_forward_pre_hook(broken) if stage.number == number else None
        kind: Any = ZeroDivisionError if hook is not None else outpace.ModelError
        with pytest.raises(kind, match=r"in one stage|another stage of the pipeline failed"):
            engine(**inputs)
        if hook is not None:
            hook.remove()
        same_logits(engine, plain, inputs)
    with pytest.raises((IndexError, outpace.ModelError)):
        engine(input_ids=inputs["input_ids"] + 100_000)
    same_logits(engine, plain, inputs)


def generates(name: str, options: Mapping[str, Any]) -> None:
    """Tokens of all kinds of calls are Hugging Face's, for batches that divide well and badly."""
    model = model_of(name)
    plain = copy.deepcopy(model)
    engine = engine_of(model, options)
    alone = engine_of(copy.deepcopy(plain), {key: options[key] for key in (INJECTED,) if key in options})
    for rows in (1, 4, 5):
        inputs = padded_prompts(97, batch=rows, length=14)
        calls = {kind: (plain, call) for kind, call in CALLS.items()} | {"drawn": (alone, DRAWN)}
        for kind, (other, call) in calls.items():
            found = engine.generate(**inputs, **call, max_new_tokens=NEW)
            want = of_first(partial(other.generate, **inputs, **call, max_new_tokens=NEW))
            assert torch.equal(found, want), f"{kind}, {rows} rows: {found.tolist()} instead of {want.tolist()}"
    more = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 4}
    found, want = (each.generate(**inputs, **more) for each in (engine, plain))
    assert torch.equal(found.sequences, want.sequences)
    for ours, theirs in zip(found.logits, want.logits, strict=True):
        near(ours, theirs)


SMALL: Mapping[str, Any] = {"device": "cpu", "dtype": "fp32", "max_model_len": 60, "num_blocks": 6, "block_size": 16}
WIDE: Mapping[str, Any] = {**SMALL, "num_blocks": 200, "max_num_seqs": 32, "max_num_batched_tokens": 32}
MIXED = (
    SamplingParams(temperature=0, max_tokens=36, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=5, n=2, max_tokens=16, ignore_eos=True, repetition_penalty=1.2),
)


def asked(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests, of which every third begins with the same 16 tokens."""
    shared = list(range(20, 36))
    return [
        (shared + [40 + number] * (number % 5 + 1) if number % 3 == 0 else [5 + number] * (3 + number % 7),
         MIXED[number // 2 % len(MIXED)])
        for number in range(count)
    ]  # fmt: skip


def answered(engine: LLMEngine, count: int) -> list[list[list[int]]]:
    """All at once."""
    outputs = [engine.add_request(str(number), *request) for number, request in enumerate(asked(count))]
    while engine.has_unfinished_requests:
        engine.step()
        engine.scheduler.assert_consistent()
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def alone(folder: Path, count: int) -> list[list[list[int]]]:
    """One rank, with room for everything."""
    prompts, params = (list(each) for each in zip(*asked(count), strict=True))
    with LLM(folder, **WIDE) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def crowd(name: str, options: Mapping[str, Any]) -> None:
    """Requests that need ten times the pages there are give way, share prefixes, and have the tokens of one rank."""
    folder, count = Path(folder_of(model_of(name))), 30

    def ask(engine: LLMEngine) -> list[list[list[int]]]:
        found, totals = answered(engine, count), engine.totals
        needed = sum(-(-(len(prompt) + (params.max_tokens or 0)) // 16) * params.n for prompt, params in asked(count))
        assert needed >= 10 * SMALL["num_blocks"]
        assert totals.preemptions > 0, "nobody gave way"
        assert totals.prefix_hits > 0, "no prefix was shared"
        if {"swap_space", "kv_offloading_size"} & options.keys():
            assert totals.tiers.copied[Way.LOAD] > 0, "nothing came back from host memory"
        assert engine.scheduler.pool.num_free == SMALL["num_blocks"], "pages are left behind"
        return found

    found = over_ranks(folder, {**SMALL, **options}, ask)
    if dist.get_rank() == 0:
        want = alone(folder, count)
        shutil.rmtree(folder)
        assert found == want, [pair for pair in zip(found or [], want, strict=True) if pair[0] != pair[1]][:3]


def in_flight(name: str, options: Mapping[str, Any]) -> None:
    """While there is work for all, each stage has a step: the last one launches none before as many are in flight."""
    folder, count, stages = Path(folder_of(model_of(name))), 24, options["pipeline_parallel_size"]
    seen: list[tuple[int, int]] = []

    def ask(engine: LLMEngine) -> list[list[list[int]]]:
        launch = engine._runner.launch

        def watched(step: Step) -> Any:
            flying = sum(bool(some) for _, some, _ in engine.scheduler._in_flight)
            seen.append((flying, engine.scheduler.num_running))
            return launch(step)

        engine._runner.launch = watched  # type: ignore[method-assign]
        return answered(engine, count)

    found = over_ranks(folder, {**WIDE, **options}, ask)
    if dist.get_rank() == 0:
        want = alone(folder, count)
        shutil.rmtree(folder)
        assert found == want
        busy = [flying for flying, running in seen if running >= 2 * stages]
        assert len(busy) > 10, seen
        assert min(busy) >= stages, seen


KINDS = (held, forwards, fails, generates, crowd, in_flight)
