"""Wrong calls, each with the error it must give: of the right kind, naming what is wrong, and soon."""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

import outpace
from outpace import (
    LLM,
    ConfigError,
    InferenceConfig,
    InferenceEngine,
    InputError,
    ModelError,
    NotSupported,
    NotSupportedYet,
    OutpaceError,
    SamplingParams,
    StateError,
)
from outpace.cli.app import main
from outpace.config import LLMConfig
from tests.models import byte_tokenizer, chain_model, tiny

SOON = 2.0  # seconds of this thread; nothing here should load, allocate or run anything
IDS = torch.tensor([[5, 6, 7]])
Wrong = tuple[Callable[[Any], Any], type[OutpaceError], str]


def of(**config: Any) -> InferenceConfig:
    return InferenceConfig.of(config)


def of_llm(**config: Any) -> LLMConfig:
    return LLMConfig.of(config)


def start(model: Any, *args: Any, **config: Any) -> InferenceEngine:
    return outpace.init_inference(model, *args, **config)


def ask(model: Any, **options: Any) -> LLM:
    return LLM(model, **options)


def quantized() -> nn.Module:
    model = nn.Linear(2, 2)
    model.is_quantized = True  # type: ignore[assignment]
    return model


def on_meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


def destroyed() -> InferenceEngine:
    engine = start(nn.Linear(2, 2), device="cpu")
    engine.destroy()
    return engine


# What is made of the configuration: no argument is used.
CONFIGS: dict[str, Wrong] = {
    "an unknown name": (lambda _: of(max_out_token=3), ConfigError, "max_out_token.*did you mean 'max_out_tokens'"),
    "an unknown name in a section": (
        lambda _: of(moe={"epsize": 2}),
        ConfigError,
        "moe: unknown name 'epsize'.*ep_size",
    ),
    "a dtype that is none": (lambda _: of(dtype="fp17"), ConfigError, "dtype: 'fp17' is not a dtype"),
    "a dtype by number": (lambda _: of(dtype=16), ConfigError, "dtype: 16 is not a dtype"),
    "a dtype nothing runs in": (lambda _: of(dtype=torch.complex64), ConfigError, "dtype: torch.complex64"),
    "int8 of 4 bits": (
        lambda _: of(dtype="int8", quant={"scheme": "int4"}),
        ConfigError,
        r"dtype='int8' and quant\.scheme='int4' .*give one",
    ),
    "a scheme that is none": (lambda _: of(quant={"scheme": "int3"}), ConfigError, "quant.scheme: .*'int3'"),
    "a device that is none": (lambda _: of(device="gpu"), ConfigError, "device: 'gpu' is not a device; use 'cpu'"),
    "a device of another kind": (lambda _: of(device="mps"), ConfigError, "device: 'mps': Outpace runs on"),
    "a device that is not there": (lambda _: of(device="cuda:77"), ConfigError, "device: 'cuda:77' does not exist"),
    "a length of zero": (lambda _: of(max_out_tokens=0), ConfigError, "max_out_tokens: .*greater than or equal to 1"),
    "a length in words": (lambda _: of(max_out_tokens="many"), ConfigError, "max_out_tokens: .*got 'many'"),
    "a fraction of a length": (lambda _: of(max_out_tokens=1.5), ConfigError, r"max_out_tokens: .*got 1\.5"),
    "a switch that is none": (lambda _: of(enable_cuda_graph="perhaps"), ConfigError, "enable_cuda_graph: .*'perhaps'"),
    "a seed in words": (lambda _: of(seed="lucky"), ConfigError, "seed: .*got 'lucky'"),
    "a seed too large for torch": (lambda _: of(seed=2**64), ConfigError, "seed: .*less than"),
    "a choice that is none": (lambda _: of(graph_output="view"), ConfigError, "graph_output: .*'copy' or 'static'"),
    "a section that is a number": (lambda _: of(quant=2), ConfigError, "quant: .*got 2"),
    "no ranks": (lambda _: of(tp={"tp_size": 0}), ConfigError, r"tp\.tp_size: .*greater than or equal"),
    "graphs on a CPU": (lambda _: of(enable_cuda_graph=True, device="cpu"), ConfigError, "enable_cuda_graph: a CPU"),
    "a config that is a list": (
        lambda _: InferenceConfig.of([1]),
        ConfigError,
        "config: expected None, a dict.*got list",
    ),
    "a config that is not there": (
        lambda _: InferenceConfig.of("no.json"),
        ConfigError,
        r"config: cannot read no\.json",
    ),
    "a key that is no text": (lambda _: InferenceConfig.of({3: 4}), ConfigError, "unknown name '3'"),
    "a scheduler where none is": (
        lambda _: of(scheduler={"max_num_seqs": 8}),
        ConfigError,
        "scheduler: only outpace.LLM and outpace serve schedule requests; remove it",
    ),
    "pages where none are kept": (
        lambda _: of(gpu_memory_utilization=0.5),
        ConfigError,
        "gpu_memory_utilization: only outpace.LLM and outpace serve keep the pages of requests",
    ),
    "no requests in a step": (lambda _: of_llm(max_num_seqs=0), ConfigError, "max_num_seqs: .*got 0"),
    "a page no kernel runs": (lambda _: of_llm(block_size=17), ConfigError, "block_size: .*16, 32, 64.*got 17"),
    "more than all memory": (
        lambda _: of_llm(cache={"gpu_memory_utilization": 1.1}),
        ConfigError,
        r"cache\.gpu_memory_utilization: .*less than or equal to 1",
    ),
    "memory without end": (lambda _: of_llm(swap_space=float("inf")), ConfigError, "swap_space: .*finite"),
    "stages without layers": (
        lambda _: of_llm(pipeline_parallel={"pp_size": 2, "layers": [4, 0]}),
        ConfigError,
        r"pipeline_parallel\.?.*layers: \(4, 0\) must be a number of layers",
    ),
    "an LLM that is not injected": (
        lambda _: of_llm(kernel_inject=False),
        ConfigError,
        "replace_with_kernel_inject=False: LLM runs fused layers",
    ),
    "one option by two names": (
        lambda _: of_llm(max_num_seqs=8, scheduler={"max_num_seqs": 9}),
        ConfigError,
        r"scheduler\.max_num_seqs=9 and max_num_seqs=8: these are one option",
    ),
    "a config of an LLM that is a list": (lambda _: LLMConfig.of([1]), ConfigError, "config: .*an LLMConfig, got list"),
}

# init_inference
STARTS: dict[str, Wrong] = {
    "a name for a model": (
        lambda _: start("gpt2"),
        ModelError,
        "model: expected a torch.nn.Module, got str.*outpace.LLM",
    ),
    "nothing for a model": (lambda _: start(None), ModelError, "model: expected a torch.nn.Module, got NoneType"),
    "a class for a model": (lambda _: start(nn.Linear), ModelError, "model: expected a torch.nn.Module, got type"),
    "a model without values": (lambda _: start(on_meta()), ModelError, "model: weight is on the meta device"),
    "a quantized model": (lambda _: start(quantized()), ModelError, "model: it is quantized already"),
    "config and keyword differ": (
        lambda _: start(nn.Linear(1, 1), {"seed": 1}, seed=2),
        ConfigError,
        "seed is given twice",
    ),
    "an unknown keyword": (lambda _: start(nn.Linear(1, 1), kernel_injct=True), ConfigError, "'kernel_inject'"),
    "kernel injection": (
        lambda _: start(nn.Linear(1, 1), kernel_inject=True),
        NotSupported,
        "replace_with_kernel_inject: no policy for the layers of Linear",
    ),
    "use after destroy": (lambda _: destroyed()(torch.ones(2)), StateError, "the engine is destroyed"),
    "times without profiling": (
        lambda _: start(nn.Linear(1, 1), device="cpu").model_times(),
        StateError,
        "model_times: profiling is not on",
    ),
}

# engine.generate; the argument is an engine of a tiny Llama
CALLS: dict[str, Wrong] = {
    "a list of ids": (
        lambda e: e.generate([5, 6]),
        InputError,
        "input_ids: expected a tensor.*got list; make it a tensor",
    ),
    "a text": (lambda e: e.generate("hello"), InputError, "input_ids: expected a tensor of token ids.*got str"),
    "a dict of inputs": (
        lambda e: e.generate({"input_ids": IDS}),
        InputError,
        r"input_ids: .*unpack it: generate\(\*\*",
    ),
    "one dimension": (
        lambda e: e.generate(IDS[0]),
        InputError,
        r"input_ids: expected shape \[batch, length\], got \[3\]",
    ),
    "three dimensions": (lambda e: e.generate(IDS[None]), InputError, r"input_ids: expected shape .*got \[1, 1, 3\]"),
    "no tokens": (lambda e: e.generate(IDS[:, :0]), InputError, r"input_ids: the prompt is empty \(shape \[1, 0\]\)"),
    "fractions": (
        lambda e: e.generate(IDS.float()),
        InputError,
        "input_ids: expected integer token ids, got torch.float32",
    ),
    "truth values": (lambda e: e.generate(IDS.bool()), InputError, "input_ids: expected integer.*torch.bool"),
    "a token too high": (
        lambda e: e.generate(IDS + 90),
        InputError,
        "input_ids: token id 97 is outside .* vocabulary of 97",
    ),
    "a token below zero": (lambda e: e.generate(IDS - 9), InputError, "input_ids: token id -4 is outside"),
    "ids twice": (lambda e: e.generate(IDS, input_ids=IDS), InputError, "input_ids is given twice"),
    "inputs twice": (lambda e: e.generate(IDS, inputs=IDS), InputError, "inputs is given twice"),
    "too many positions": (lambda e: e.generate(IDS, *[None] * 20), InputError, "generate: takes at most .* got 21"),
    "a mask of another length": (
        lambda e: e.generate(IDS, attention_mask=torch.ones(1, 2)),
        InputError,
        r"attention_mask: expected the shape of the prompt \[1, 3\], got \[1, 2\]",
    ),
    "a mask of another batch": (
        lambda e: e.generate(IDS, attention_mask=torch.ones(2, 3)),
        InputError,
        r"attention_mask: .*got \[2, 3\]",
    ),
    "a mask without dimensions": (
        lambda e: e.generate(IDS, attention_mask=torch.tensor(1)),
        InputError,
        r"attention_mask: .*got \[\]",
    ),
    "a mask that is a list": (
        lambda e: e.generate(IDS, attention_mask=[[1, 1, 1]]),
        InputError,
        "attention_mask: expected a tensor, got list",
    ),
    "a mask of nothing": (
        lambda e: e.generate(IDS.repeat(2, 1), attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]])),
        InputError,
        "attention_mask: row 1 masks every token",
    ),
    "embeddings of another shape": (
        lambda e: e.generate(inputs_embeds=torch.ones(3, 32)),
        InputError,
        r"inputs_embeds: expected a tensor \[batch, length, width\], got \[3, 32\]",
    ),
    "new tokens in words": (
        lambda e: e.generate(IDS, max_new_tokens="many"),
        InputError,
        "max_new_tokens: expected an integer from 1, got 'many'",
    ),
    "no new tokens": (
        lambda e: e.generate(IDS, max_new_tokens=0),
        InputError,
        "max_new_tokens: expected an integer from 1",
    ),
    "fewer than no tokens": (lambda e: e.generate(IDS, max_new_tokens=-5), InputError, "max_new_tokens: .*got -5"),
    "a length in halves": (lambda e: e.generate(IDS, max_length=7.5), InputError, r"max_length: .*got 7\.5"),
    "a length below the prompt": (
        lambda e: e.generate(IDS, max_length=3),
        InputError,
        "max_length: a prompt of 3 tokens leaves no room for new ones in 3",
    ),
    "too many new tokens": (
        lambda e: e.generate(IDS, max_new_tokens=2000),
        InputError,
        "max_new_tokens: a prompt of 3 tokens and 2000 new ones make 2003, more than max_out_tokens=1024",
    ),
    "more than the model's positions": (
        lambda e: e.generate(IDS, max_new_tokens=62),
        InputError,
        "max_new_tokens: .* more than the 64 positions of the model",
    ),
    "a prompt too long": (
        lambda e: e.generate(IDS.repeat(1, 400), max_new_tokens=1),
        InputError,
        "input_ids: a prompt of 1200 tokens leaves no room",
    ),
    "beams": (lambda e: e.generate(IDS, num_beams=4), NotSupported, "num_beams: beam search is not supported"),
    "beams in words": (lambda e: e.generate(IDS, num_beams="4"), NotSupported, "num_beams"),
}

# LLM; the argument is the chain model's
PROMPTS: dict[str, Wrong] = {
    "a model that is a number": (
        lambda _: ask(3),
        ModelError,
        "model: expected a name, a path or a torch.nn.Module, got int",
    ),
    "a model with no name": (lambda _: LLM(""), ModelError, "model: the name is empty"),
    "a model that is not there": (
        lambda _: LLM("/no/such/model"),
        ModelError,
        "model: no such file or folder '/no/such",
    ),
    "a model that does not generate": (
        lambda _: LLM(tiny("bert")),
        ModelError,
        "model: BertForMaskedLM is not a generative",
    ),
    "a plain module": (lambda _: LLM(nn.Linear(1, 1)), ModelError, "model: Linear is not a generative model"),
    "a tokenizer by name": (
        lambda _: ask(tiny("llama"), tokenizer="gpt2"),
        InputError,
        "tokenizer: expected .*got str",
    ),
    "an unknown option": (lambda _: LLM(tiny("llama"), max_length=3), ConfigError, "unknown name 'max_length'"),
    "a wrong dtype": (lambda _: LLM(tiny("llama"), dtype="fp17"), ConfigError, "dtype: 'fp17'"),
    "no prompts": (lambda llm: llm.generate([]), InputError, r"prompts: expected text.*got \[\]"),
    "nothing": (lambda llm: llm.generate(None), InputError, "prompts: expected text.*got None"),
    "a number": (lambda llm: llm.generate(5), InputError, "prompts: expected text.*got 5"),
    "an empty text": (
        lambda llm: llm.generate(""),
        InputError,
        "prompt: expected text or token ids that are not empty",
    ),
    "an empty text among others": (
        lambda llm: llm.generate(["a", ""], use_tqdm=False),
        InputError,
        "prompt: .*not empty",
    ),
    "fractions as tokens": (lambda llm: llm.generate([[1.5]]), InputError, r"prompt: expected .*got \[1\.5\]"),
    "a fraction as a prompt": (lambda llm: llm.generate([1.5]), InputError, r"prompt: expected .*got 1\.5"),
    "texts as tokens": (lambda llm: llm.generate([["a"]]), InputError, "prompt: expected"),
    "a tensor as a prompt": (lambda llm: llm.generate([torch.tensor([1, 2])]), InputError, "prompt: expected"),
    "truth as a token": (lambda llm: llm.stream([True]), InputError, "prompt: expected"),
    "a number to stream": (lambda llm: llm.stream(5), InputError, "prompt: expected .*got 5"),
    "a token too high": (lambda llm: llm.generate([999]), InputError, "prompt_token_ids: token id 999 is outside"),
    "parameters as a dict": (
        lambda llm: llm.generate("a", {"top_k": 1}),
        InputError,
        "sampling_params: expected Sampling",
    ),
    "parameters as a text": (lambda llm: llm.stream("a", "greedy"), InputError, "sampling_params: .*got 'greedy'"),
    "parameters as a list of texts": (lambda llm: llm.generate("a", ["x"]), InputError, "sampling_params: .*got 'x'"),
    "too few parameters": (
        lambda llm: llm.generate(["a", "b"], [SamplingParams()]),
        InputError,
        "sampling_params: 1 of them for 2 prompts",
    ),
    "too many tokens": (
        lambda llm: llm.generate("a" * 600, SamplingParams(max_tokens=9999)),
        InputError,
        "prompt: its 600 tokens leave no room for an answer in max_model_len=512; shorten it",
    ),
    "a text to chat": (lambda llm: llm.chat("hello"), InputError, r"messages\[0\]: expected a dict with role"),
    "nothing to chat": (lambda llm: llm.chat([]), InputError, r"messages: expected a list of dicts.*got \[\]"),
    "None to chat": (lambda llm: llm.chat(None), InputError, "messages: expected a list of dicts.*got None"),
    "no content": (lambda llm: llm.chat([{"role": "user"}]), InputError, r"messages\[0\]: .*role and content"),
    "content that is None": (
        lambda llm: llm.chat([{"role": "user", "content": None}]),
        InputError,
        "messages: the model's chat template refuses them",
    ),
    "a template that is wrong": (
        lambda llm: llm.chat([{"role": "user", "content": "a"}], chat_template="{{ nonsense"),
        InputError,
        "messages: the model's chat template refuses them",
    ),
}

PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "less than no tokens": ({"max_tokens": -1}, "max_tokens: must be from 0"),
    "a fraction of tokens": ({"max_tokens": 2.5}, "max_tokens: expected an integer"),
    "tokens in words": ({"max_tokens": "16"}, "max_tokens: expected an integer, got '16'"),
    "no number of tokens": ({"max_tokens": "all"}, "max_tokens: expected an integer"),
    "true tokens": ({"max_tokens": True}, "max_tokens: expected an integer, got True"),
    "more least than most": ({"min_tokens": 20}, "min_tokens: 20 is more than max_tokens=16"),
    "cold": ({"temperature": -0.1}, "temperature: must be from 0 to 100"),
    "no temperature at all": ({"temperature": float("nan")}, "temperature: must be from 0"),
    "more than all": ({"top_p": 1.1}, "top_p: must be from"),
    "nothing of all": ({"top_p": 0}, "top_p: must be from"),
    "fewer than none": ({"top_k": -2}, "top_k: must be from 0"),
    "a fraction of a token": ({"top_k": 1.5}, "top_k: expected an integer"),
    "likelier than the likeliest": ({"min_p": 2}, "min_p: must be from 0 to 1"),
    "no penalty": ({"repetition_penalty": 0}, "repetition_penalty: must be from"),
    "a seed in words": ({"seed": "x"}, "seed: expected an integer"),
    "a true seed": ({"seed": True}, "seed: expected an integer"),
    "a seed of 65 bits": ({"seed": 2**64}, "seed: expected an integer of 64 bits"),
    "a stop that is a number": ({"stop": 5}, "stop: expected strings"),
    "stops that are numbers": ({"stop": [5]}, "stop: expected strings"),
    "an empty stop": ({"stop": ["a", ""]}, "stop: expected strings that are not empty"),
    "a stop token by itself": ({"stop_token_ids": 5}, "stop_token_ids: expected token ids, got 5"),
    "stop tokens in words": ({"stop_token_ids": ["5"]}, "stop_token_ids: expected token ids"),
    "a stop token below zero": ({"stop_token_ids": [-1]}, "stop_token_ids: expected token ids"),
    "a switch in words": ({"ignore_eos": "no"}, "ignore_eos: expected True or False"),
}

COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "a model that is not there": (("--model", "/no/such/model"), "model: no such file or folder"),
    "a folder without a model": (("--model", "."), "model: .*config.json"),
    "a dtype that is none": (("--model", ".", "--dtype", "fp17"), "dtype: 'fp17' is not a dtype"),
    "a device that is none": (("--model", ".", "--device", "tpu"), "device: 'tpu'"),
    "cold": (("--temperature", "-1"), "temperature: must be from 0"),
    "more than all": (("--top-p", "2"), "top_p: must be from"),
}


@pytest.fixture(scope="module")
def engine() -> InferenceEngine:
    return start(tiny("llama"), device="cpu")


@pytest.fixture(scope="module")
def llm() -> LLM:
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    return LLM(chain_model(tokenizer), tokenizer=tokenizer, device="cpu")


def check(wrong: Wrong, argument: object) -> None:
    call, kind, says = wrong
    begin = time.thread_time()
    with pytest.raises(OutpaceError, match=says) as caught:
        call(argument)
    assert time.thread_time() - begin < SOON
    assert type(caught.value) is kind
    assert len(str(caught.value).splitlines()) == 1, "not one line"


@pytest.mark.parametrize("case", CONFIGS)
def test_a_wrong_config(case: str) -> None:
    check(CONFIGS[case], None)


@pytest.mark.parametrize("case", STARTS)
def test_a_wrong_start(case: str) -> None:
    check(STARTS[case], None)


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call_of_generate(case: str, engine: InferenceEngine) -> None:
    check(CALLS[case], engine)


def test_an_engine_is_none_the_worse_for_wrong_calls(engine: InferenceEngine) -> None:
    assert torch.equal(engine.generate(IDS, max_new_tokens=4), tiny("llama").generate(IDS, max_new_tokens=4))


@pytest.mark.parametrize("case", PROMPTS)
def test_a_wrong_prompt(case: str, llm: LLM) -> None:
    check(PROMPTS[case], llm)


@pytest.mark.parametrize("case", PARAMETERS)
def test_wrong_sampling_parameters(case: str) -> None:
    values, says = PARAMETERS[case]
    check((lambda _: SamplingParams(**values), InputError, f"^{says}"), None)


@pytest.mark.parametrize("case", COMMANDS)
def test_a_wrong_command(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, says = COMMANDS[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["outpace", "generate", "hi", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (1 if says.startswith("model:") else 2, "")
    assert re.match(f"error: {says}", err), err
    assert len(err.splitlines()) == 1


def test_there_are_enough_wrong_calls() -> None:
    tables: tuple[dict[str, Any], ...] = (CONFIGS, STARTS, CALLS, PROMPTS, PARAMETERS, COMMANDS)
    assert sum(map(len, tables)) >= 100


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (InputError, ValueError),
        (ModelError, ValueError),
        (StateError, RuntimeError),
        (NotSupported, NotImplementedError),
        (NotSupportedYet, NotSupported),
        (outpace.DownloadError, RuntimeError),
    ],
)
def test_errors_are_python_errors_too(kind: type[OutpaceError], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, OutpaceError)
