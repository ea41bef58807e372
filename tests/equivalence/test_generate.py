"""Generated cases are what their names say, the same for one seed, and judged as right."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import by_twin
import pytest
import torch
import twin
from hypothesis import given
from hypothesis import strategies as st

from equivalence import generate, ops, stages, strategies
from equivalence.contract import FREEDOMS, Contract
from equivalence.errors import UsageError
from equivalence.generate import Scores
from equivalence.judge import check
from equivalence.planted.reference import right_outputs
from equivalence.verdict import Status
from refimpl.bits import as_int

if TYPE_CHECKING:
    from collections.abc import Callable

    from equivalence.case import Case

SCALES = (1.0, 1e-3, 1e-6)
MAKERS: dict[str, Callable[[int], Case]] = {
    "ragged_topk": generate.ragged_topk,
    "page_table": generate.topk_pages,
    "slot_map": lambda seed: generate.topk_pages(seed, form="slot_map"),
    "offset": lambda seed: generate.topk_pages(seed, form="offset"),
    "shared": lambda seed: generate.topk_pages(seed, shared=True),
    "translate_pages": generate.translate_pages,
    "mqa_logits": generate.mqa_logits,
    "prefill_indexer": generate.prefill_indexer,
    "prefill slot_map": lambda seed: generate.prefill_indexer(seed, form="slot_map"),
    "prefill offset": lambda seed: generate.prefill_indexer(seed, form="offset"),
    "decode_indexer": generate.decode_indexer,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_seed_is_a_case(name: str) -> None:
    """One seed gives the same bits twice, another one other bits, and every case is valid."""
    one, again, other = (MAKERS[name](seed) for seed in (3, 3, 4))
    assert ops.validate(one)["rows"] > 0
    assert one.inputs.keys() == again.inputs.keys()
    same = {n: torch.equal(as_int(t), as_int(again.inputs[n])) for n, t in one.inputs.items()}
    assert set(same.values()) == {True}
    assert any(not torch.equal(as_int(t), as_int(other.inputs[n])) for n, t in one.inputs.items())
    assert one.params == again.params == other.params


@pytest.mark.parametrize("name", MAKERS)
def test_the_reference_of_a_generated_case_is_equal(name: str) -> None:
    """Judged against themselves, all rows are identical, and some of them select."""
    case = MAKERS[name](5)
    verdict = check(replace(case, recorded=(right_outputs(case),)))
    assert (verdict.status, verdict.findings) == (Status.EQUAL, ())
    if stages.k_of(case):
        assert verdict.selecting


def test_windows_cover_the_kinds_of_rows() -> None:
    """Starts at 0 and not, selecting, k + 1, exactly k, short, one column, none, a repeated one."""
    spans = generate.windows(k=16, columns=96)
    assert [end - start for start, end in spans] == [38, 58, 32, 17, 16, 8, 1, 0, 58]
    assert {start for start, _ in spans} == {0, 38}
    assert spans[1] == spans[8] == (38, 96)
    with pytest.raises(UsageError, match="k is 16 and columns 95"):
        generate.windows(k=16, columns=95)
    with pytest.raises(UsageError, match="k is 4 or more"):
        generate.windows(k=3, columns=96)


def cuts(case: Case) -> dict[int, tuple[int, int, int]]:
    """Of each selecting row: winners, columns at the cutoff, free places."""
    found = {}
    k = stages.k_of(case)
    for row in range(len(case.inputs["scores"])):
        start, visible = by_twin.window(case, row)
        if visible > k:
            cells = by_twin.fp32_bits(case.inputs["scores"][row, start : start + visible])
            cut = twin.cut(cells, visible, k, {"ties": "any"})
            assert cut is not None
            found[row] = (len(cut.must), len(cut.ties), cut.free)
    return found


@given(st.integers(0, 10**6), st.sampled_from(SCALES))
def test_tie_rich_scores_are_cut_inside_a_plateau(seed: int, scale: float) -> None:
    """Every selecting row has spare ties; row 1 has fifteen winners, row 2 has none."""
    found = cuts(generate.ragged_topk(seed, scores=Scores(scale=scale)))
    assert all(ties > free for _, ties, free in found.values())
    assert (found[1][0], found[2][0], found[1][2]) == (15, 0, 1)
    assert found[1][1] - found[1][2] >= 15


@given(st.integers(0, 10**6), st.sampled_from(SCALES))
def test_tie_free_scores_differ(seed: int, scale: float) -> None:
    """No two columns of a window share a score, so each row has one legal set."""
    case = generate.ragged_topk(seed, scores=Scores(tie_rich=False, scale=scale))
    for row, scores in enumerate(case.inputs["scores"]):
        start, visible = by_twin.window(case, row)
        assert len(scores[start : start + visible].unique()) == visible
    assert {ties for _, ties, _ in cuts(case).values()} == {1}


@pytest.mark.parametrize("scale", SCALES)
def test_cells_outside_a_window_score_most(scale: float) -> None:
    """Whoever reads past a window picks what lies there."""
    for tie_rich in (True, False):
        case = generate.ragged_topk(1, scores=Scores(tie_rich=tie_rich, scale=scale))
        for row, scores in enumerate(case.inputs["scores"]):
            start, visible = by_twin.window(case, row)
            inside = torch.zeros_like(scores, dtype=torch.bool)
            inside[start : start + visible] = True
            if visible:
                assert float(scores[~inside].min()) > float(scores[inside].max())


def test_special_scores_stand_where_they_say() -> None:
    """-inf fills row 2 up to k // 2 finite scores, zeros have both signs, NaNs both sign bits."""
    case = generate.ragged_topk(1, scores=Scores(minus_inf=True))
    row = case.inputs["scores"][2, 38:70]
    assert (int(row.isfinite().sum()), int(row.isneginf().sum())) == (8, 24)
    assert bool(case.inputs["scores"][5, 7].isneginf())
    zeros = generate.ragged_topk(1, scores=Scores(plateau=0.0, signed_zeros=True)).inputs["scores"]
    assert {bool(sign) for sign in zeros[1, 38:][zeros[1, 38:] == 0].signbit()} == {True, False}
    nan = generate.ragged_topk(1, scores=Scores(nan=True)).inputs["scores"]
    assert nan.isnan().nonzero().tolist() == [[0, 1], [1, 40]]
    assert nan[nan.isnan()].signbit().tolist() == [False, True]


def test_a_larger_case_has_the_same_shape() -> None:
    """Windows grow with k and columns."""
    case = generate.ragged_topk(1, k=64, columns=1024)
    assert case.inputs["scores"].shape == (9, 1024)
    assert cuts(case)[1] == (63, 368, 1)


def test_slots_are_distinct_and_never_reserved() -> None:
    """Tables start at page 1, columns of one request have slots of their own unless shared."""
    for form in ("page_table", "slot_map"):
        slots = right_outputs(generate.topk_pages(2, form=form))["page_indices"]
        for row in slots:
            kept = row[row >= 0]
            assert len(kept.unique()) == len(kept)
            assert not len(kept) or int(kept.min()) > 0
    table = generate.topk_pages(2, shared=True).inputs["page_table"]
    assert table[1, 0] == table[1, 1]
    offset = generate.topk_pages(2, form="offset")
    outputs = right_outputs(offset)
    assert outputs.keys() == {"raw_indices", "ragged_indices"}


def test_translated_slots_lie_above_what_fp32_counts() -> None:
    """Every slot is above 2**24, so one that goes through fp32 may change."""
    slots = right_outputs(generate.translate_pages(1))["page_indices"]
    assert int(slots[slots >= 0].min()) > 1 << 24
    assert not torch.equal(slots, slots.float().int())


@pytest.mark.parametrize("scale", SCALES)
def test_indexer_scores_tie_or_not(scale: float) -> None:
    """Repeated keys give repeated logits, a zero key gives +0, distinct keys differ."""
    tied = right_outputs(generate.mqa_logits(1, scale=scale))["logits"]
    free = right_outputs(generate.mqa_logits(1, tie_rich=False, scale=scale))["logits"]
    assert [len(row[row.isfinite()].unique()) for row in tied] == [7, 7, 7, 7, 7, 6, 1, 0, 7]
    lengths = [32, 48, 24, 13, 12, 6, 1, 0, 48]
    assert [len(row[row.isfinite()].unique()) for row in free] == lengths
    assert bool((as_int(tied) == 0).any())
    assert not bool((free == 0).any())


def test_decode_rows_are_long_short_and_empty() -> None:
    """Three requests of two tokens: six times topk, none and half of topk, just above topk."""
    case = generate.decode_indexer(1)
    assert case.inputs["context_lens"].tolist() == [[71, 72], [0, 6], [13, 14]]
    logits = right_outputs(case)["logits"]
    assert logits.isfinite().sum(1).tolist() == [71, 72, 0, 6, 13, 14]


@given(strategies.contracts())
def test_contracts_are_drawn_from_all_freedoms(contract: Contract) -> None:
    """Any drawn contract can be printed and read again."""
    assert Contract.parse(str(contract)) == contract


@given(strategies.ragged_topk_cases() | strategies.topk_pages_cases(shared=True))
def test_drawn_cases_are_valid(case: Case) -> None:
    """Every drawn case binds to its op, has no broken row, and equals its own reference."""
    assert not ops.find(case.op).windows(case).broken
    verdict = check(replace(case, recorded=(right_outputs(case),)))
    assert verdict.status is not Status.DIFFERENT
    assert verdict.findings == ()


@given(st.data(), st.booleans())
def test_page_tables_repeat_only_where_asked(data: st.DataObject, shared: bool) -> None:  # noqa: FBT001 - hypothesis' way
    """Pages start at 1 and are unique unless shared."""
    table = data.draw(strategies.page_tables(requests=2, pages=3, shared=shared))
    assert int(table.min()) >= 1
    assert shared or len(set(table.reshape(-1).tolist())) == 6


def test_pick_freedoms_are_keys_of_a_contract() -> None:
    """Every freedom of picks is a key that a contract has."""
    assert set(strategies.PICK_FREEDOMS) < set(FREEDOMS)


def test_only_the_strategies_need_hypothesis() -> None:
    """Cases, faults and the judge load without hypothesis."""
    code = (
        "import sys; from equivalence import faults, generate, judge;"
        " from equivalence.planted import reference; assert 'hypothesis' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - this interpreter
