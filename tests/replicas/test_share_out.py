"""GPUs and processors for each replica."""

import pytest

from outpace.config import AskedConfig
from outpace.errors import ConfigError
from outpace.replicas import share_out
from outpace.replicas.share_out import SHARE, THREADS, VISIBLE, environments


def test_each_replica_gets_gpus_of_its_own() -> None:
    found = environments(2, 2, None, 5, 8, {"A": "b"})
    assert found == [{"A": "b", VISIBLE: "0,1"}, {"A": "b", VISIBLE: "2,3"}]


def test_gpus_that_the_user_chose_are_shared_out_by_their_names() -> None:
    found = environments(2, 1, "cuda", 2, 8, {VISIBLE: "3, GPU-7"})
    assert [each[VISIBLE] for each in found] == ["3", "GPU-7"]


def test_too_few_gpus_are_said_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"replicas: 3 replicas of 2 GPUs each need 6, and there are 4; ask for fewer"
    ):
        environments(3, 2, None, 4, 8, {})
    assert environments(3, 2, None, 4, 8, {SHARE: "1"}) == [{SHARE: "1"}] * 3


def test_one_device_is_not_enough_for_several() -> None:
    with pytest.raises(ConfigError, match=r"device: 'cuda:1' is one device, and there are 2 replicas; give 'cuda'"):
        environments(2, 1, "cuda:1", 4, 8, {})


@pytest.mark.parametrize(("gpus", "device"), [(0, None), (4, "cpu"), (0, "cuda")])
def test_processors_are_shared_out_unless_the_user_has_said_how_many(gpus: int, device: str | None) -> None:
    assert environments(3, 1, device, gpus, 8, {}) == [{THREADS: "2"}] * 3
    assert environments(2, 2, device, gpus, 2, {}) == [{THREADS: "1"}] * 2
    assert environments(2, 1, device, gpus, 8, {THREADS: "5"}) == [{THREADS: "5"}] * 2


def test_the_ranks_of_a_replica_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_out, "num_gpus", lambda: 4)
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.delenv(SHARE, raising=False)
    found = share_out.for_replicas(AskedConfig.of({"tensor_parallel_size": 2}), 2)
    assert [each[VISIBLE] for each in found] == ["0,1", "2,3"]
