"""Reports: the words a user reads, and the JSON a machine does."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from equivalence import generate
from equivalence.case import Case
from equivalence.judge import check
from equivalence.report import as_json, as_text
from equivalence.verdict import Verdict
from refimpl import layer, topk

MESSAGES = Path(__file__).parent.parent / "messages"
ANY = "order=any,ties=any"


def right(**inputs: Any) -> Tensor:  # noqa: ANN401 - a candidate takes whatever the case holds
    """The reference itself."""
    return topk.ragged_topk(**inputs)


def loses_a_winner_to_a_tie(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Row 0 keeps one tied column more and loses its best."""
    picks = right(**inputs)
    scores = inputs["scores"][0, : int(inputs["row_end"][0])]
    tied = (scores == scores[picks[0, -1]]).nonzero()[:, 0].tolist()
    picks[0, 0] = next(column for column in tied if column not in picks[0].tolist())
    return picks


def breaks_structure(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Four rows, four rules, more than the message shows."""
    picks = right(**inputs)
    picks[0, 3] = picks[0, 2]
    picks[1, 5] = 10_000
    picks[2, 1] = -1
    picks[3, [0, 1]] = picks[3, [1, 0]]
    picks[3] = picks[3].flip(0)
    return picks


def wrong_layer(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
    """Weights of another sign, pages off by one."""
    inputs["weights"] = -inputs["weights"]
    out = layer.prefill_indexer(**inputs)
    out["page_indices"][1] += 1
    return out


def raises(**_: Any) -> Tensor:  # noqa: ANN401 - likewise
    """No picks at all."""
    raise RuntimeError("CUDA error: misaligned address")


def settled(text: str) -> str:
    """The text with a fixed place for where this file's own candidate raises."""
    return re.sub(r"test_report\.py:\d+", "kernel.py:1", text)


CASES: dict[str, tuple[Case, Callable[..., Any], str | None]] = {
    "lost-winner": (generate.ragged_topk(1), loses_a_winner_to_a_tie, ANY),
    "structure": (generate.ragged_topk(2), breaks_structure, None),
    "layer": (generate.prefill_indexer(3), wrong_layer, ANY),
    "crash": (generate.ragged_topk(1), raises, None),
    "nan": (generate.ragged_topk(1, scores=generate.Scores(nan=True)), right, None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_failure_reads_as_agreed(name: str) -> None:
    """What is wrong, where, both values in decimal and bits, what was allowed, how to run again."""
    case, candidate, contract = CASES[name]
    verdict = check(case, candidate, contract=contract)
    text = as_text.failure(
        verdict, saved="saved.safetensors (rows 0 1)", again="equivalence replay saved.safetensors"
    )
    assert settled(text) + "\n" == (MESSAGES / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_a_failure_never_suggests_loosening_the_contract(name: str) -> None:
    """It says what was allowed, not what to allow."""
    case, candidate, contract = CASES[name]
    text = as_text.failure(check(case, candidate, contract=contract)).lower()
    assert not any(word in text for word in ("try ", "consider", "--contract", "tolerance"))


def verdicts() -> list[Verdict]:
    """Four verdicts: equal with ties, different, undecided, expected."""
    tied = check(
        generate.ragged_topk(4), lambda **i: topk.ragged_topk(**i, ties="highest"), contract=ANY
    )
    wrong = check(generate.ragged_topk(2), breaks_structure)
    return [tied, wrong, check(generate.ragged_topk(1), raises), replace(wrong, expected=True)]


def test_the_counted_sentence_counts_everything() -> None:
    """Cases, rows, what was allowed and by whom, what is undecided."""
    assert as_text.summary(verdicts()) == SUMMARY
    assert as_text.summary([]) == "0 cases: nothing was judged; 0 undecided"


def test_the_counted_sentence_names_the_documented_contract() -> None:
    """All equal, and whose freedom was used."""
    verdict = check(
        generate.ragged_topk(4),
        lambda **i: topk.ragged_topk(**i, ties="highest"),
        contract="sgl_kernel.fast_topk_v2",
    )
    assert as_text.summary([verdict]) == NAMED


def test_a_case_takes_a_line_an_output() -> None:
    """Its status once, then every output over all runs."""
    assert [settled(as_text.case_lines(v, width=20)) for v in verdicts()] == LINES


def test_json_is_sorted_stable_and_says_the_true_status() -> None:
    """Two renderings are the same text; an expected difference stays DIFFERENT."""
    one, two = as_json.render(verdicts()), as_json.render(verdicts())
    assert one == two
    data = json.loads(one)
    assert (data["schema"], data["status"]) == (1, "DIFFERENT")
    assert [(c["status"], c["expected"]) for c in data["cases"]] == [
        ("EQUAL", False),
        ("DIFFERENT", False),
        ("UNDECIDED", False),
        ("DIFFERENT", True),
    ]
    stage = data["cases"][0]["stages"]["raw_indices"]
    assert {
        "rows",
        "identical",
        "reordered",
        "tied",
        "different",
        "selecting",
        "short",
        "empty",
    } <= set(stage)
    assert json.dumps(data, indent=1, sort_keys=True) == one


def test_a_finding_in_json_holds_both_values_in_decimal_and_bits() -> None:
    """Evidence is data: label, place, value, bits, note."""
    case, candidate, contract = CASES["lost-winner"]
    data = as_json.case_data(check(case, candidate, contract=contract))
    (finding,) = data["findings"]
    assert finding["detail"]["evidence"][0] == EVIDENCE
    assert (finding["rule"], finding["row"], finding["run"]) == ("lost-winner", 0, "candidate")


def test_the_environment_is_named() -> None:
    """Python, machine and the versions that matter."""
    assert as_json.environment()["torch"] == version("torch")


SUMMARY = "4 cases, 27 rows: 1 equal, 2 different (1 expected) (5 tied); 1 undecided"
NAMED = "1 case, 9 rows: all equal (5 tied, allowed by sgl_kernel.fast_topk_v2); 0 undecided"
BROKEN = "raw_indices     9 rows: 5 identical, 4 different (duplicate, out-of-window, hole, order)"
RAISED = "crash: RuntimeError: CUDA error: misaligned address (kernel.py:1)"
LINES = [
    "ragged_topk seed 4    EQUAL                 raw_indices     9 rows: 4 identical, 5 tied",
    f"ragged_topk seed 2    DIFFERENT             {BROKEN}",
    f"ragged_topk seed 1    UNDECIDED             {RAISED}",
    f"ragged_topk seed 2    DIFFERENT, expected   {BROKEN}",
]
EVIDENCE = {
    "label": "cutoff",
    "place": "rank 15",
    "value": "0.5",
    "bits": "3F000000",
    "note": "shared by columns 0 8 10 15 17 and 15 more",
}
