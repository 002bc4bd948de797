"""What `generate` refuses, what it rearranges, and that everything else is Hugging Face's own."""

import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import outpace
from outpace import InputError, NotSupported
from tests.models import POSITIONS, VOCAB, padded, prompts, tiny

IDS = prompts(6)[0][None]
ROWS = prompts(9, 5, 2)


def engine_of(model: Any, **config: Any) -> outpace.InferenceEngine:
    return outpace.init_inference(model, **{"dtype": "fp32", "device": "cpu", **config})


class Recorder(BaseStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.seen.put(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended = True

    def all(self) -> list[list[int]]:
        return [self.seen.get_nowait() for _ in range(self.seen.qsize())]


class Forbid(LogitsProcessor):
    """Makes the lower half of the vocabulary impossible."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, : VOCAB // 2] = float("-inf")
        return scores


class StopAt(StoppingCriteria):
    """Stops when the sequence has this many tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.BoolTensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)  # type: ignore[return-value]


# num_beams


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate(IDS, num_beams=2),
        lambda engine: engine.generate(IDS, generation_config=GenerationConfig(num_beams=3)),
        lambda engine: engine.generate(IDS, GenerationConfig(num_beams=3)),
    ],
    ids=["keyword", "generation_config", "position"],
)
def test_beam_search_is_refused(llama: outpace.InferenceEngine, call: Callable[[Any], Any]) -> None:
    with pytest.raises(NotSupported, match="num_beams: beam search is not supported"):
        call(llama)


def test_beam_search_from_the_models_own_config_is_refused() -> None:
    model = tiny("llama")
    model.generation_config.num_beams = 4
    with pytest.raises(NotImplementedError, match="num_beams"):
        engine_of(model).generate(IDS)
    assert engine_of(model).generate(IDS, num_beams=1, max_new_tokens=2).shape == (1, 8)


# length: prompt plus new tokens against max_out_tokens=10, with a prompt of 6

LENGTHS: dict[str, Callable[[Any, int], Any]] = {
    "position": lambda engine, n: engine.generate(IDS, max_new_tokens=n),
    "input_ids": lambda engine, n: engine.generate(input_ids=IDS, max_new_tokens=n),
    "inputs": lambda engine, n: engine.generate(inputs=IDS, max_new_tokens=n),
    "inputs_embeds": lambda engine, n: engine.generate(
        inputs_embeds=engine.get_input_embeddings()(IDS), max_new_tokens=n
    ),
    "generation_config": lambda engine, n: engine.generate(
        IDS, generation_config=GenerationConfig(max_new_tokens=n, pad_token_id=1)
    ),
    "positional generation_config": lambda engine, n: engine.generate(
        IDS, GenerationConfig(max_new_tokens=n, pad_token_id=1)
    ),
    "max_length": lambda engine, n: engine.generate(IDS, max_length=6 + n),
    "max_length in a generation_config": lambda engine, n: engine.generate(
        IDS, generation_config=GenerationConfig(max_length=6 + n, pad_token_id=1)
    ),
}


@pytest.mark.parametrize("way", LENGTHS)
def test_prompt_and_new_tokens_must_fit(way: str) -> None:
    engine = engine_of(tiny("llama"), max_out_tokens=10)
    assert LENGTHS[way](engine, 4).shape[1] in (10, 4)
    with pytest.raises(InputError, match="a prompt of 6 tokens and 5 new ones make 11, more than max_out_tokens=10"):
        LENGTHS[way](engine, 5)


def test_the_setting_that_is_too_large_is_named() -> None:
    engine = engine_of(tiny("llama"), max_out_tokens=10)
    with pytest.raises(InputError, match=r"^max_length: .*give init_inference max_out_tokens=30"):
        engine.generate(IDS, max_length=30)
    with pytest.raises(InputError, match=r"^max_new_tokens: .*give init_inference max_out_tokens=36"):
        engine.generate(IDS, max_new_tokens=30)


def test_the_models_own_generation_config_is_checked_too() -> None:
    model = tiny("llama")
    model.generation_config.max_new_tokens = 5
    with pytest.raises(InputError, match="more than max_out_tokens=10"):
        engine_of(model, max_out_tokens=10).generate(IDS)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_without_a_length_hugging_faces_default_is_checked() -> None:
    assert engine_of(tiny("llama"), max_out_tokens=26).generate(IDS).shape == (1, 26)
    with pytest.raises(InputError, match="20 new ones make 26, more than max_out_tokens=25"):
        engine_of(tiny("llama"), max_out_tokens=25).generate(IDS)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_without_a_length_a_sequence_ends_at_the_last_position_as_in_hugging_face() -> None:
    long = prompts(POSITIONS - 4)[0][None]
    assert torch.equal(engine_of(tiny("llama")).generate(long), tiny("llama").generate(long))


def test_a_model_has_only_so_many_positions(llama: outpace.InferenceEngine) -> None:
    assert llama.generate(IDS, max_new_tokens=POSITIONS - 6).shape == (1, POSITIONS)
    with pytest.raises(InputError, match=f"make {POSITIONS + 1}, more than the {POSITIONS} positions"):
        llama.generate(IDS, max_new_tokens=POSITIONS - 5)


def test_the_decoders_length_counts_in_an_encoder_decoder() -> None:
    engine = engine_of(tiny("t5"), max_out_tokens=10)
    long = prompts(30)[0][None]
    assert engine.generate(long, max_new_tokens=9).shape == (1, 10)
    with pytest.raises(InputError, match="a prompt of 1 tokens and 10 new ones"):
        engine.generate(long, max_new_tokens=10)
    with pytest.raises(InputError, match="a prompt of 4 tokens and 7 new ones"):
        engine.generate(long, decoder_input_ids=IDS[:, :4], max_new_tokens=7)


def test_a_model_that_cannot_generate() -> None:
    with pytest.raises(NotSupported, match="generate: BertForMaskedLM is not a generative model"):
        engine_of(tiny("bert")).generate(IDS)
    with pytest.raises(NotSupported, match="generate: Linear is not a generative model"):
        engine_of(torch.nn.Linear(2, 2)).generate(IDS)


# Hugging Face's own arguments


def test_a_streamer_sees_the_prompt_and_every_token(llama: outpace.InferenceEngine) -> None:
    ours, theirs = Recorder(), Recorder()
    tokens = llama.generate(IDS, max_new_tokens=8, streamer=ours)
    tiny("llama").generate(IDS, max_new_tokens=8, streamer=theirs)
    seen = ours.all()
    assert seen == theirs.all()
    assert seen[0] == IDS[0].tolist()
    assert [token for (token,) in seen[1:]] == tokens[0, 6:].tolist()
    assert ours.ended


def test_logits_processors(llama: outpace.InferenceEngine) -> None:
    tokens = llama.generate(IDS, max_new_tokens=8, logits_processor=LogitsProcessorList([Forbid()]))
    assert torch.equal(
        tokens, tiny("llama").generate(IDS, max_new_tokens=8, logits_processor=LogitsProcessorList([Forbid()]))
    )
    assert int(tokens[0, 6:].min()) >= VOCAB // 2
    assert not torch.equal(tokens, llama.generate(IDS, max_new_tokens=8))


def test_stopping_criteria(llama: outpace.InferenceEngine) -> None:
    stop = StoppingCriteriaList([StopAt(9)])
    tokens = llama.generate(IDS, max_new_tokens=20, stopping_criteria=stop)
    assert tokens.shape == (1, 9)
    assert torch.equal(tokens, tiny("llama").generate(IDS, max_new_tokens=20, stopping_criteria=stop))


def test_a_generation_config_with_penalties_and_an_end_token(llama: outpace.InferenceEngine) -> None:
    plain = llama.generate(IDS, max_new_tokens=12)
    config = GenerationConfig(
        max_new_tokens=12, repetition_penalty=1.7, no_repeat_ngram_size=2, eos_token_id=int(plain[0, 9]), pad_token_id=1
    )
    tokens = llama.generate(IDS, generation_config=config)
    assert torch.equal(tokens, tiny("llama").generate(IDS, generation_config=config))
    assert not torch.equal(tokens, plain)


def test_an_assistant_model_may_be_another_engine(llama: outpace.InferenceEngine) -> None:
    assistant = engine_of(tiny("llama", num_hidden_layers=1))
    tokens = llama.generate(IDS, max_new_tokens=12, assistant_model=assistant)
    reference = tiny("llama").generate(IDS, max_new_tokens=12, assistant_model=tiny("llama", num_hidden_layers=1))
    assert torch.equal(tokens, reference)
    assert torch.equal(tokens, llama.generate(IDS, max_new_tokens=12))


def test_a_dict_of_results(llama: outpace.InferenceEngine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_scores": True}
    ours, theirs = llama.generate(IDS, **options), tiny("llama").generate(IDS, **options)
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(torch.stack(ours.scores), torch.stack(theirs.scores))


def test_embeddings_as_the_prompt(llama: outpace.InferenceEngine) -> None:
    embeds = tiny("llama").get_input_embeddings()(IDS)
    tokens = llama.generate(inputs_embeds=embeds, max_new_tokens=8)
    assert torch.equal(tokens, tiny("llama").generate(inputs_embeds=embeds, max_new_tokens=8))
    assert torch.equal(tokens, llama.generate(IDS, max_new_tokens=8)[:, 6:])


def test_the_callers_arguments_are_not_changed(llama: outpace.InferenceEngine) -> None:
    batch = padded(ROWS, "right")
    before = {name: tensor.clone() for name, tensor in batch.items()}
    config = GenerationConfig(max_new_tokens=4, pad_token_id=1)
    llama.generate(**batch, generation_config=config)
    assert all(torch.equal(batch[name], before[name]) for name in batch)
    assert config == GenerationConfig(max_new_tokens=4, pad_token_id=1)


# right padding


def expected_new(count: int) -> torch.Tensor:
    """What plain Hugging Face adds to each prompt alone."""
    model = tiny("llama")
    return torch.cat([model.generate(row[None], max_new_tokens=count)[:, len(row) :] for row in ROWS])


def test_right_padding_with_a_dict_of_results(llama: outpace.InferenceEngine) -> None:
    batch = padded(ROWS, "right")
    output = llama.generate(**batch, max_new_tokens=8, return_dict_in_generate=True)
    assert torch.equal(output.sequences, torch.cat([batch["input_ids"], expected_new(8)], dim=1))


def test_right_padding_with_several_sequences_for_each_prompt(llama: outpace.InferenceEngine) -> None:
    batch = padded(ROWS, "right")
    torch.manual_seed(0)
    tokens = llama.generate(**batch, max_new_tokens=6, do_sample=True, num_return_sequences=2)
    assert torch.equal(tokens[:, :9], batch["input_ids"].repeat_interleave(2, dim=0))
    torch.manual_seed(0)
    left = llama.generate(**padded(ROWS, "left"), max_new_tokens=6, do_sample=True, num_return_sequences=2)
    assert torch.equal(tokens[:, 9:], left[:, 9:])
    assert not torch.equal(tokens[0], tokens[1])


def test_right_padding_of_embeddings(llama: outpace.InferenceEngine) -> None:
    batch = padded(ROWS, "right")
    embeds = llama.get_input_embeddings()(batch["input_ids"])
    tokens = llama.generate(inputs_embeds=embeds, attention_mask=batch["attention_mask"], max_new_tokens=8)
    assert torch.equal(tokens, expected_new(8))


def test_padding_on_both_sides_and_a_boolean_mask(llama: outpace.InferenceEngine) -> None:
    ids = torch.full((2, 9), 1)
    ids[0], ids[1, 2:7] = ROWS[0], ROWS[1]
    mask = ids != 1
    tokens = llama.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8)
    assert torch.equal(tokens, torch.cat([ids, expected_new(8)[:2]], dim=1))


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.ones(2, 6), r"expected the shape of the prompt \[1, 6\], got \[2, 6\]"),
        (torch.full((1, 6), 2), "expected 1 for tokens and 0 for padding"),
        (torch.full((1, 6), -1.0), "expected 1 for tokens and 0 for padding"),
        (torch.full((1, 6), float("nan")), "expected 1 for tokens and 0 for padding"),
    ],
    ids=["more rows", "2", "-1", "nan"],
)
def test_a_mask_that_does_not_fit_its_prompt_is_refused(
    llama: outpace.InferenceEngine, mask: torch.Tensor, said: str
) -> None:
    with pytest.raises(InputError, match=f"^attention_mask: {said}"):
        llama.generate(IDS, attention_mask=mask, max_new_tokens=2)


def test_position_ids_move_with_their_tokens(llama: outpace.InferenceEngine) -> None:
    batch = padded(ROWS, "right")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    tokens = llama.generate(**batch, position_ids=positions, max_new_tokens=8)
    assert torch.equal(tokens[:, 9:], expected_new(8))


def test_a_pad_token_that_is_the_end_token_is_not_taken_for_padding(llama: outpace.InferenceEngine) -> None:
    ids = torch.cat([ROWS[1], torch.tensor([1, 1])])[None]
    tokens = llama.generate(ids, max_new_tokens=4, eos_token_id=1, pad_token_id=1)
    assert torch.equal(tokens, tiny("llama").generate(ids, max_new_tokens=4, eos_token_id=1, pad_token_id=1))


# the seed


def test_a_seed_makes_each_call_repeat_itself_and_leaves_the_global_generator_alone() -> None:
    engine = engine_of(tiny("llama"), seed=7)
    torch.manual_seed(7)
    expected = tiny("llama").generate(IDS, do_sample=True, max_new_tokens=16)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = (engine.generate(IDS, do_sample=True, max_new_tokens=16) for _ in range(2))
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_the_global_generator_decides(llama: outpace.InferenceEngine) -> None:
    torch.manual_seed(3)
    tokens = llama.generate(IDS, do_sample=True, max_new_tokens=16)
    torch.manual_seed(3)
    assert torch.equal(tokens, tiny("llama").generate(IDS, do_sample=True, max_new_tokens=16))
