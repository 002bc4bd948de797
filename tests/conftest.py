"""Fixtures that every test folder may use."""

import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import PreTrainedTokenizerFast

import outpace
from tests.fixtures_models import default_model_folder as default_model_folder
from tests.models import byte_tokenizer, chain_model, tiny


def pytest_configure() -> None:
    """One thread: tiny models gain nothing from more, and on a busy machine threads that spin took 5 times as long."""
    torch.set_num_threads(1)
    # examples may take longer on a busy machine
    settings.register_profile("outpace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("outpace")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: one more than cores, since many tests wait for other processes; at most 8, for their memory."""
    return min(8, len(os.sched_getaffinity(0)) + 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Measure coverage in the first two cases of each test and in every eighth: tracing makes a test up to three times
    as slow, and the cases of one test cover nearly the same lines. Of kernels only the first case is traced: Triton's
    interpreter runs them line by line. The tests themselves run all the same."""
    cases: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        case = cases[test]
        if case and (test.startswith("tests/kernels/") or (case > 1 and case % 8)):
            item.add_marker(pytest.mark.no_cover)
        cases[test] += 1


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, with a chat template."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def chain_llm(tokenizer: PreTrainedTokenizerFast) -> outpace.LLM:
    """An LLM that says `tests.models.CYCLE`."""
    return outpace.LLM(chain_model(tokenizer), tokenizer=tokenizer, device="cpu")


@pytest.fixture(scope="session")
def chain_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The chain model and its tokenizer as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "chain"
    chain_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama() -> outpace.InferenceEngine:
    """An engine of a tiny Llama, for tests that do not change it."""
    return outpace.init_inference(tiny("llama"), device="cpu", dtype=torch.float32)
