"""expected.toml: a known wrong verdict of a recorded run, exactly, or a failure."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from equivalence import expected, judge
from equivalence.errors import UsageError
from equivalence.expected import Expectation
from equivalence.verdict import Finding, Status, Verdict

FOUND = Expectation(
    case="tiny",
    status="DIFFERENT",
    stages=("raw_indices",),
    rule="lost-winner",
    rows=1,
    runs=1,
    kernel="my_kernels 1.0",
    reason="It drops one.",
    link="https://example.org/1",
)
TEXT = """
[tiny]
status = "DIFFERENT"
stages = ["raw_indices"]
rule = "lost-winner"
rows = 1
runs = 1
kernel = "my_kernels 1.0"
reason = "It drops one."
link = "https://example.org/1"
"""


def wrong() -> Verdict:
    """A recorded run that lost one winner in one row."""
    case = tiny.topk()
    picks = case.recorded[0]["raw_indices"].clone()
    worst = case.inputs["scores"][0].argmin()
    picks[0, -1] = worst
    return judge.check(replace(case, recorded=({"raw_indices": picks},)))


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    """Every field is wanted and kept."""
    path = tmp_path / "expected.toml"
    path.write_text(TEXT, encoding="utf-8")
    assert expected.read(path) == {"tiny": FOUND}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[tiny", "Expected ']'"),
        ("tiny = 1", "[tiny] has the fields status, stages, rule"),
        (TEXT + "more = 1", "[tiny] has the fields"),
        (TEXT.replace("rows = 1", "rows = true"), "[tiny] rows is not int"),
        (TEXT.replace('["raw_indices"]', "[[1]]"), "[tiny] stages is not a list of texts"),
        (TEXT.replace("DIFFERENT", "UNDECIDED"), "[tiny] status is not DIFFERENT"),
        (TEXT.replace("lost-winner", "lost"), "[tiny] rule 'lost' is none"),
        (TEXT.replace("[tiny]", '["a\\u001b[2J"]') + "x = 1", "[a\\x1b[2J] has the fields"),
        ("x = " + "[" * 20_000 + "]" * 20_000, ""),
    ],
)
def test_what_is_no_expectation_is_refused_in_one_line(
    text: str, sentence: str, tmp_path: Path
) -> None:
    """The line names the file, the case and the field."""
    path = tmp_path / "expected.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        expected.read(path)
    assert str(caught.value).startswith(f"{path}: {sentence}")
    assert str(caught.value).isprintable()


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """So is one that is no text."""
    path = tmp_path / "expected.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"expected\.toml: 'utf-8' codec"):
        expected.read(path)


def test_expectations_stand_in_a_folder_or_above_it(tmp_path: Path) -> None:
    """The nearest file counts; a link counts where it stands, not where it leads."""
    path = tiny.put(tmp_path / "cases", tiny.topk())
    (tmp_path / "expected.toml").write_text(TEXT, encoding="utf-8")
    link = tmp_path / "elsewhere" / "deeper" / "link.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(path)
    assert expected.beside([path, link]) == {(tmp_path / "cases").resolve(): {"tiny": FOUND}}


def test_what_was_expected_is_marked_and_stays_different() -> None:
    """The true status stays; `expected` says that it was foreseen."""
    verdict = wrong()
    marked = expected.mark(verdict, FOUND)
    assert (verdict.status, marked.status, marked.expected) == (
        Status.DIFFERENT,
        Status.DIFFERENT,
        True,
    )
    assert marked.note == "It drops one. https://example.org/1"


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 2},
        {"runs": 2},
        {"rule": "wrong-tie"},
        {"stages": ("logits",)},
        {"status": "UNDECIDED"},
    ],
)
def test_an_expectation_that_no_longer_holds_is_a_difference(change: dict[str, object]) -> None:
    """One row more or another rule is not what was known."""
    marked = expected.mark(wrong(), replace(FOUND, **change))  # type: ignore[arg-type]  # a table
    assert (marked.status, marked.expected) == (Status.DIFFERENT, False)
    assert "no longer holds" in marked.note


def test_an_expectation_of_an_equal_case_is_a_difference() -> None:
    """A fault that is gone must leave the list."""
    marked = expected.mark(judge.check(tiny.topk()), FOUND)
    assert (marked.status, marked.expected) == (Status.DIFFERENT, False)


def test_nothing_else_hides_behind_an_expectation() -> None:
    """A broken row beside the known fault is not foreseen."""
    verdict = wrong()
    found = Finding(stage="inputs", rule="invalid-record", status=Status.UNDECIDED)
    more = replace(verdict.runs[0], findings=(*verdict.runs[0].findings, found))
    assert expected.holds(FOUND, verdict)
    assert not expected.holds(FOUND, replace(verdict, runs=(more,)))


def test_expectations_do_not_concern_a_candidate() -> None:
    """A candidate that fails the same way is not excused."""
    verdict = replace(wrong(), candidate="my_kernels:fast_topk")
    assert expected.mark(verdict, FOUND) is verdict
    assert expected.mark(verdict, None) is verdict


def test_expectations_of_no_case_are_found() -> None:
    """A renamed case does not silently lose its expectation."""
    assert expected.unnamed({"tiny": FOUND}, ["other"]) == ["tiny"]
    assert expected.unnamed({"tiny": FOUND}, ["tiny"]) == []
