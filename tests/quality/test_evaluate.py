"""Perplexity and agreement: against plain Hugging Face, of a model with itself and with others, and bad input."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import outpace
from outpace.errors import InputError, ModelError
from outpace.loading.text import built_in_text
from outpace.quality import agreement, evaluate, perplexity
from tests.models import POSITIONS, prompts, tiny
from tests.texts import TEXT

CPU: dict[str, Any] = {"device": "cpu", "dtype": "fp32"}
IDS = prompts(150)[0].tolist()


@pytest.fixture(scope="module")
def llm() -> outpace.LLM:
    return outpace.LLM(tiny("llama"), **CPU, max_num_seqs=2)


@pytest.fixture(scope="module")
def other() -> outpace.LLM:
    """A model that differs a little."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    return outpace.LLM(model, **CPU, max_num_seqs=2)


def logprobs(ids: Sequence[int], window: int, stride: int, model: Any = None) -> list[torch.Tensor]:
    """What plain Hugging Face says of each token that counts, window by window: [tokens, vocabulary]."""
    model, seen, found = model or tiny("llama"), 1, []
    for begin in range(0, len(ids), stride):
        piece = ids[begin : begin + window]
        first = max(seen - begin, 1)
        if first < len(piece):
            with torch.no_grad():
                logits = model(torch.tensor([piece])).logits[0, first - 1 : -1]
            found.append(logits.double().log_softmax(-1))
        seen = begin + len(piece)
        if seen == len(ids):
            break
    return found


def losses(ids: Sequence[int], window: int, stride: int) -> list[torch.Tensor]:
    """-log p of each token that counts, by plain Hugging Face."""
    found, seen, result = logprobs(ids, window, stride), 1, []
    for number, rows in enumerate(found):
        start = max(seen, number * stride + 1)
        targets = torch.tensor(ids[start : start + len(rows)])
        result.append(-rows.gather(1, targets[:, None])[:, 0])
        seen = start + len(rows)
    return result


@pytest.mark.parametrize(("window", "stride"), [(40, 40), (40, 13), (64, 1), (2, 2), (33, 32)])
def test_perplexity_is_that_of_hugging_face(llm: outpace.LLM, window: int, stride: int) -> None:
    ids = IDS[:70] if stride == 1 else IDS
    found, expected = perplexity(llm, ids, window, stride), losses(ids, window, stride)
    assert [part.tokens for part in found.windows] == [len(part) for part in expected]
    assert [part.nats for part in found.windows] == pytest.approx([float(part.mean()) for part in expected], rel=1e-5)
    assert found.nats == pytest.approx(float(torch.cat(expected).mean()), rel=1e-6)
    assert found.tokens == sum(map(len, expected))
    assert found.perplexity == pytest.approx(math.exp(found.nats))
    assert (found.model, found.dtype, found.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert found.bits_per_byte is None


def test_overlapping_windows_count_every_token_but_the_first(llm: outpace.LLM) -> None:
    assert perplexity(llm, IDS, 40, 13).tokens == len(IDS) - 1
    assert perplexity(llm, IDS, 40).tokens == len(IDS) - 4  # four windows


def test_a_text_shorter_than_the_window_is_one_window(llm: outpace.LLM) -> None:
    found = evaluate(llm, text=IDS[:9])
    assert (found.window, found.model.tokens, len(found.model.windows)) == (POSITIONS, 8, 1)


def test_a_model_agrees_with_itself(llm: outpace.LLM) -> None:
    found = agreement(llm, llm, IDS, 50)
    assert (found.top1, found.mean_kl, found.max_kl) == (1, 0, 0)
    assert (found.exact, found.kept, found.tokens) == (True, 97, len(IDS) - 3)


def test_a_changed_model_agrees_less(llm: outpace.LLM, other: outpace.LLM) -> None:
    found = evaluate(other, against=llm, text=IDS, window=50)
    changed = tiny("llama")
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    p, q = torch.cat(logprobs(IDS, 50, 50)), torch.cat(logprobs(IDS, 50, 50, changed))
    divergence = (p.exp() * (p - q)).sum(1)
    assert found.agreement is not None
    assert found.agreement.top1 == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))
    assert 0.5 < found.agreement.top1 < 1
    assert found.agreement.mean_kl == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert found.agreement.max_kl == pytest.approx(float(divergence.max()), rel=1e-3)
    assert found.against is not None
    assert found.increase == pytest.approx(found.model.perplexity / found.against.perplexity - 1)


def test_kl_is_a_lower_bound_where_the_host_keeps_less(llm: outpace.LLM, other: outpace.LLM) -> None:
    exact = agreement(other, llm, IDS, 50)
    bounds = [agreement(other, llm, IDS, 50, host_bytes=8 * 147 * kept) for kept in (1, 8, 40)]
    assert [(bound.kept, bound.exact) for bound in bounds] == [(1, False), (8, False), (40, False)]
    kl = [bound.mean_kl for bound in bounds]
    assert 0 < kl[0] < kl[1] < kl[2] < exact.mean_kl * (1 + 1e-6)
    assert kl[2] > 0.9 * exact.mean_kl
    assert {bound.top1 for bound in bounds} == {exact.top1}


def test_special_tokens_before_a_text_begin_every_window(tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers.processors import TemplateProcessing

    from outpace.loading.windows import make_windows, read_tokens
    from tests.models import byte_tokenizer

    with_start = byte_tokenizer()
    end = with_start.eos_token_id
    special = [(with_start.eos_token, end)]
    with_start.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{with_start.eos_token} $A", special_tokens=special
    )
    tokens = read_tokens(with_start, "abcdefg", None)
    assert (tokens.prefix, len(tokens.ids), tokens.num_bytes) == ([end], 7, 7)
    windows = make_windows(tokens, 4)
    assert [tokens.of(window) for window in windows] == [[end, *tokens.ids[n : n + 3]] for n in (0, 3, 6)]
    assert [(window.first, window.place) for window in windows] == [(1, 0), (1, 3), (1, 6)]
    assert read_tokens(tokenizer, "abcdefg", None).prefix == []


def test_a_text_and_its_bytes(chain_llm: outpace.LLM) -> None:
    found = evaluate(chain_llm, text="world é日", window=8).model
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2))  # one token for each byte
    cut = evaluate(chain_llm, text="world é日", max_tokens=4).model
    assert (cut.tokens, cut.tokens_per_byte) == (3, 1)


def test_names_are_loaded_and_options_act(chain_folder: Path) -> None:
    found = evaluate(chain_folder, text="world world", **CPU, against_options={"device": "cpu", "dtype": "bf16"})
    assert (found.model.dtype, found.against and found.against.dtype) == ("float32", "bfloat16")
    assert found.agreement is not None
    assert found.agreement.top1 > 0.9


def test_progress_is_told_for_each_model(llm: outpace.LLM) -> None:
    told: list[tuple[str, int, int]] = []
    evaluate(llm, against=llm, text=IDS, progress=lambda *step: told.append(step))
    assert [step for step in told if step[1] and step[1] == step[2]] == [("LlamaForCausalLM", 147, 147)] * 2


def test_int8_is_an_option_and_not_what_is_computed_in(chain_folder: Path) -> None:
    found = evaluate(chain_folder, text="world world", device="cpu", dtype="int8", kv_cache_dtype="int8")
    assert (found.model.dtype, found.model.options) == ("float32", "dtype=int8, quant.kv_cache_dtype=int8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"text": ""}, "text: it is empty"),
        ({"text": " \n"}, "text: it is empty"),
        ({"text": "a"}, "text: 1 tokens are too few to predict any; give a longer text"),
        ({"text": []}, "text: expected text or token ids that are not empty"),
        ({"text": [1, "a"]}, "text: expected text or token ids"),
        ({"text": [1, 999]}, "prompt_token_ids: token id 999 is outside the model's vocabulary"),
        ({"text": "\ud800 and more"}, "text: the tokenizer cannot read it"),
        ({"window": 1}, "window: expected an integer from 2"),
        ({"window": 2.5}, "window: expected an integer from 2"),
        ({"window": 513}, "window: 513 is more than the 512 tokens that the model takes; ask for 512 or fewer"),
        ({"window": 8, "stride": 9}, "stride: expected 1 to 8 with window=8, got 9"),
        ({"window": 8, "stride": 0}, "stride: expected 1 to 8 with window=8, got 0"),
        ({"max_tokens": 1}, "max_tokens: expected an integer from 2"),
        ({"host_bytes": -1}, "host_bytes: expected an integer from 0"),
        ({"dtype": "fp32"}, "dtype: the LLM was made without it"),
        ({"against_options": {"dtype": "fp32"}}, "against: the same model with other options has to be loaded again"),
    ],
)
def test_bad_input(chain_llm: outpace.LLM, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        evaluate(chain_llm, **{"text": "hello world", **options})
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "text: it is empty"),
        (b"caf\xe9 and more", "is not UTF-8 text from byte 3 on; give a text file"),
        (b"PK\0\0 and more", "contains zero bytes and is not text; give a text file"),
        (None, "(No such file or directory); give a text file"),
    ],
)
def test_a_file_that_is_not_text(chain_llm: outpace.LLM, tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError) as error:
        evaluate(chain_llm, text=file)
    assert said in str(error.value)


def test_other_tokenizers_are_refused_before_anything_is_loaded(
    chain_folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    from tests.models import chain_model

    longer = outpace.LLM(chain_model(tokenizer), tokenizer=tokenizer, device="cpu")
    longer.tokenizer = None
    with pytest.raises(InputError, match="text: the model has no tokenizer"):
        evaluate(longer, against=chain_folder, text="hello world")
    model = chain_model(tokenizer)
    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path / "larger")
    tokenizer.save_pretrained(tmp_path / "larger")
    with pytest.raises(InputError, match="evaluate each alone, and compare their bits per byte"):
        evaluate(chain_folder, against=tmp_path / "larger", text="hello world", **CPU)


def test_vocabularies_of_live_models_are_compared_too(llm: outpace.LLM) -> None:
    larger = outpace.LLM(tiny("llama", vocab_size=101), **CPU)
    with pytest.raises(InputError, match="against: its vocabulary has 97 tokens and the model's 101"):
        agreement(larger, llm, IDS)
    assert perplexity(larger, IDS).tokens  # it goes on working


def test_nan_is_an_error_that_says_where() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[IDS[20]] = torch.nan
    with pytest.raises(
        ModelError, match=r"LlamaForCausalLM in float32 gives NaN or infinite losses at \d+ of 49 tokens"
    ):
        perplexity(outpace.LLM(model, **CPU), IDS[:50])


@pytest.mark.parametrize("model", [5, ["a"], object()])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(ModelError, match=r"model: expected a name, a path, a torch\.nn\.Module or an LLM, got"):
        evaluate(model, text="hello world")
    with pytest.raises(ModelError, match=r"against: expected a name, a path, a torch\.nn\.Module or an LLM, got"):
        evaluate(tiny("llama"), against=model, text=[1, 2, 3])


def test_a_live_module_needs_a_tokenizer_for_text(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match="text: the model has no tokenizer; pass token ids, or a tokenizer"):
        evaluate(tiny("llama", vocab_size=300), text="hello world")
    with pytest.raises(InputError, match="tokenizer: expected a Hugging Face tokenizer, got str"):
        evaluate(tiny("llama", vocab_size=300), text="hello world", tokenizer="byte")
    found = evaluate(tiny("llama", vocab_size=300), text="hello world", tokenizer=tokenizer, **CPU)
    assert found.model.tokens == 10


def test_windows_longer_than_a_step_and_a_piece() -> None:
    """The logits of a prompt come in pieces, of several steps; those of a preempted request come again."""
    ids = prompts(700)[0].tolist()
    model = tiny("llama", max_position_embeddings=600)
    llm = outpace.LLM(tiny("llama", max_position_embeddings=600), **CPU, max_num_batched_tokens=333, max_num_seqs=2)
    found, expected = perplexity(llm, ids, 600, 100), logprobs(ids, 600, 100, model)
    targets = torch.tensor(ids[1:])
    losses = -torch.cat(expected).gather(1, targets[:, None])
    assert found.nats == pytest.approx(float(losses.mean()), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_on_a_gpu(dtype: str) -> None:
    found = evaluate(tiny("llama"), against=tiny("llama"), text=IDS, window=40, device="cuda", dtype=dtype,
                     against_options={"device": "cpu", "dtype": "fp32"})  # fmt: skip
    assert found.against is not None
    assert found.agreement is not None
    close = {"fp32": 1e-3, "bf16": 0.1}[dtype]
    assert found.model.nats == pytest.approx(found.against.nats, rel=close)
    assert found.agreement.mean_kl < close
    assert found.agreement.top1 > {"fp32": 0.97, "bf16": 0.8}[dtype]


def test_the_built_in_text_is_small_and_plain() -> None:
    text = built_in_text()
    assert len(text.split()) > 2000
    assert len(text.encode()) < 40_000
    assert text.isascii()


@pytest.mark.real
def test_the_default_model_has_its_known_perplexity(default_model_folder: Path) -> None:
    found = evaluate(default_model_folder, text=TEXT, **CPU, against_options={"device": "cpu", "dtype": "bf16"})
    assert found.against is not None
    assert found.agreement is not None
    assert found.model.perplexity == pytest.approx(28.27, rel=0.001)
    assert abs(found.increase or 0) < 0.01
    assert found.agreement.exact
    assert found.agreement.top1 > 0.95
    assert found.agreement.mean_kl < 0.01
    assert 0.5 < (found.model.bits_per_byte or 0) < 1.5
