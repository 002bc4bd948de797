"""LLM: prompts in, answers out. The chain model says `CYCLE`, one byte for each token, then the end token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import outpace
from outpace import (
    LLM,
    ConfigError,
    FinishReason,
    InputError,
    ModelError,
    NotSupported,
    SamplingParams,
)
from tests.models import CYCLE, END, byte_tokenizer, chain_model, prompts, tiny

GREEDY = SamplingParams(temperature=0, max_tokens=64)
RAW = len(CYCLE.encode())  # tokens of one round, without the end token


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 64, **changes})


def answer(llm: LLM, prompt: str | list[int], params: SamplingParams = GREEDY) -> outpace.CompletionOutput:
    return llm.generate(prompt, params)[0].outputs[0]


@pytest.fixture(scope="module")
def random_llm() -> LLM:
    return LLM(tiny("llama"), device="cpu")


# generate


def test_an_answer_with_all_its_facts(chain_llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    (output,) = chain_llm.generate("?", GREEDY)
    assert output.prompt == "?"
    assert output.prompt_token_ids == tokenizer("?")["input_ids"]
    assert output.outputs[0].text == CYCLE
    assert output.outputs[0].token_ids == [*tokenizer(CYCLE)["input_ids"], tokenizer.eos_token_id]
    assert output.outputs[0].finish_reason is FinishReason.STOP
    assert output.finished
    assert output.decode_tokens_per_second is not None
    assert output.decode_tokens_per_second > 0
    assert output.metrics.time_to_first_token is not None


def test_many_prompts_with_one_set_of_parameters_or_one_each(chain_llm: LLM) -> None:
    texts = [output.outputs[0].text for output in chain_llm.generate(["?", "w", "E"], GREEDY, use_tqdm=False)]
    assert texts == [CYCLE, CYCLE[1:], "NDx"]
    outputs = chain_llm.generate(["?", "?"], [greedy(max_tokens=2), greedy(max_tokens=4)], use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["wo", "worl"]
    assert len({output.request_id for output in outputs}) == 2


def test_item_19_the_progress_bar_is_for_terminals_and_off_when_asked(
    chain_llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain_llm.generate(["?", "?"], greedy(max_tokens=1), use_tqdm=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any file for a terminal then
    chain_llm.generate(["?", "?"], greedy(max_tokens=1), use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    chain_llm.generate(["?", "?"], greedy(max_tokens=1), use_tqdm=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Generating" in err


def test_default_parameters(chain_llm: LLM) -> None:
    assert len(chain_llm.generate("?")[0].outputs[0].token_ids) <= 16


def test_token_ids_as_prompts(chain_llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("w")["input_ids"]
    assert answer(chain_llm, ids).text == CYCLE[1:]
    outputs = chain_llm.generate([ids, ids], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [None, None]
    assert [output.outputs[0].text for output in outputs] == [CYCLE[1:]] * 2


def test_max_tokens(chain_llm: LLM) -> None:
    result = answer(chain_llm, "?", greedy(max_tokens=5))
    assert (result.text, len(result.token_ids), result.finish_reason) == ("world", 5, FinishReason.LENGTH)


def test_max_tokens_in_the_middle_of_a_character(chain_llm: LLM) -> None:
    until = len("world é".encode()) - 1
    result = answer(chain_llm, "?", greedy(max_tokens=until))
    assert result.text == "world \ufffd"
    assert result.finish_reason is FinishReason.LENGTH


def test_the_end_token_is_passed_over_when_asked(chain_llm: LLM) -> None:
    result = answer(chain_llm, "?", greedy(max_tokens=RAW + 6, ignore_eos=True))
    assert result.text == f"{CYCLE}world"
    assert result.finish_reason is FinishReason.LENGTH
    shown = answer(chain_llm, "?", greedy(max_tokens=RAW + 6, ignore_eos=True, skip_special_tokens=False))
    assert shown.text == f"{CYCLE}{END}world"


def test_min_tokens_puts_off_the_end(chain_llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    short = answer(chain_llm, "x", greedy(max_tokens=8))
    assert len(short.token_ids) == 1
    later = answer(chain_llm, "x", greedy(min_tokens=3, max_tokens=8))
    assert len(later.token_ids) > 3
    assert tokenizer.eos_token_id not in later.token_ids[:3]
    assert len(answer(chain_llm, "?", greedy(min_tokens=RAW, max_tokens=RAW + 5)).token_ids) == RAW + 1


def test_nothing_of_the_models_own_generation_config_gets_in() -> None:
    model = tiny("llama")
    model.generation_config.update(do_sample=True, temperature=0.3, top_k=7, max_length=20, min_new_tokens=9)
    own = LLM(model, device="cpu")
    expected = answer(LLM(tiny("llama"), device="cpu"), [5, 6], greedy(max_tokens=20)).token_ids
    assert answer(own, [5, 6], greedy(max_tokens=20)).token_ids == expected
    end = expected[2]
    assert len(answer(own, [5, 6], greedy(max_tokens=20, stop_token_ids=[end])).token_ids) == expected.index(end) + 1


def test_stop_token_ids(chain_llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    stop = tokenizer("l")["input_ids"]
    result = answer(chain_llm, "?", greedy(stop_token_ids=stop))
    assert result.token_ids == tokenizer("worl")["input_ids"]
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, stop[0])
    assert answer(chain_llm, "?").stop_reason is None, "the model's own end is no reason"
    past = answer(chain_llm, "?", greedy(stop_token_ids=stop, ignore_eos=True))
    assert past.token_ids == result.token_ids, "ignore_eos concerns the model's own end tokens only"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("rld", "wo"),
        (["😀!", "ENDx"], "world é日"),
        ("日😀", "world é"),
        ("w", ""),
        ("x!", CYCLE),
        (["EN", "NDx"], None),
    ],
)
def test_stop_strings_across_token_borders(chain_llm: LLM, stop: str | list[str], text: str | None) -> None:
    result = answer(chain_llm, "?", greedy(stop=stop))
    assert result.text == (CYCLE.partition("EN")[0] if text is None else text)
    assert result.finish_reason is FinishReason.STOP


def test_a_stop_string_is_named_and_kept_when_asked(chain_llm: LLM) -> None:
    kept = answer(chain_llm, "?", greedy(stop=["zzz", "日😀"], include_stop_str_in_output=True))
    assert (kept.text, kept.stop_reason, kept.finish_reason) == ("world é日😀", "日😀", FinishReason.STOP)
    assert len(kept.token_ids) == len("world é日😀".encode())


def test_bad_words_do_not_come(chain_llm: LLM) -> None:
    assert "rl" in answer(chain_llm, "?").text
    assert "rl" not in answer(chain_llm, "?", greedy(bad_words=["rl"], ignore_eos=True)).text
    one = answer(chain_llm, "?", greedy(bad_words=["o"], ignore_eos=True)).text
    assert "o" not in one
    assert one.startswith("w")


def test_some_tokens_only(chain_llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    allowed = tokenizer("wo")["input_ids"]
    assert set(answer(chain_llm, "?", greedy(max_tokens=9, allowed_token_ids=allowed)).text) <= set("wo")
    letter = tokenizer("Q")["input_ids"][0]
    assert answer(chain_llm, "?", greedy(max_tokens=3, logit_bias={letter: 100.0})).text == "QQQ"


def test_a_character_that_the_prompt_began(chain_llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("é")["input_ids"]
    assert len(ids) == 2
    assert answer(chain_llm, ids[:1], greedy(max_tokens=2)).text.startswith("é")


def test_greedy_is_hugging_faces_greedy(random_llm: LLM) -> None:
    for row in prompts(6, 3):
        expected = tiny("llama").generate(row[None], max_new_tokens=20)[0, len(row) :].tolist()
        assert answer(random_llm, row.tolist(), greedy(max_tokens=20)).token_ids == expected


def test_a_seed_repeats_and_leaves_the_global_generator_alone(random_llm: LLM) -> None:
    prompt = prompts(6)[0].tolist()
    params = [SamplingParams(seed=seed, max_tokens=20, temperature=1.5) for seed in (1, 1, 2)]
    state = torch.get_rng_state()
    first, second, third = (answer(random_llm, prompt, one).token_ids for one in params)
    assert first == second
    assert first != third
    assert torch.equal(torch.get_rng_state(), state)
    free = SamplingParams(max_tokens=20, temperature=1.5)
    assert answer(random_llm, prompt, free).token_ids != answer(random_llm, prompt, free).token_ids


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_the_narrowest_sampling_is_greedy(random_llm: LLM, narrow: dict[str, Any]) -> None:
    prompt = prompts(6)[0].tolist()
    expected = answer(random_llm, prompt, greedy(max_tokens=20)).token_ids
    assert answer(random_llm, prompt, SamplingParams(max_tokens=20, temperature=1.5, **narrow)).token_ids == expected


def test_the_repetition_penalty_acts(random_llm: LLM) -> None:
    prompt = prompts(6)[0].tolist()
    penalised = answer(random_llm, prompt, greedy(max_tokens=20, repetition_penalty=100.0)).token_ids
    assert len(set(penalised)) == 20
    assert len(set(answer(random_llm, prompt, greedy(max_tokens=20)).token_ids)) < 20


# stream


def test_the_pieces_of_a_stream_are_the_answer(chain_llm: LLM) -> None:
    for params in (GREEDY, greedy(stop="END"), greedy(stop=["😀!", "l d"]), greedy(max_tokens=9)):
        shown, steps = "", 0
        for output in chain_llm.stream("?", params):
            text = output.outputs[0].text
            assert text.startswith(shown), "text was shown and taken back"
            shown, steps = shown + text[len(shown) :], steps + 1
            assert len(output.outputs[0].token_ids) == steps
        whole = answer(chain_llm, "?", params)
        assert shown == whole.text
        assert steps == len(whole.token_ids)


def test_a_stream_is_finished_only_at_its_end(chain_llm: LLM) -> None:
    states = [(output.finished, output.outputs[0].finish_reason) for output in chain_llm.stream("?", GREEDY)]
    assert states[-1] == (True, FinishReason.STOP)
    assert set(states[:-1]) == {(False, None)}


def test_a_stream_can_be_left_early(random_llm: LLM) -> None:
    stream = random_llm.stream(prompts(6)[0].tolist(), greedy(max_tokens=58))
    for output in stream:
        if len(output.outputs[0].token_ids) == 3:
            break
    stream.close()  # type: ignore[attr-defined]
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert len(answer(random_llm, [5, 6], greedy(max_tokens=4)).token_ids) == 4, "the next request is blocked"
    assert len(output.outputs[0].token_ids) == 3


def test_a_stream_that_is_never_read_starts_nothing(chain_llm: LLM) -> None:
    chain_llm.stream("?", GREEDY)
    assert chain_llm.engine.scheduler.num_waiting == 0


def test_two_streams_at_once_do_not_mix(chain_llm: LLM) -> None:
    first, second = chain_llm.stream("?", GREEDY), chain_llm.stream("E", GREEDY)
    next(first)
    assert list(second)[-1].outputs[0].text == "NDx"
    assert list(first)[-1].outputs[0].text == CYCLE


def test_what_cannot_run_is_refused(chain_llm: LLM) -> None:
    with pytest.raises(InputError, match="prompt_token_ids: token id 9999 is outside the model's vocabulary of 257"):
        chain_llm.generate([9999], GREEDY)
    with pytest.raises(InputError, match=r"prompt_token_ids: expected one or more token ids, .*; -1 is negative"):
        chain_llm.generate([[5, -1]], GREEDY)
    with pytest.raises(InputError, match="prompt: its 512 tokens leave no room for an answer in max_model_len=512"):
        chain_llm.stream("?" * 512, greedy(max_tokens=600))
    with pytest.raises(InputError, match="half of a surrogate pair; remove it"):
        chain_llm.generate("\ud800", GREEDY)
    assert answer(chain_llm, "?").text == CYCLE


# as vLLM's users call it


@pytest.mark.parametrize("asked", [{"max_tokens": None}, {"max_tokens": 600}, {"max_tokens": 600, "min_tokens": 600}])
def test_item_23_an_answer_goes_to_the_end_of_the_context(random_llm: LLM, asked: dict[str, Any]) -> None:
    params = greedy(ignore_eos=True, **asked)
    (output,) = random_llm.generate([5] * 12, params)
    result = output.outputs[0]
    assert (len(result.token_ids), result.finish_reason) == (random_llm.max_model_len - 12, FinishReason.LENGTH)
    assert list(random_llm.stream([5] * 12, params))[-1].outputs[0].token_ids == result.token_ids


def test_item_23_an_answer_to_the_end_of_a_small_cache() -> None:
    small = LLM(tiny("llama"), device="cpu", block_size=16, num_blocks=2)
    result = answer(small, [5] * 12, greedy(max_tokens=None, ignore_eos=True))
    assert (len(result.token_ids), result.finish_reason) == (32 + 1 - 12, FinishReason.LENGTH)
    with pytest.raises(InputError, match="do not fit the cache of 32 tokens; ask for fewer or raise num_blocks"):
        small.generate([5] * 12, greedy(max_tokens=40))


def test_item_23_prompts_as_dicts(chain_llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert chain_llm.get_tokenizer() is tokenizer
    ids = tokenizer("?")["input_ids"]
    asked: list[Any] = [{"prompt": "?"}, {"prompt_token_ids": ids}, {"prompt": "?", "prompt_token_ids": ids}, "?"]
    outputs = chain_llm.generate(asked, GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [CYCLE] * 4
    assert [output.prompt for output in outputs] == ["?", None, "?", "?"]
    assert chain_llm.generate({"prompt_token_ids": ids, "cache_salt": "s"}, GREEDY)[0].outputs[0].text == CYCLE
    assert list(chain_llm.stream({"prompt": "?"}, GREEDY))[-1].outputs[0].text == CYCLE


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt": "?", "multi_modal_data": {}}, "prompt: 'multi_modal_data' is unknown; a dict has prompt or"),
        ({}, "prompt: expected text or token ids that are not empty, got None"),
        ({"prompt": [5]}, "prompt: expected text in the dict's prompt, got"),
        ({"prompt_token_ids": "?"}, "prompt_token_ids: expected a list of token ids, got '?'"),
        ({"prompt": "?", "cache_salt": 5}, "cache_salt: expected a string, got 5"),
    ],
)
def test_item_23_dicts_that_are_no_prompts(chain_llm: LLM, prompt: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        chain_llm.generate(prompt, GREEDY)


def test_item_23_without_text(chain_llm: LLM) -> None:
    result = answer(chain_llm, "?", greedy(detokenize=False, logprobs=1, bad_words=["w"]))
    assert (result.text, len(result.token_ids) > 1) == ("", True)
    assert result.logprobs is not None
    assert {entry.decoded_token for found in result.logprobs for entry in found.values()} == {None}
    with pytest.raises(InputError, match="stop: stop strings need the text; remove detokenize=False, or use stop_tok"):
        greedy(detokenize=False, stop="x")


def test_item_23_priorities_of_prompts() -> None:
    llm = LLM(tiny("llama"), device="cpu", max_num_seqs=1)
    ended: list[int] = []
    for given in ([2, 0, 1], (2, 0, 1)):
        outputs = llm.generate([[5], [6], [7]], greedy(max_tokens=3), priority=given, use_tqdm=False)
        times = [output.metrics.last_token_time or 0.0 for output in outputs]
        ended = sorted(range(3), key=times.__getitem__)
        assert ended == [1, 2, 0]
    assert len(llm.generate([[5], [6]], greedy(max_tokens=3), priority=4, use_tqdm=False)) == 2
    for wrong in ([1], "12", [1, 2, "x"], 1.5):
        with pytest.raises(InputError, match="priority: expected an integer"):
            llm.generate([[5], [6], [7]], greedy(max_tokens=3), priority=wrong)  # type: ignore[arg-type]


# chat


def test_a_conversation_is_written_out_with_the_template(chain_llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "é"}, {"role": "user", "content": "hi"}]
    ids = chain_llm.apply_chat_template(messages)
    assert tokenizer.decode(ids) == "system=é;user=hi;assistant="
    (output,) = chain_llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == ids
    assert output.outputs[0].text == CYCLE


def test_template_options_are_passed_on(chain_llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(chain_llm.apply_chat_template(messages, add_generation_prompt=False)) == "user=hi;"
    other = chain_llm.apply_chat_template(messages, chat_template="{{ messages[0]['content'] }}!")
    assert tokenizer.decode(other) == "hi!"


def test_a_tokenizer_without_a_template() -> None:
    plain = byte_tokenizer(chat=False)
    llm = LLM(chain_model(plain), tokenizer=plain, device="cpu")
    with pytest.raises(ModelError, match="chat: the tokenizer has no chat template; use generate"):
        llm.chat([{"role": "user", "content": "hi"}])
    ids = llm.apply_chat_template([{"role": "user", "content": "hi"}], chat_template="{{ messages[0]['content'] }}")
    assert plain.decode(ids) == "hi"


# models


def test_a_live_module_without_a_tokenizer(random_llm: LLM) -> None:
    result = answer(random_llm, [5, 6, 7], greedy(max_tokens=4))
    assert len(result.token_ids) == 4
    assert result.text == ""
    assert random_llm.name == "LlamaForCausalLM"
    with pytest.raises(ModelError, match=r"generate: the model has no tokenizer; .* pass LLM\(tokenizer="):
        random_llm.generate("text")
    with pytest.raises(ModelError, match="stop: stop strings need a tokenizer"):
        random_llm.generate([5], SamplingParams(stop="x"))
    with pytest.raises(ModelError, match="bad_words: they need a tokenizer"):
        random_llm.generate([5], SamplingParams(bad_words=["x"]))
    with pytest.raises(ModelError, match="chat: the model has no tokenizer"):
        random_llm.chat([{"role": "user", "content": "hi"}])


def test_a_live_module_keeps_its_dtype_unless_another_is_asked_for() -> None:
    own = LLM(tiny("llama").to(torch.bfloat16), device="cpu")
    assert (own.dtype, own.dtype_reason) == (torch.bfloat16, "the module's own")
    assert len(answer(own, [5, 6], greedy(max_tokens=4)).token_ids) == 4
    asked = LLM(tiny("llama"), dtype="fp16", device="cpu")
    assert (asked.dtype, asked.dtype_reason) == (torch.float16, "asked for")


@pytest.mark.parametrize(("family", "error"), [("t5", NotSupported), ("bert", ModelError)])
def test_models_that_are_not_for_this(family: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"is an encoder-decoder model|is not a generative model"):
        LLM(tiny(family), device="cpu")


def test_the_length_is_the_models_own_unless_asked_for() -> None:
    assert LLM(tiny("llama"), device="cpu").max_model_len == 64
    shorter = LLM(tiny("llama"), device="cpu", max_model_len=20)
    assert shorter.max_model_len == 20
    assert len(answer(shorter, [5] * 12, greedy(max_tokens=8)).token_ids) == 8
    with pytest.raises(InputError, match="max_model_len=20"):
        shorter.generate([5] * 20, greedy(max_tokens=9))
    with pytest.raises(ConfigError, match="max_model_len: 65 is more than the 64 positions of the model"):
        LLM(tiny("llama"), device="cpu", max_model_len=65)


def test_a_folder(chain_folder: Path) -> None:
    for source in (chain_folder, str(chain_folder)):
        llm = LLM(source, device="cpu", dtype="fp32")
        assert llm.name == "chain"
        assert answer(llm, "?").text == CYCLE


@pytest.mark.real
def test_the_default_model_with_stop_strings_and_chat(default_model_folder: Path) -> None:
    llm = LLM(default_model_folder, device="cpu", dtype="fp32")
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy(max_tokens=12))
    text = output.outputs[0].text
    assert "Paris" in text
    (cut,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy(stop="aris"))
    assert cut.outputs[0].text == text.partition("aris")[0]
    assert cut.outputs[0].finish_reason is FinishReason.STOP


def test_the_seed_of_a_request_comes_before_that_of_the_config() -> None:
    model = tiny("llama")
    ids = [5, 6, 7, 8]
    seeded = outpace.LLM(model, seed=1, device="cpu")
    texts = [
        seeded.generate([ids], outpace.SamplingParams(max_tokens=12, seed=seed))[0].outputs[0].token_ids
        for seed in (2, 3, 2, None, None)
    ]
    assert texts[0] == texts[2] != texts[1]
    assert texts[3] == texts[4]


def test_options_as_a_config() -> None:
    llm = outpace.LLM(tiny("llama"), config={"kernel_inject": True, "device": "cpu", "cache": {"num_blocks": 5}})
    assert llm.config.cache.num_blocks == llm.engine.scheduler.pool.num_blocks == 5
    with pytest.raises(outpace.ConfigError, match="vocab_sise"):
        outpace.LLM(tiny("llama"), args={"vocab_sise": 5})
