"""A wrong row is told by the row whose result, window or scores it holds, and only by that."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import batches
import pytest
import torch

from equivalence.case import Case
from equivalence.judge import check
from equivalence.planted import paths, reused
from equivalence.planted.reference import right_outputs
from refimpl.topk import ragged_topk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

ROWS, SPLIT, PREFIX, K = 100, 60, 20, 8
FORGETS = "as when a chunk forgets its row offset"
OUTLIVES = "as when a view outlives its chunk"
SHORT = "as when the last chunk is one row short"
TWO_SHORT = "as when the last chunk is 2 rows short"
STALE = "as when a stale workspace column is ranked"
row = torch.arange(ROWS)


def layer() -> Case:
    """Two requests of 60 and 40 rows; the second one's first 20 keys were there before."""
    random = torch.Generator().manual_seed(0)
    start = torch.where(row < SPLIT, 0, SPLIT).int()
    end = torch.where(row < SPLIT, row + 1, row + 1 + PREFIX).int()
    columns = ROWS + PREFIX
    return Case(
        op="prefill_indexer",
        inputs={
            "q": torch.randn(ROWS, 16, 32, generator=random).to(torch.float8_e4m3fn),
            "k": torch.randn(columns, 32, generator=random).to(torch.float8_e4m3fn),
            "k_scale": torch.rand(columns, generator=random) + 0.5,
            "weights": torch.randn(ROWS, 16, generator=random),
            "row_start": start,
            "row_end": end,
            "row_to_request": (row >= SPLIT).int(),
            "block_table": 1 + torch.randperm(60, generator=random).reshape(2, 30).int(),
        },
        params={"topk": K, "page_size": 4},
        arithmetic="deep_gemm.sm90",
    )


CASE = layer()
RIGHT = right_outputs(CASE)
START, END = CASE.inputs["row_start"], CASE.inputs["row_end"]


def told(outputs: Mapping[str, Tensor], case: Case = CASE) -> dict[tuple[str, int], str]:
    """Readings by output and row."""
    verdict = check(case, lambda **_: {name: t.clone() for name, t in outputs.items()})
    return {(f.stage, f.row): f.reading for f in verdict.findings if f.row is not None}


def moved(source: Tensor, *stages: str) -> dict[str, Tensor]:
    """The right outputs, where row i of these holds row source[i]."""
    return {name: t[source] if name in stages else t for name, t in RIGHT.items()}


def chosen(scores: Tensor, start: Tensor, end: Tensor) -> dict[str, Tensor]:
    """Picks of these scores and windows, alone."""
    return {"raw_indices": ragged_topk(scores=scores, row_start=start, row_end=end, k=K)}


@pytest.mark.parametrize(
    ("stage", "first"),
    [("raw_indices", "picks"), ("logits", "scores"), ("page_indices", "slots")],
)
def test_a_chunk_that_forgets_its_offset_is_told_in_every_output(stage: str, first: str) -> None:
    """Rows from 64 on hold the results of rows from 0 on."""
    readings = told(moved(torch.where(row >= 64, row - 64, row), stage))
    assert readings[stage, 71] == (
        f"row 71 holds the {first} of row 7 (request 0 token 7),"
        f" 64 rows earlier, and 35 more rows likewise: {FORGETS}"
    )


def test_chunks_of_one_length_are_told_together() -> None:
    """Rows of every later chunk of 16 hold those of the first, each further away than the last."""
    readings = told(moved(row % 16, "raw_indices"))
    assert readings["raw_indices", 23] == (
        "row 23 holds the picks of row 7 (request 0 token 7), 16 rows earlier,"
        f" and 83 more rows likewise: {FORGETS}"
    )
    assert readings["raw_indices", 32].startswith(
        "row 32 holds the picks of row 0 (request 0 token 0), 32 rows earlier, and 83 more rows "
    )


def test_windows_of_another_chunk_are_told() -> None:
    """Right scores, ranked in the windows of rows that come 16 rows before."""
    early = torch.where((row >= 32) & (row < SPLIT), row - 16, row)
    readings = told(chosen(RIGHT["logits"], START, END[early]))
    assert readings["raw_indices", 32] == (
        "row 32 sees only what is in the window of row 16 (request 0 token 16),"
        f" 16 rows earlier, and 27 more rows likewise: {FORGETS}"
    )


def test_logits_in_the_windows_of_another_chunk_are_told() -> None:
    """Every score is right that was computed; the others are -inf."""
    column = torch.arange(ROWS + PREFIX)
    early = torch.where((row >= 32) & (row < SPLIT), row - 16, row)
    seen = torch.where(column < END[early][:, None], RIGHT["logits"], -torch.inf)
    assert told({**RIGHT, "logits": seen})["logits", 33] == (
        "row 33 sees only what is in the window of row 17 (request 0 token 17),"
        f" 16 rows earlier, and 27 more rows likewise: {FORGETS}"
    )


def test_a_view_that_outlives_its_chunk_is_told_by_its_scores() -> None:
    """Rows are picked from what the next chunk left in the buffer, in windows of their own."""
    other = torch.where(row < 32, row + 16, row)
    assert told(chosen(RIGHT["logits"][other], START, END))["raw_indices", 8] == (
        "row 8 is ranked by the scores of row 24 (request 0 token 24),"
        f" 16 rows later, and 23 more rows likewise: {OUTLIVES}"
    )


def test_scores_that_an_earlier_chunk_left_in_a_workspace_are_told() -> None:
    """Windows of both requests begin at column 0 of the workspace."""
    scores = RIGHT["logits"].clone()
    scores[SPLIT:80, SPLIT:] = RIGHT["logits"][40:SPLIT, :SPLIT]
    assert told(chosen(scores, START, END))["raw_indices", 60] == (
        "row 60 is ranked by the scores of row 40 (request 0 token 40), 20 rows earlier,"
        " and 19 more rows likewise: as when a workspace still holds the scores of another chunk"
    )


def test_a_later_rows_result_is_a_view_that_outlived_its_chunk() -> None:
    """Rows of the first chunk hold what the second one left."""
    readings = told(moved(torch.where(row < 32, row + 32, row), "raw_indices"))
    assert readings["raw_indices", 7] == (
        "row 7 holds the picks of row 39 (request 0 token 39),"
        f" 32 rows later, and 31 more rows likewise: {OUTLIVES}"
    )


def test_two_tail_rows_that_are_one_row_early_are_told() -> None:
    """The last row of each request holds what the row before it holds."""
    readings = told(moved(torch.where((row == 59) | (row == 99), row - 1, row), "raw_indices"))
    assert readings["raw_indices", 99] == (
        "row 99 holds the picks of row 98 (request 1 token 38),"
        " 1 row earlier, and 1 more row likewise: as when a tail is off by one"
    )


@pytest.mark.parametrize(
    ("value", "rows", "reading"),
    [
        (-1, 1, f"row 99, the last of the call, is nothing but pads: {SHORT}"),
        (0, 2, f"rows 98 to 99, the last of the call, are nothing but zeros: {TWO_SHORT}"),
    ],
)
def test_the_last_rows_of_a_short_chunk_are_told(value: int, rows: int, reading: str) -> None:
    """They hold pads or zeros alone."""
    picks = RIGHT["raw_indices"].clone()
    picks[-rows:] = value
    readings = told({"raw_indices": picks})
    assert set(readings.values()) == {reading}
    assert len(readings) == rows


def test_the_last_row_that_was_never_written_is_told_in_every_output() -> None:
    """Its poison is still there."""

    def short(**_: Any) -> dict[str, Tensor]:  # noqa: ANN401 - the inputs of a layer
        out = {name: torch.empty_like(t) for name, t in RIGHT.items()}
        for name, tensor in out.items():
            tensor[:-1] = RIGHT[name][:-1]
        return out

    readings = {f.stage: f.reading for f in check(CASE, short).findings}
    sentence = f"row 99, the last of the call, was never written: {SHORT}"
    assert readings == dict.fromkeys(RIGHT, sentence)


def test_the_last_row_that_keeps_an_older_one_is_told() -> None:
    """The buffer still holds what an earlier chunk put into its last row."""
    readings = told(moved(torch.where(row == 99, 67, row), "raw_indices"))
    assert readings["raw_indices", 99] == (
        "row 99, the last of the call, holds the picks of row 67 (request 1 token 7):"
        f" {SHORT} and the buffer keeps what it held"
    )


def test_rows_that_end_before_the_call_does_are_no_short_chunk() -> None:
    """Neither a blank row inside the call nor a call that is all blank."""
    for which in (slice(50, 51), slice(0, None)):
        picks = RIGHT["raw_indices"].clone()
        picks[which] = -1
        assert set(told({"raw_indices": picks}).values()) == {""}


def test_a_stale_column_is_told_from_another_base() -> None:
    """Picks past the window are stale columns unless all of them are the right ones, moved."""
    stale = RIGHT["logits"].clone()
    stale[70, END[70] + 3 : END[70] + 5] = 1e6
    wide = END.clone()
    wide[70] += 8
    sees = int(END[70] - START[70])
    assert told(chosen(stale, START, wide))["raw_indices", 70] == (
        f"reads past its {sees} visible columns: columns {sees + 3} {sees + 4}, {STALE};"
        " the other picks are its best"
    )
    stale[70, END[70] : END[70] + 8] = 1e6
    assert told(chosen(stale, START, wide))["raw_indices", 70] == (
        f"reads past its {sees} visible columns: columns {sees} {sees + 1} {sees + 2} {sees + 3}"
        f" and 4 more, {STALE}"
    )
    based = RIGHT["raw_indices"].clone()
    based[70] += sees
    assert told({"raw_indices": based})["raw_indices", 70] == (
        "every pick lies past the window: fits another base for the indices"
    )


def test_one_row_with_anothers_result_names_its_request_and_token() -> None:
    """A buffer read with the wrong row stride: three rows, each from another distance."""
    stride = row.clone()
    stride[[43, 57, 91]] = torch.tensor([20, 21, 22])
    readings = told({"raw_indices": RIGHT["raw_indices"][stride]})
    assert readings == {
        ("raw_indices", r): f"row {r} holds the picks of row {j} (request 0 token {j})"
        for r, j in ((43, 20), (57, 21), (91, 22))
    }


def test_random_picks_are_no_other_rows() -> None:
    """Rows of random columns, all of them wrong, fit nothing."""
    random = torch.Generator().manual_seed(3)
    picks = RIGHT["raw_indices"].clone()
    for i in range(ROWS):
        sees = int(END[i] - START[i])
        if sees > K:
            picks[i] = torch.randperm(sees, generator=random)[:K].int()
    readings = told({"raw_indices": picks})
    assert readings
    assert not any(" of row " in text for text in readings.values())


def test_a_lost_winner_everywhere_is_no_other_row() -> None:
    """Every row loses its best pick to the next in rank."""
    wide = ragged_topk(scores=RIGHT["logits"], row_start=START, row_end=END, k=K + 1)
    sees = (END - START)[:, None]
    picks = torch.where(sees > K, wide[:, 1:], RIGHT["raw_indices"])
    readings = told({"raw_indices": picks})
    assert set(readings.values()) == {"1 of 8 picks lost to lower scores"}


def test_one_row_in_another_window_or_of_another_short_row_tells_nothing() -> None:
    """A lost newest column and a lost pick have nearer causes than another row."""
    scores = RIGHT["logits"].clone()
    scores[18, 17:19] = 1e6
    case = Case(
        op="ragged_topk",
        inputs={"scores": scores, "row_start": START, "row_end": END},
        params={"k": K},
    )
    picks = ragged_topk(scores=scores, row_start=START, row_end=END, k=K)
    picks[18] = ragged_topk(scores=scores, row_start=START, row_end=END - 1, k=K)[18]
    picks[5] = picks[2]
    assert told({"raw_indices": picks}, case) == {
        ("raw_indices", 5): "",
        ("raw_indices", 18): "1 of 8 picks lost to lower scores",
    }


def ranked(scores: Tensor) -> tuple[Case, Tensor]:
    """Rows that see every column, and their right picks."""
    start = torch.zeros(len(scores), dtype=torch.int32)
    end = start + scores.shape[1]
    inputs = {"scores": scores, "row_start": start, "row_end": end}
    case = Case(op="ragged_topk", inputs=inputs, params={"k": K})
    return case, chosen(scores, start, end)["raw_indices"]


@pytest.mark.parametrize("rows", [8, 24])
def test_rows_that_are_all_alike_tell_nothing(rows: int) -> None:
    """A row that holds what every other row should hold is told by none of them."""
    scores = torch.arange(32.0).repeat(rows, 1)
    scores[5] = scores[5].flip(0)
    case, picks = ranked(scores)
    picks[5] = picks[4]
    assert told({"raw_indices": picks}, case) == {
        ("raw_indices", 5): "7 of 8 picks lost to lower scores"
    }


@pytest.mark.parametrize("plateaus", [1, 3])
def test_rows_of_plateaus_tell_nothing(plateaus: int) -> None:
    """Any choice of equal scores is right for rows that have no others."""
    scores = torch.arange(32.0).repeat(9, 1)
    scores[:plateaus] = 1.0
    case, picks = ranked(scores)
    wrong = [6, 7, 8][:plateaus]
    picks[wrong] = torch.stack([torch.arange(K) + 2 * i for i in range(plateaus)]).int()
    lost = ["7 of 8 picks lost to lower scores"] * plateaus
    for contract in ("strict", "order=any,ties=any"):
        found = check(case, lambda **_: picks.clone(), contract=contract).findings
        assert [(f.row, f.reading) for f in found] == list(zip(wrong, lost, strict=True))


def causal() -> Case:
    """20 rows of 21 to 40 columns, then 12 rows of 19 to 30 in another request."""
    return batches.case([(20, 40), (12, 30)], tie_rich=False)


def test_chunks_are_told_where_the_second_one_is_right_by_chance() -> None:
    """Row 3 has the right picks in the window of row 0: no chunk is four rows for that."""
    verdict = check(causal(), paths.forgets_row_offset)
    readings = {f.row: f.reading for f in verdict.findings if f.stage == "raw_indices"}
    assert 3 not in readings
    assert readings[6] == (
        "row 6 sees only what is in the window of row 0 (request 0 token 0), 6 rows earlier,"
        f" and 12 more rows likewise: {FORGETS}"
    )


def test_picks_in_the_last_columns_of_a_compact_view_are_stale() -> None:
    """A view is as wide as the longest row: a row of the last request may read past the keys."""
    verdict = check(causal(), partial(reused.stale_columns, budget_bytes=1_200))
    readings = {f.row: f.reading for f in verdict.findings if f.stage == "raw_indices"}
    assert readings[21] == f"reads past its 20 visible columns: columns 26 27 28 34, {STALE}"


def test_picks_past_the_window_that_are_no_right_ones_moved_tell_nothing() -> None:
    """Another base is only named where it gives the right picks."""
    picks = RIGHT["raw_indices"].clone()
    picks[70] = torch.arange(K) * 1000 + 1000
    assert told({"raw_indices": picks})["raw_indices", 70] == ""


@pytest.mark.parametrize(
    ("value", "reading"),
    [
        (torch.nan, ""),
        (-torch.inf, "-inf where the reference is finite, from column 0 on"),
        (0.0, "every differing score is zero, from column 0 on"),
    ],
)
def test_logits_that_hold_nothing_are_in_no_other_window(value: float, reading: str) -> None:
    """Where no cell is right, none was scored in the window of another row."""
    logits = torch.full_like(RIGHT["logits"], value)
    assert told({"logits": logits})["logits", 1] == reading


@pytest.mark.parametrize("early", [1, 3])
def test_windows_that_all_end_early_are_no_chunks(early: int) -> None:
    """Every row sees what the row before it should: more rows than a chunk of that length has."""
    readings = told(chosen(RIGHT["logits"], START, END - early))
    causes = {text.split("as when ")[-1] for text in readings.values() if " of row " in text}
    assert causes == {"a window ends too early"}


@pytest.mark.parametrize("most", [30, 40])
def test_windows_that_are_cut_off_are_no_chunks(most: int) -> None:
    """Rows that see no column past the first ones all fit one row, at any distance."""
    readings = told(chosen(RIGHT["logits"], START, torch.minimum(END, START + most)))
    assert readings
    assert not any(" of row " in text for text in readings.values())


def test_picks_of_rows_at_one_small_distance_are_no_chunks() -> None:
    """A chunk that forgets its offset holds at most its own rows at its own length."""
    readings = told(moved(torch.where(row >= 33, row - 3, row), "raw_indices"))
    assert readings["raw_indices", 40] == (
        "row 40 holds the picks of row 37 (request 0 token 37), 3 rows earlier,"
        " and 66 more rows likewise"
    )


def test_one_chunk_and_a_part_are_told_as_chunks() -> None:
    """Five rows lie three rows from a fitting one, and in chunks of three rows fit as many."""
    case = batches.case([(6, 39), (2, 10)], tie_rich=False)
    verdict = check(case, partial(paths.forgets_row_offset, keep_logits=True))
    readings = {f.row: f.reading for f in verdict.findings if f.stage == "logits"}
    assert readings[7] == (
        "row 7 sees only what is in the window of row 1 (request 0 token 1), 6 rows earlier,"
        f" and 4 more rows likewise: {FORGETS}"
    )


def test_keys_of_another_bias_halve_every_score() -> None:
    """E4m3fn bytes read as e4m3fnuz: picks stay right, and two scores tell the ratio: A08."""
    readings = told({**RIGHT, "logits": RIGHT["logits"] * 0.5})
    assert readings.pop(("logits", 0)) == ""
    assert {stage for stage, _ in readings} == {"logits"}
    assert set(readings.values()) == {"every differing score is 0.5 times the reference"}
