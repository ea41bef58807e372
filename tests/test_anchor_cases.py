"""What the engines' own helpers answered, judged as cases."""

from pathlib import Path

from equivalence.judge import check
from equivalence.store import load_cases
from equivalence.verdict import Status

CASES = Path(__file__).parent.parent / "fixtures" / "anchors" / "cases"


def test_the_engines_own_answers_are_equal() -> None:
    """Published blocks, picks among them and packed rows: every row is legal, and rows select."""
    told = {}
    for case in load_cases(CASES):
        verdict = check(case)
        (stage,) = verdict.stages.values()
        counts = {kind: n for kind, n in stage.counts.items() if n and kind != "positions"}
        told[case.name] = (verdict.status, counts)
    assert told == {
        "sglang-consume": (
            Status.EQUAL,
            {"selecting": 53, "short": 1, "empty": 2, "rows": 56, "identical": 6, "reordered": 31}
            | {"tied": 19},
        ),
        "sglang-publish": (
            Status.EQUAL,
            {"selecting": 29, "short": 13, "empty": 2, "rows": 44, "identical": 33, "tied": 11},
        ),
        "vllm-expand": (Status.EQUAL, {"rows": 46, "identical": 46}),
    }
