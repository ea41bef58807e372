"""The A/B tables: golden texts of one comparison, and what each kind of line says."""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import published
import pytest
import tied
from torch import Tensor

from benchmarks import page
from equivalence import ab, memory
from equivalence.report import ab_json, as_table
from equivalence.verdict import Memory, Status
from equivalence.versus.forwards import Census, Comparison, Forward
from equivalence.versus.ledger import About, Ledger
from equivalence.versus.spread import spread

MESSAGES = Path(__file__).parents[1] / "messages"
AGAIN = "equivalence ab cases --original tied:fickle --candidate tied:toy"


def fickle() -> Any:  # noqa: ANN401 - a candidate
    """A selector whose every other call takes the highest of tied columns."""
    turns = count()

    def call(**inputs: Any) -> Tensor:  # noqa: ANN401 - its keywords
        return (tied.last if next(turns) % 2 else tied.fixed)(**inputs)

    return call


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """Eight layer-forwards of an original that is not deterministic and a candidate that is wrong.

    What a call holds depends on torch, so it is always the same here.
    """
    held = Memory(transient=73_600, retained=0, outputs=3_200, reserved=None, how="tracked tensors")
    monkeypatch.setattr(memory.Meter, "of", lambda *_: held)
    got = ab.compare(fickle(), tied.toy, tied.forwards(8), contract=tied.FREE)
    return replace(got, original="tied:fickle", calls=9, left_out={"max_bytes": 1})


def golden(name: str) -> str:
    """A stored text."""
    return (MESSAGES / name).read_text(encoding="utf-8")


def test_the_text_is_the_stored_one(comparison: Comparison) -> None:
    """Two tables, the status, the rows that fail, then evidence, ties, memory and paths."""
    assert as_table.text(comparison, again=AGAIN) + "\n" == golden("ab.txt")


def test_the_markdown_is_the_stored_one(comparison: Comparison) -> None:
    """The same tables for a page."""
    assert as_table.markdown(comparison, again=AGAIN) + "\n" == golden("ab.md")


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """Four layer-forwards that publish, of whose masks one has a bit that the reference has not."""
    held = Memory(transient=12_000, retained=0, outputs=1_152, reserved=None, how="tracked tensors")
    monkeypatch.setattr(memory.Meter, "of", lambda *_: held)
    wrong = published.spoils(published.flip(4, 0), at=2)
    got = ab.compare(published.fixed(), wrong, published.forwards(4))
    return replace(got, original="published:fixed", candidate="published:spoils")


def test_masks_have_a_text_of_their_own(masks: Comparison) -> None:
    """The last column counts masks, the row that differs is named, and its block."""
    assert as_table.text(masks) + "\n" == golden("ab_masks.txt")
    lines = [line for line in as_table.markdown(masks).splitlines() if line.startswith("|")]
    assert [line.rpartition(" | ")[2] for line in lines] == 2 * [
        "masks equal |",
        "|---|---:|---:|---:|---:|",
        "1 of 2 |",
        "2 of 2 |",
        "3 of 4 |",
    ]


def test_masks_are_counted_in_the_json(masks: Comparison, comparison: Comparison) -> None:
    """By output, forms together; null where nothing is published."""
    data = ab_json.as_data(masks)
    counts = {
        "forwards": 4,
        "new_equal": 3,
        "controls": 4,
        "control_equal": 4,
        "pairs": 4,
        "only_new": 1,
        "only_control": 0,
        "rows": 36,
        "new_rows": 1,
        "control_rows": 0,
    }
    assert data["total"]["masks"] == {"all": counts, "mask": counts}
    assert [one["masks"] for one in data["forwards"]] == [["mask"]] * 4
    plain = ab_json.as_data(comparison)
    assert {str(group["masks"]) for group in (plain["total"], *plain["groups"])} == {"None"}


def test_masks_beside_other_outputs_are_counted_once(masks: Comparison) -> None:
    """Lines of outputs that are no masks have no count, and both forms of one are one."""
    total, each = masks.total, masks.total.masks["mask"]
    views = {
        view: {**stages, "logits": stages["all"], "block_ids": each}
        for view, stages in total.agreement.items()
    }
    both = {**total.masks, "block_ids": each}
    odd = replace(masks, total=replace(total, agreement=views, masks=both), groups=(), failing=())
    rows = [line.split() for line in as_table.text(odd).splitlines()]
    ends = {row[0]: " ".join(row[4:]) for row in rows if row and row[1:2] == ["4"]}
    assert ends == {"all": "3 of 4", "mask": "3 of 4", "logits": "n/a", "block_ids": "3 of 4"}
    assert "block_ids: 1 of 36 rows hold another mask" in as_table.text(odd)
    assert "logits: 1 of 36 rows hold other bits" in as_table.text(odd)


def section(compared: Comparison) -> str:
    """The section of the page of results that a run of one scenario makes."""
    total = compared.total
    views = {
        view: {**stages, "logits": stages["all"], "raw_indices": stages["all"]}
        for view, stages in total.agreement.items()
    }
    data = ab_json.as_data(replace(compared, total=replace(total, agreement=views)))
    setup = {"budget": 1 << 31, "layers": 1, "ratios": [1], "sample": 8}
    rows = [{"scenario": "one", "comparison": data}] * 2
    return page.SECTIONS["table"]({"setup": setup, "rows": rows})


def test_the_page_of_results_says_how_many_masks_are_equal(
    masks: Comparison, comparison: Comparison
) -> None:
    """Of each scenario and of all; runs that publish none say so."""
    text = section(masks)
    assert (text.count("| 3 of 4 |\n"), text.count("| 6 of 8 |\n")) == (6, 3)
    assert "The last column counts the layer-forwards that publish a mask.\n" in text
    text = section(comparison)
    assert text.count("| n/a |\n") == 9
    assert "No layer of these runs published a mask, so that column is empty.\n" in text


def test_the_json_is_the_stored_one(comparison: Comparison) -> None:
    """Everything but the environment; a second run gives the same bytes."""
    data = ab_json.as_data(comparison)
    assert json.dumps(data, indent=1, sort_keys=True) + "\n" == golden("ab.json")
    whole = json.loads(ab_json.render(comparison))
    assert "torch" in whole.pop("environment")
    assert whole == json.loads(golden("ab.json"))


def test_lines_of_markdown_tables_have_five_cells(comparison: Comparison) -> None:
    """A bar in a label does not open another."""
    total = comparison.total
    odd = replace(comparison, groups=(replace(total, place={"rank": "a|b"}),))
    lines = [line for line in as_table.markdown(odd).splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {6}
    assert any("rank a\\|b" in line for line in lines)


def about(**changes: Any) -> Comparison:  # noqa: ANN401 - fields of a Comparison
    """A comparison of nothing."""
    return replace(Ledger(about=About(op="ragged_topk")).result(), **changes)


def test_nothing_compared_says_so() -> None:
    """There is a table all the same, and no number in it is made up."""
    text = as_table.text(about())
    assert text == text.strip()
    assert text.splitlines()[0] == "ab ragged_topk: 0 layer-forwards, UNDECIDED"
    assert text.count("not run") == 3
    assert "status    UNDECIDED: no layer-forward was compared" in text
    assert "evidence" not in text
    assert "ties" not in text


def test_many_groups_are_cut_in_the_text_alone(comparison: Comparison) -> None:
    """Text shows sixteen, Markdown and JSON all."""
    many = replace(comparison, groups=comparison.groups * 10)
    assert len(many.groups) == 40
    assert as_table.text(many).count("  ... 24 more groups") == 2
    assert as_table.markdown(many).count("| layer 0  ratio 1 ") == 20
    assert len(ab_json.as_data(many)["groups"]) == 40


def test_a_control_that_failed_sometimes_is_counted(comparison: Comparison) -> None:
    """Its share is told where it did not run in every layer-forward."""
    slots = comparison.total.agreement["slots"]
    some = {**slots, "all": replace(slots["all"], controls=3, control_equal=2)}
    agreement = {**comparison.total.agreement, "slots": some}
    text = as_table.text(replace(comparison, total=replace(comparison.total, agreement=agreement)))
    assert " 2 of 3 " in text


def test_rows_that_nothing_judged_are_named() -> None:
    """The first sixteen of them."""
    one = Forward(name="call 7", op="x", rows=9, columns=9, unclassified=tuple(range(20)))
    text = as_table.text(about(failing=(one, replace(one, unclassified=(), note="no luck"))))
    want = "call 7: 20 rows unclassified: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 ..."
    assert want in text
    assert "call 7: no luck" in text


def test_ties_that_were_not_looked_at_are_not_told() -> None:
    """Where no scores were there, only selecting rows are counted."""
    total = about().total
    text = as_table.text(about(total=replace(total, census=Census(rows=7, selecting=5))))
    assert [line for line in text.splitlines() if line.startswith("  ties")] == [
        "  ties      5 of 7 rows really select"
    ]
    census = Census(rows=7, selecting=5, looked_at=1, multiplicity=spread([3]), scores="input")
    text = as_table.text(about(total=replace(total, census=census)))
    assert "to the best score below it" not in text


def test_without_scipy_the_evidence_says_so(comparison: Comparison) -> None:
    """The tables stay, and a sentence stands in for p."""
    tests = tuple(replace(test, p=None, note="no scipy") for test in comparison.evidence)
    text = as_table.text(replace(comparison, evidence=tests))
    assert "p = " not in text
    assert "the control alone in 0: no scipy" in text
    assert comparison.status is Status.DIFFERENT
