"""`scripts/bench offload` with a tiny model on a CPU: its runs stand beside what the planner predicts."""

from bench import offload


def test_a_case_with_a_budget_of_memory() -> None:
    rows, facts = offload.measure(offload.CASES["tiny"][0])
    memory, rate, step = rows
    assert memory["limit"] == 260_000 / 1e9
    assert rate["what"] == "tiny: 3 x 8/4"
    assert rate["best other"].endswith(" (the planner)")
    assert step["figure"] > 0
    (found,) = facts["runs"]
    assert found["seconds"] > found["step_seconds"] > 0
    assert found["predicted_seconds"] > 0
    assert facts["tiers"]["host"] > 0
