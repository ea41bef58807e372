"""A run over files: what is found, what is asked of it, and what was expected."""

from pathlib import Path

import pytest
import tiny
import torch

from equivalence import run
from equivalence.case import Case
from equivalence.errors import UsageError
from equivalence.run import Options
from equivalence.verdict import Status, Verdict

EXPECTED = """
[{name}]
status = "DIFFERENT"
stages = ["raw_indices"]
rule = "order"
rows = 1
runs = 1
kernel = "x"
reason = "It sorts."
link = "https://example.org/1"
"""


def wrong(name: str = "wrong") -> Case:
    """A case whose first row stands in another order."""
    picks = tiny.topk().recorded[0]["raw_indices"].clone()
    picks[0] = picks[0].flip(0)
    return tiny.topk(name, recorded=({"raw_indices": picks},))


def told(verdicts: object) -> list[tuple[str, str, bool]]:
    """Name, status and whether it was expected."""
    assert not isinstance(verdicts, Verdict)
    return [(v.case, v.status.value, v.expected) for v in verdicts]  # type: ignore[attr-defined]


def test_every_case_of_a_folder_is_judged_once(tmp_path: Path) -> None:
    """Files of others are left alone; a file named twice is judged once; progress is told."""
    path = tiny.put(tmp_path, tiny.topk("b"))
    tiny.put(tmp_path / "a", wrong("a"))
    tiny.write(tmp_path / "foreign.safetensors", {}, b"")
    seen: list[tuple[str, int, int]] = []
    verdicts = run.over([tmp_path, path], Options(), progress=lambda *args: seen.append(args))
    assert told(verdicts) == [("a", "DIFFERENT", False), ("b", "EQUAL", False)]
    assert seen == [("a", 4, 4), ("b", 4, 4)]


def test_expectations_hold_for_the_folder_they_stand_in(tmp_path: Path) -> None:
    """Two cases of one name in two folders are two cases; an expectation is of one of them."""
    for folder in ("x", "y"):
        tiny.put(tmp_path / folder, wrong())
    (tmp_path / "x" / "expected.toml").write_text(EXPECTED.format(name="wrong"), encoding="utf-8")
    assert told(run.over([tmp_path], Options())) == [
        ("wrong", "DIFFERENT", True),
        ("wrong", "DIFFERENT", False),
    ]


def test_an_expectation_of_no_case_is_undecided(tmp_path: Path) -> None:
    """A folder whose expected case is gone does not pass, even where another has that name."""
    tiny.put(tmp_path / "x", tiny.topk())
    tiny.put(tmp_path / "y", wrong())
    (tmp_path / "x" / "expected.toml").write_text(EXPECTED.format(name="wrong"), encoding="utf-8")
    verdicts = list(run.over([tmp_path / "x", tmp_path / "y"], Options()))
    assert told(verdicts)[2:] == [("wrong", "UNDECIDED", False)]
    assert "has no such case" in verdicts[2].note


def test_only_some_rows_are_judged(tmp_path: Path) -> None:
    """Rows keep what was recorded of them; a whole-case expectation does not apply."""
    path = tiny.put(tmp_path, wrong())
    (tmp_path / "expected.toml").write_text(EXPECTED.format(name="wrong"), encoding="utf-8")
    assert told(run.over([path], Options(rows=(1, 2)))) == [("wrong", "EQUAL", False)]
    assert told(run.over([path], Options(rows=(0,)))) == [("wrong", "DIFFERENT", False)]


def test_rows_that_a_case_has_not_are_refused_before_any_is_judged(tmp_path: Path) -> None:
    """The second case is too short: the first is not judged either."""
    tiny.put(tmp_path, tiny.topk("a"))
    tiny.put(tmp_path, tiny.decode(name="b"))
    (tmp_path / "c.safetensors").touch()
    for rows in ((0, 3), (-1,)):
        with pytest.raises(UsageError, match=r"row -?\d of [ab]: it has \d rows, from 0 on"):
            next(run.over([tmp_path], Options(rows=rows)))


def test_rows_of_a_case_that_cannot_be_read_are_undecided(tmp_path: Path) -> None:
    """A tensor that is not what was stored is found although only rows were asked for."""
    path = tiny.put(tmp_path, tiny.topk())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (tmp_path / "empty.safetensors").touch()
    verdicts = list(run.over([tmp_path], Options(rows=(0,))))
    assert told(verdicts) == [("empty", "UNDECIDED", False), ("tiny", "UNDECIDED", False)]
    assert verdicts[1].findings[0].reading == (
        f"{path}: recorded.0.raw_indices is not what was stored: its digest differs"
    )


def test_rows_of_their_own_table_keep_it(tmp_path: Path) -> None:
    """Without row_to_request, row i reads table row i, also when it is taken alone."""
    case = tiny.pages()
    table = case.inputs["page_table"][case.inputs["row_to_request"].long()]
    path = tiny.put(tmp_path, tiny.swap(case, page_table=table, row_to_request=None))
    assert told(run.over([path], Options())) == [("tiny", "EQUAL", False)]
    assert told(run.over([path], Options(rows=(2,)))) == [("tiny", "EQUAL", False)]
    assert told(run.over([path], Options(rows=(0, 2)))) == [("tiny", "EQUAL", False)]


def test_a_candidate_is_called_with_the_options(tmp_path: Path) -> None:
    """Contract, device and repeats reach the judge."""
    path = tiny.put(tmp_path, wrong())
    calls: list[str] = []

    def candidate(**call: torch.Tensor) -> torch.Tensor:
        calls.append(str(call["scores"].device))
        return wrong().recorded[0]["raw_indices"]

    options = Options(candidate=candidate, contract="order=any", device="cpu", repeats=2)
    (verdict,) = run.over([path], options)
    assert (verdict.status, calls, verdict.contract_origin) == (
        Status.EQUAL,
        ["cpu", "cpu"],
        "argument",
    )


def test_nothing_to_judge_is_wrong_use(tmp_path: Path) -> None:
    """A folder without a case, a path that is not there, and a device that is not there."""
    for paths, message in (
        ([tmp_path], "no case in"),
        ([tmp_path / "x"], "does not exist"),
        ([], "no case in"),
    ):
        with pytest.raises(UsageError, match=message):
            next(run.over(paths, Options()))
    path = tiny.put(tmp_path, tiny.topk())
    with pytest.raises(UsageError, match="device 'nowhere'"):
        next(run.over([path], Options(device="nowhere")))


def test_cases_of_another_op_can_be_left_out(tmp_path: Path) -> None:
    """Only that op's cases and what cannot be read; none at all is wrong use."""
    tiny.put(tmp_path, tiny.topk("picks"))
    tiny.put(tmp_path, tiny.prefill(name="layer"))
    (tmp_path / "broken.safetensors").write_bytes(b"")
    found = run.over([tmp_path], run.Options(op="ragged_topk"))
    assert [verdict.case for verdict in found] == ["broken", "picks"]
    with pytest.raises(UsageError, match="no case of op qsa_logits in"):
        list(run.over([tmp_path / "picks.safetensors"], run.Options(op="qsa_logits")))
