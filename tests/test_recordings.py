"""The ten recordings, judged: the figures the project stands on."""

from typing import Any

import pytest

from equivalence import load_cases
from equivalence.expected import mark, read
from equivalence.flags import fixtures_dir
from equivalence.judge import check
from equivalence.verdict import Status, Verdict

CASES = {case.name: case for case in load_cases(fixtures_dir() / "cases")}
FORESEEN = read(fixtures_dir() / "expected.toml")


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    """Every case judged once."""
    return {name: mark(check(case), FORESEEN.get(name)) for name, case in CASES.items()}


def per_run(verdict: Verdict, stage: str, count: str) -> list[int]:
    """One count of one output, run by run."""
    return [run.stages[stage].counts[count] for run in verdict.runs if stage in run.stages]


def test_nine_recordings_are_equal_and_one_is_wrong_as_foreseen(
    verdicts: dict[str, Verdict],
) -> None:
    """narrow-scores is DIFFERENT and expected; all others are EQUAL."""
    assert {n: (v.status, v.expected) for n, v in verdicts.items()} == {
        name: (Status.EQUAL, False) if name != "narrow-scores" else (Status.DIFFERENT, True)
        for name in CASES
    }


def test_every_recorded_logit_has_the_reference_bits(verdicts: dict[str, Verdict]) -> None:
    """No logit of the nine recordings with queries and keys differs."""
    cells: dict[str, Any] = {
        name: (verdict.stages["logits"].counts["compared"], verdict.stages["logits"].rules)
        for name, verdict in verdicts.items()
        if "logits" in verdict.stages
    }
    assert cells == {
        "batch-ragged": (294_912, {}),
        "paged-decode": (16_294, {}),
        "paged-draft": (14_597, {}),
        "prefill-causal": (196_608, {}),
        "qsa-bf16": (48_596, {}),
        "qsa-fp8": (48_596, {}),
        "relu-plateau": (294_912, {}),
        "repeated-prompt": (294_912, {}),
        "short-rows": (196_608, {}),
    }


def test_ties_are_counted_row_by_row(verdicts: dict[str, Verdict]) -> None:
    """Distinct scores tie nowhere; a plateau ties every row; repeated text ties most."""
    tied = {n: per_run(v, "raw_indices", "tied") for n, v in verdicts.items() if n[:3] != "qsa"}
    assert tied == {
        "batch-ragged": [0, 0],
        "narrow-scores": [0, 0],
        "paged-decode": [0, 0],
        "paged-draft": [1, 2],
        "prefill-causal": [0, 0],
        "relu-plateau": [48, 48],
        "repeated-prompt": [45, 42],
        "short-rows": [0, 0],
    }


def test_the_overflowing_bucket_loses_winners_in_every_row(verdicts: dict[str, Verdict]) -> None:
    """Both runs of narrow-scores lose picks in 8 of 8 rows, and the scores are not to blame."""
    assert per_run(verdicts["narrow-scores"], "raw_indices", "different") == [8, 8]
    assert [run.stages["raw_indices"].rules for run in verdicts["narrow-scores"].runs] == [
        {"lost-winner": 8},
        {"lost-winner": 8},
    ]


def test_the_control_arm_says_how_the_kernel_differs_from_itself(
    verdicts: dict[str, Verdict],
) -> None:
    """Two launches on the same logits: other sets where scores tie, other orders elsewhere."""
    control = {name: verdict.control.get("raw_indices") for name, verdict in verdicts.items()}
    assert control == {
        "batch-ragged": {"rows": 48, "identical": 16, "reordered": 32, "other_set": 0},
        "narrow-scores": {"rows": 8, "identical": 0, "reordered": 0, "other_set": 8},
        "paged-decode": {"rows": 6, "identical": 2, "reordered": 4, "other_set": 0},
        "paged-draft": {"rows": 6, "identical": 2, "reordered": 3, "other_set": 1},
        "prefill-causal": {"rows": 48, "identical": 0, "reordered": 48, "other_set": 0},
        "qsa-bf16": None,
        "qsa-fp8": None,
        "relu-plateau": {"rows": 48, "identical": 0, "reordered": 0, "other_set": 48},
        "repeated-prompt": {"rows": 48, "identical": 0, "reordered": 7, "other_set": 41},
        "short-rows": {"rows": 48, "identical": 36, "reordered": 12, "other_set": 0},
    }


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_case_holds_the_reference_digest_it_was_stored_with(name: str) -> None:
    """Cases with queries and keys carry a digest of the reference's logits."""
    assert sorted(CASES[name].reference) == ([] if name == "narrow-scores" else ["logits"])
