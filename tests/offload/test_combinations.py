"""Streamed layers beside every other capability: exactly what the resident model gives, or a refusal by name."""

import copy
import functools
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Kind
from torch import nn

import outpace
from outpace import LLM, ConfigError, NotSupported, RaggedEngine, SamplingParams, StateError, StructuredOutputs
from tests.inject.families import made as level_0
from tests.loading.packers import write_folder
from tests.loading.tiny import tiny_model, write_gguf
from tests.models import byte_tokenizer, padded, prompts
from tests.offload.placed import LAYERS, deep

GREEDY: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "ignore_eos": True, "logprobs": 3}
TEXTS = [prompt.tolist() for prompt in prompts(5, 12, 3)]
PLACES = ("host", "disk", "mixed")
PAGE = 16
TOKENIZER: Any = byte_tokenizer()


def placed(place: str, folder: Path) -> dict[str, Any]:
    """Options that stream every layer from there, whatever its size, two at a time on the device."""
    if place == "host":
        return {"offload": {"cpu_offload_gb": 1.0}}
    within = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 30_000 if place == "mixed" else 0}
    zero = {"stage": 3, "offload_param": within, "max_live_parameters": 0, "param_persistence_threshold": 0}
    return {"zero": {**zero, "prefetch_bucket_size": 1000}}


def answers(llm: LLM, **more: Any) -> Any:
    outputs = llm.generate(TEXTS, SamplingParams(**{**GREEDY, **more}), use_tqdm=False)
    return [[(each.token_ids, each.logprobs) for each in output.outputs] for output in outputs]


def twice(llm: LLM) -> Any:
    """The second time from the prefix cache."""
    texts, params = [[5, *range(3, 40)], [5, *range(3, 30)]], SamplingParams(**GREEDY)
    outputs = [output for _ in range(2) for output in llm.generate(texts, params, use_tqdm=False)]
    assert llm.engine.totals.prefix_hits > 0
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def crowded(llm: LLM) -> Any:
    """Ten times as many keys and values as there are pages."""
    texts = [[3 + number, *range(5, 5 + number)] for number in range(16)]
    outputs = llm.generate(texts, SamplingParams(**{**GREEDY, "max_tokens": 18, "logprobs": None}), use_tqdm=False)
    assert llm.engine.totals.preemptions > 0
    return [output.outputs[0].token_ids for output in outputs]


def evicted(llm: LLM) -> Any:
    """Prefixes that come back from host memory."""
    found, params = [], SamplingParams(**GREEDY)
    for start in (3, 9, 15, 3, 9, 15):
        (output,) = llm.generate([[start] * 40], params, use_tqdm=False)
        found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert llm.engine.totals.tiers.host_hits > 0
    return found


def structured(llm: LLM) -> Any:
    held = SamplingParams(max_tokens=12, temperature=0, structured_outputs=StructuredOutputs(regex="[a-c]{3}[0-9]+"))
    return [each.outputs[0].token_ids for each in llm.generate(["hello", "x"], [held, held], use_tqdm=False)]


def drawn(llm: LLM) -> Any:
    return answers(llm, temperature=0.9, top_k=20, top_p=0.9, seed=3, presence_penalty=0.4, logprobs=5)


def of_prompts(llm: LLM) -> Any:
    outputs = llm.generate(TEXTS, SamplingParams(**{**GREEDY, "prompt_logprobs": 2}), use_tqdm=False)
    return [output.prompt_logprobs for output in outputs]


def vectors(llm: LLM) -> Any:
    return [each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)]


def loads(llm: LLM) -> Any:
    return [answers(llm), llm.expert_load().tolist()]


def turns(llm: LLM) -> Any:
    return [llm.chat([{"role": "user", "content": "ab"}], SamplingParams(**GREEDY), use_tqdm=False)[0].outputs[0].text]


def words(**changes: Any) -> Any:
    """A model that says bytes."""
    return deep("llama", vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id, **changes)


def wide() -> Any:
    return deep("llama", hidden_size=64, intermediate_size=128)


def no_policy() -> Any:
    return level_0("Olmo3", {**OLMO, "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]})


OLMO: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": LAYERS, "sliding_window": 5,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A capability: what the model is, which options turn it on, and what is compared."""

    ask: Callable[[LLM], Any] = answers
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], Any] = lambda: deep("llama")
    places: tuple[str, ...] = PLACES

    @property
    def all_options(self) -> dict[str, Any]:
        """Those of every case too."""
        return {"device": "cpu", "num_blocks": 32, **self.options}


SMALL: dict[str, Any] = {"num_blocks": 3, "block_size": PAGE, "max_num_seqs": 8}
SPOKEN: dict[str, Any] = {"tokenizer": TOKENIZER}
CASES = {
    "prefix cache": Case(twice, {"block_size": PAGE}),
    "preemption": Case(crowded, SMALL, places=("host", "disk")),
    "preemption, swap": Case(crowded, {**SMALL, "swap_space": 0.01}, places=("mixed",)),
    "kv tier": Case(evicted, {**SMALL, "num_blocks": 4, "offload": {"kv": "1MB"}}),
    "kv tier, preemption": Case(crowded, {**SMALL, "offload": {"kv": "1MB"}}, places=("host",)),
    "host pages": Case(answers, {"block_size": PAGE, "offload": {"host_pages": "1MB"}}),
    "structured": Case(structured, SPOKEN, words),
    "chat": Case(turns, SPOKEN, words),
    "sampling": Case(drawn),
    "several answers": Case(lambda llm: answers(llm, n=3, temperature=1.0, seed=5)),
    "deterministic": Case(answers, {"deterministic": True}),
    "int8": Case(answers, {"quantization": "int8"}, wide),
    "int4": Case(answers, {"quantization": "int4"}, wide),
    "w8a8": Case(answers, {"quantization": "w8a8"}, wide),
    "int8 pages": Case(answers, {"kv_cache_dtype": "int8"}, wide),
    "bf16": Case(answers, {"dtype": "bf16"}),
    "log-probabilities of prompts": Case(of_prompts),
    "vectors": Case(vectors, {"max_num_batched_tokens": 4, "max_num_seqs": 3}),
    "in turn": Case(answers, {"async_scheduling": False}),
    "ahead": Case(answers, {"async_scheduling": True}),
    "small steps": Case(answers, {"max_num_batched_tokens": 4, "max_num_seqs": 3}),
    "level 0": Case(answers, {}, no_policy),
    "expert load": Case(loads, {}, lambda: deep("mixtral")),
    "tied layers": Case(answers, {}, lambda: deep("gemma3")),
}


def together(options: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Both, where both say something of offload."""
    found = {**options, **more}
    if "offload" in options and "offload" in more:
        found["offload"] = {**options["offload"], **more["offload"]}
    return found


@functools.cache
def resident(name: str) -> Any:
    """What a case gives where all layers stay."""
    with LLM(CASES[name].make(), **CASES[name].all_options) as llm:
        assert llm.engine.streaming is None
        return CASES[name].ask(llm)


@pytest.mark.parametrize(("name", "place"), [(name, place) for name, case in CASES.items() for place in case.places])
def test_n8_every_capability_gives_what_the_resident_model_gives(name: str, place: str, tmp_path: Path) -> None:
    case, wanted = CASES[name], resident(name)
    with LLM(case.make(), **together(case.all_options, placed(place, tmp_path))) as llm:
        streaming = llm.engine.streaming
        assert streaming is not None
        assert streaming.placement.tiers.count("device") == 0
        assert case.ask(llm) == wanted
        assert streaming.counts.loads > 2 * len(streaming.units), "layers were evicted, and came again"
    assert not any(tmp_path.iterdir())


class Pairs(nn.Module):
    """Layers that are lists of two modules, as many people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)]) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs: Any = self.layers
        for linear, norm in pairs:
            x = x + norm(linear(x))
        return x


class Indexed(nn.Module):
    """Layers whose parts are called one by one, and not the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks: Any = reversed(self.blocks)  # and in another order
        for block in blocks:
            x = x + block[2](block[1](block[0](x)))
        return x


class Shared(nn.Module):
    """Layers with a module that they share, and a list of the same layers in another order."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), norm) for _ in range(5))
        self.again = nn.ModuleList(reversed(list(self.layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.again):
            x = x + layer(x)
        return x


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [Pairs, Indexed, Shared, torch_encoder])
def test_modules_of_others_however_they_call_their_layers(make: Any, place: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(2, 3, 8)
    with torch.no_grad():
        wanted = copy.deepcopy(model)(x)
    engine = outpace.init_inference(model, device="cpu", **placed(place, tmp_path))
    assert engine.streaming is not None
    for _ in range(2):
        assert torch.equal(engine(x), wanted)
    with pytest.raises(StateError, match=r"state_dict: the weights of .* are streamed"):
        engine.module.state_dict()
    engine.destroy()


def test_what_cannot_be_done_to_streamed_weights(tmp_path: Path) -> None:
    model, ids = deep("llama"), prompts(6)[0][None]
    weights = copy.deepcopy(model.state_dict())
    engine = outpace.init_inference(model, device="cpu", offload={"cpu_offload_gb": 1.0})
    module: Any = engine.module
    wanted = engine(ids).logits
    for call in (lambda: module.save_pretrained(tmp_path), lambda: module.load_state_dict(weights)):
        with pytest.raises(StateError, match=r"state_dict: the weights of model\.layers\.0 are streamed"):
            call()
    embedded = module.get_input_embeddings()(ids).detach().requires_grad_()
    module(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is None, "it would be one of other weights"
    assert torch.equal(engine(ids).logits, wanted)
    module.to(torch.bfloat16)
    with pytest.raises(StateError, match=r"offload: the weights of model\.layers\.0 were converted or moved"):
        engine(ids)


class Nested(nn.Module):
    """A layer that calls others while it runs."""

    class Layer(nn.Module):
        """Calls all that come after it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.others = nn.Linear(8, 8), list[nn.Module]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for other in self.others:
                x = x + other(x)
            result: torch.Tensor = self.linear(x)
            return result

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Nested.Layer() for _ in range(4))
        self.layers[0].others = [self.layers[2]]  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_call_each_other_are_refused_where_they_have_one_slot() -> None:
    model, x = Nested(), torch.ones(1, 8)
    with torch.no_grad():
        wanted = copy.deepcopy(model)(x)
    engine = outpace.init_inference(copy.deepcopy(model), device="cpu", offload={"cpu_offload_gb": 1.0})
    with pytest.raises(NotSupported, match=r"calls another one while it runs, .* give offload\.slots=3"):
        engine(x)
    engine = outpace.init_inference(model, device="cpu", offload={"cpu_offload_gb": 1.0, "slots": 3})
    assert torch.equal(engine(x), wanted)


@pytest.mark.parametrize("inject", [True, False])
def test_threads_get_what_is_theirs(inject: bool, tmp_path: Path) -> None:
    model = deep("llama")
    options: dict[str, Any] = {"device": "cpu", "replace_with_kernel_inject": inject}
    engine = outpace.init_inference(copy.deepcopy(model), **placed("mixed", tmp_path), **options)
    plain = outpace.init_inference(model, **options)
    rows = [row[None] for row in prompts(9, 4, 12, 7)]
    wanted = [plain(row).logits for row in rows]
    with ThreadPoolExecutor(len(rows)) as pool:
        for _ in range(3):
            for found, each in zip(pool.map(lambda row: engine(row).logits, rows), wanted, strict=True):
                assert torch.equal(found, each)
    engine.destroy()


class Shown:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Keep them."""
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Nothing."""


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 12, "seed": 3},
    "several": {"do_sample": True, "num_return_sequences": 2, "seed": 3},
    "scores": {"do_sample": False, "output_logits": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", ["llama", "level 0", "t5", "whisper"])
def test_generate_of_an_engine(family: str, place: str, tmp_path: Path) -> None:
    model = no_policy() if family == "level 0" else deep(family, **WHISPER if family == "whisper" else {})
    options: dict[str, Any] = {"device": "cpu", "replace_with_kernel_inject": family in ("llama", "level 0")}
    engine = outpace.init_inference(copy.deepcopy(model), **placed(place, tmp_path), **options)
    plain = outpace.init_inference(copy.deepcopy(model), **options)
    inputs: dict[str, Any] = padded(prompts(4, 9), "left")
    if family == "whisper":
        inputs = {"input_features": torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3))}
    for call in CALLS.values():
        found, wanted = (each.generate(**inputs, **call, max_new_tokens=6) for each in (engine, plain))
        if isinstance(wanted, torch.Tensor):
            assert torch.equal(found, wanted)
        else:
            assert all(map(torch.equal, found.logits, wanted.logits))
    if family == "llama":
        ids = inputs["input_ids"][1:]
        shown = Shown()
        wanted = plain.generate(ids, max_new_tokens=6, do_sample=False)
        assert torch.equal(engine.generate(ids, max_new_tokens=6, do_sample=False, streamer=shown), wanted)
        assert shown.tokens == wanted[0].tolist()
        assert torch.equal(engine.generate(ids, max_new_tokens=6, do_sample=False, assistant_model=plain), wanted)
        assert torch.equal(plain.generate(ids, max_new_tokens=6, do_sample=False, assistant_model=engine), wanted)
    engine.destroy()


WHISPER = {"encoder_layers": 3, "decoder_layers": 4}


def test_times_are_taken_of_streamed_layers_too() -> None:
    engine = outpace.init_inference(deep("llama"), device="cpu", offload={"cpu_offload_gb": 1.0})
    engine.profile_model_time(modules=True)
    engine(prompts(5)[0][None])
    assert len(engine.model_times()) == 1
    engine.profile_summary()


def test_ragged_engine(tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    plain = RaggedEngine(deep("llama"), **options)
    engine = RaggedEngine(deep("llama"), **options, **placed("disk", tmp_path))
    for batch in ({1: [5, 6, 7], 2: [9]}, {1: [8], 3: [4, 4]}):
        assert torch.equal(*(each.put(list(batch), list(batch.values())) for each in (engine, plain)))
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("outpace-read")]
    with pytest.raises(ConfigError, match="kv: this engine has no scheduler"):
        RaggedEngine(deep("llama"), **options, offload={"kv": "1MB"})


def stored(kind: str, folder: Path) -> Any:
    """A model somewhere on disk in a form of others."""
    model: Any = tiny_model("llama", num_hidden_layers=LAYERS)
    if kind == "gguf":
        return write_gguf(folder.with_suffix(".gguf"), model, Kind.Q8_0)
    if kind == "folder":
        model.save_pretrained(folder)
        return folder
    if kind == "pytorch":
        folder.mkdir()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        model.config.save_pretrained(folder)
        return folder
    return write_folder(folder, model, kind)


def asked_of(engine: Any) -> Any:
    outputs = engine.generate([[5, 6, 7, 8], [9, 10]], SamplingParams(**GREEDY), use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


FORMS = {"gguf": ("stored",), "awq": (None, "stored"), "ct int8 zeros": ("stored",), "fp8 blocks": ("stored",)}
OWN = {"folder": (None, "int8", "int4", "w8a8"), "pytorch": (None, "int8")}


@pytest.mark.parametrize(
    ("kind", "scheme"), [(kind, scheme) for kind, schemes in {**FORMS, **OWN}.items() for scheme in schemes]
)
def test_every_form_of_checkpoint(kind: str, scheme: str | None, tmp_path: Path) -> None:
    quant = None if scheme is None else {"scheme": scheme}
    source, files = stored(kind, tmp_path / "model"), tmp_path / "files"
    files.mkdir()
    options: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "num_blocks": 8, "quant": quant, "tokenizer": None}
    with LLM(source, **options) as llm:
        wanted = asked_of(llm)
    kept = []
    for place in ("host", "disk", "disk"):
        with LLM(source, **options, **placed(place, files)) as llm:
            assert llm.engine.streaming is not None
            assert asked_of(llm) == wanted, "the second time from the file that is there already"
        kept.append({path.name: path.stat().st_mtime_ns for path in files.iterdir()} if files.exists() else {})
    assert kept[1] == kept[2]
    assert len(kept[1]) == (kind == "folder"), "weights that are made while they are read have no name"


def test_a_checkpoint_of_init_inference_and_shards_that_it_writes(tmp_path: Path) -> None:
    model, folder = deep("llama"), tmp_path / "model"
    model.save_pretrained(folder)
    inputs = padded(prompts(4, 9), "left")
    wanted = outpace.init_inference(copy.deepcopy(model), device="cpu", kernel_inject=True)(**inputs).logits
    shards = str(tmp_path / "shards")
    for given in ({"checkpoint": str(folder), "save_mp_checkpoint_path": shards}, {"checkpoint": shards}):
        with outpace.OnDevice("meta"):
            empty = hf.LlamaForCausalLM(model.config)
        files = tmp_path / "files"
        files.mkdir(exist_ok=True)
        engine = outpace.init_inference(empty, device="cpu", kernel_inject=True, **given, **placed("disk", files))
        assert torch.equal(engine(**inputs).logits, wanted)
        engine.destroy()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep_module_on_host": True}, "keep_module_on_host with offload or zero"),
        ({"zero": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload with zero: both say where weights live"),
        ({"enable_cuda_graph": True}, "enable_cuda_graph: a CPU has no CUDA graphs"),
    ],
)
def test_what_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        outpace.init_inference(deep("llama"), device="cpu", offload={"cpu_offload_gb": 1.0}, **options)


def test_nothing_is_left_when_an_engine_ends(tmp_path: Path) -> None:
    before = threading.active_count()
    for _ in range(2):
        llm = LLM(deep("llama"), device="cpu", num_blocks=8, **placed("disk", tmp_path))
        asked_of(llm)
        assert threading.active_count() > before
        del llm
        gc.collect()
    assert threading.active_count() == before
    assert not any(tmp_path.iterdir())
