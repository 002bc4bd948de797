"""`scripts/bench kv_tier --tiny`: what comes back comes from host memory, and beside it, what is computed again."""

import json
from pathlib import Path

from bench import kv_tier


def test_conversations_come_back_from_host_memory(tmp_path: Path) -> None:
    kv_tier.main(["--tiny", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("kv_tier_*.json")
    found = json.loads(file.read_text())
    tier, off = found["details"]["tier"], found["details"]["off"]
    assert tier["levels"]["host_hits"] > 0
    assert tier["loaded_bytes"] > 0
    assert tier["cached_tokens"] > 0.7 * tier["prompt_tokens"]
    assert off["cached_tokens"] == 0
    assert off["levels"] == {}
    assert len(found["rows"]) == 6
    assert all(row["figure"] > 0 and row["best other"].endswith(" (recomputed)") for row in found["rows"])
    assert [row["limit"] != "-" for row in found["rows"]] == [True, False, False, True, False, False]
    assert list(tmp_path.glob("kv_tier_*.md"))
