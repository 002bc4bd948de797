"""RaggedEngine: the runtime's forward for people who schedule themselves."""

from typing import Any

import pytest
import torch

from outpace import ConfigError, InputError, RaggedEngine, SchedulingError, SchedulingResult
from tests.models import tiny

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "num_blocks": 8,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
}


@pytest.fixture
def engine() -> RaggedEngine:
    return RaggedEngine(tiny("llama"), **OPTIONS)


def own_logits(tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = tiny("llama")(torch.tensor([tokens])).logits[0, -1]
    return logits


def test_pieces_of_several_sequences_give_hugging_faces_logits(engine: RaggedEngine) -> None:
    first, second = (row.tolist() for row in torch.randint(3, 97, (2, 22), generator=torch.Generator().manual_seed(1)))
    engine.put([7], [first[:11]])
    logits = engine.put([3, 7], [second[:5], torch.tensor(first[11:])])
    assert torch.allclose(logits, torch.stack([own_logits(second[:5]), own_logits(first)]), atol=1e-5)
    logits = engine.put([7, 3], [[int(logits[1].argmax())], second[5:]])
    assert torch.allclose(logits[1], own_logits(second), atol=1e-5)


def test_flush_frees_pages_and_the_uid(engine: RaggedEngine) -> None:
    tokens = torch.randint(3, 97, (20,)).tolist()
    engine.put([1], [tokens])
    assert engine.free_blocks == 6
    assert engine.get_remaining_block_capacity(1) == 12
    engine.flush(1)
    assert engine.free_blocks == 8
    assert torch.allclose(engine.put([1], [tokens[:3]])[0], own_logits(tokens[:3]), atol=1e-5)
    with pytest.raises(InputError, match="uid: 9 is not a sequence"):
        engine.flush(9)


def test_what_fits_is_known_beforehand(engine: RaggedEngine) -> None:
    assert engine.can_schedule([1], [24]) is SchedulingResult.Success
    assert engine.can_schedule([1], [25]) is SchedulingResult.BatchTokenLimitExceeded
    assert engine.can_schedule([1, 2, 3, 4, 5], [1] * 5) is SchedulingResult.BatchSequenceLimitExceeded
    for uid in range(4):
        engine.put([uid], [[5] * 20])
    assert engine.can_schedule([9], [1]) is SchedulingResult.EngineSequenceLimitExceeded
    assert engine.query(0, 100, 1) == (28, 1)
    assert engine.query(0, 3, 5) == (3, 0)
    assert engine.can_schedule([0], [13]) is SchedulingResult.KVCacheLimitExceeded
    engine.flush(1)
    engine.put([0], [[5] * 20])
    engine.put([0], [[5] * 8])
    assert engine.can_schedule([0], [17]) is SchedulingResult.SequenceTokenLimitExceeded


@pytest.mark.parametrize(
    ("uids", "tokens", "message"),
    [
        ([], [], "batch_uids: expected one or more"),
        ([1, 1], [[5], [6]], "batch_uids: expected one or more, each once"),
        ([1], [[]], "batch_tokens: expected one or more token ids for uid 1"),
        ([1], [[97]], "batch_tokens: uid 1: token id 97 is outside the model's vocabulary of 97"),
        ([1], [[5, -1]], "batch_tokens: uid 1: token id -1 is outside"),
        ([1], [["a"]], "batch_tokens: expected token ids"),
        ([1], [[5] * 25], "put: BatchTokenLimitExceeded; put fewer tokens"),
    ],
)
def test_bad_batches_are_refused_and_change_nothing(
    engine: RaggedEngine, uids: list[int], tokens: list[list[int]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        engine.put(uids, tokens)
    assert engine.free_blocks == 8


def test_item_25_fastgens_calls(engine: RaggedEngine) -> None:
    assert [result.value for result in SchedulingResult] == [0, 1, 2, 3, 4, 5]
    assert engine.can_schedule([1], [3]) is SchedulingResult.Success
    assert engine.can_schedule([1], [3]) == 0
    assert isinstance(engine.free_blocks, torch.Tensor)
    assert (engine.free_blocks.shape, engine.n_kv_cache_groups) == ((1,), 1)
    assert engine.free_blocks[0] == 8
    lengths = (torch.tensor([3, 4]), [torch.tensor(3), torch.tensor(4)], (3, 4))
    assert {engine.can_schedule(torch.tensor([1, 2]), each) for each in lengths} == {SchedulingResult.Success}
    assert engine.can_schedule([torch.tensor(1)], torch.tensor([25])) is SchedulingResult.BatchTokenLimitExceeded
    assert engine.query(1, torch.tensor(40), engine.free_blocks) == (40, 3)
    tokens = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]
    logits = engine.put([1, 2], iter(tokens), do_checks=False)
    assert torch.allclose(logits, torch.stack([own_logits([3, 4, 5]), own_logits([6, 7])]), atol=1e-5)


@pytest.mark.parametrize("do_checks", [True, False])
def test_item_25_what_does_not_fit_is_a_scheduling_error(engine: RaggedEngine, do_checks: bool) -> None:
    with pytest.raises(SchedulingError, match="put: BatchTokenLimitExceeded; put fewer tokens") as caught:
        engine.put([1], [[5] * 25], do_checks=do_checks)
    assert caught.value.result is SchedulingResult.BatchTokenLimitExceeded
    assert isinstance(caught.value, RuntimeError)
    for uid in (0, 1, 2, 0, 1):
        engine.put([uid], [[5] * 24])
    with pytest.raises(SchedulingError) as caught:
        engine.put([2], [[5] * 24], do_checks=do_checks)
    assert caught.value.result is SchedulingResult.KVCacheLimitExceeded
    with pytest.raises(InputError, match="batch_uids: expected one or more, each once"):
        engine.put([1, 1], [[5], [6]], do_checks=do_checks)


def test_uids_are_integers_and_counts_are_counted(engine: RaggedEngine) -> None:
    engine.put(torch.tensor([1]), [[3, 4, 5]])
    engine.put(torch.tensor([1]), [[6]])
    assert torch.allclose(engine.put([1], [[7]])[0], own_logits([3, 4, 5, 6, 7]), atol=1e-5)
    for uids in (["1"], [1.0], [True], 5):
        with pytest.raises(InputError, match="batch_uids: expected a list of integers"):
            engine.put(uids, [[3]])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batch_tokens: 1 pieces for 2 uids"):
        engine.put([1, 2], [[3]])
    with pytest.raises(InputError, match="lengths: expected integers from 0"):
        engine.can_schedule([1], [-5])
    with pytest.raises(InputError, match="max_request_tokens: expected integers from 0"):
        engine.query(1, -3, 2)


def test_after_an_error_the_sequences_of_the_batch_begin_again(
    engine: RaggedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.put([1, 2], [[3, 4], [5]])
    with monkeypatch.context() as patch:

        def broken(step: object) -> None:
            raise ZeroDivisionError

        patch.setattr(engine._runner, "run", broken)
        with pytest.raises(ZeroDivisionError):
            engine.put([1], [[6]])
    assert engine.free_blocks == 7
    assert torch.allclose(engine.put([1], [[6, 7]])[0], own_logits([6, 7]), atol=1e-5)
    assert torch.allclose(engine.put([2], [[8]])[0], own_logits([5, 8]), atol=1e-5)


@pytest.mark.parametrize(
    "option",
    [
        *({"swap_space": 1}, {"max_waiting": 3}, {"seed": 1}, {"enable_prefix_caching": False}),
        *({"kv_offloading_size": 1}, {"offload": {"kv": "1MB"}}),
    ],
)
def test_options_of_the_scheduler_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="this engine has no scheduler"):
        RaggedEngine(tiny("llama"), **OPTIONS, **option)
