"""Which rule names a wrong mask, what is let through, and what a finding says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import by_twin
import pytest
import torch
import twin_masks
from hypothesis import given
from hypothesis import strategies as st

from equivalence.checks import masks, maskwords
from equivalence.checks.published import Published, know, written
from equivalence.checks.rows import name, tally
from equivalence.contract import Contract
from equivalence.report import as_text
from equivalence.verdict import Run, Stage, Status, Verdict
from refimpl import blocks, forms
from refimpl import masks as reference

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from equivalence.checks.rows import Decided
    from equivalence.verdict import Finding

MESSAGES = Path(__file__).parents[1] / "messages"
INF, NAN = torch.inf, torch.nan
FORMS = get_args(forms.Form)
BYTES = ("bool", "packed")
IDS = ("unordered", "ascending")
POISON = -1_347_440_721
# Blocks 0 to 5: 3 and 1 win, 0 and 4 tie at the cutoff of four places, 2 loses, 5 is the newest.
BEST = (4.0, 6.0, 1.0, 9.0, 4.0, 0.0)
KEPT = (0, 1, 3, 5)


def strict(**changes: Any) -> Contract:  # noqa: ANN401 - values of a contract
    """The strict contract with changes, `ties=all` among them."""
    return replace(Contract(), **changes)


def window(best: Sequence[float], *, size: int = 8, last: int = 3) -> list[float]:
    """Columns of blocks with these scores, the best column of a block its second; a short last."""
    columns: list[float] = []
    for score in best:
        low = score if score in (-INF, INF) else score - 10
        columns += [low, score, *[low] * (size - 2)][:size] if size > 1 else [score]
    return columns[: len(columns) - (size - last if size > 1 else 0)]


def mask_of(
    kept: Iterable[int], visible: int, form: str, *, size: int = 8, columns: int = 0, slots: int = 0
) -> Tensor:
    """One row in a form, as the twin writes it."""
    if form in IDS:
        pad = -1 if form == "unordered" else forms.FAR_PAD
        row = twin_masks.ids(kept, slots or 4, pad)
        return torch.tensor([row], dtype=torch.int32)
    bools = twin_masks.bools(kept, visible, columns or -(-visible // 8) * 8, size)
    if form == "bool":
        return torch.tensor([bools])
    return torch.tensor([twin_masks.octets(bools)], dtype=torch.uint8)


def one(got: Tensor, columns: Sequence[float], **given_: Any) -> Published:  # noqa: ANN401 - fields
    """One row whose window stands between better scores, four places unless said."""
    start = given_.pop("start", 2)
    settings: dict[str, Any] = {
        "topk_blocks": 4,
        "contract": Contract(),
        "ids": torch.tensor([7]),
    } | given_
    return Published(
        got=got,
        scores=torch.tensor([[99.0] * start + list(columns) + [99.0] * 3]),
        at=torch.tensor([0]),
        column=torch.tensor([start]),
        visible=torch.tensor([len(columns)]),
        **settings,
    )


def named(decided: Decided) -> str:
    """The class or rule of the only row."""
    (value,) = decided.codes.tolist()
    return name(value)


def told(published: Published) -> Finding:
    """The finding of the only row."""
    return masks.decide(published).explain(0)


def row(
    kept: Iterable[int],
    form: str = "bool",
    *,
    best: Sequence[float] = BEST,
    size: int = 8,
    slots: int = 0,
    **given_: Any,  # noqa: ANN401 - fields
) -> Published:
    """One row that publishes these blocks of BEST."""
    columns = window(best, size=size)
    got = mask_of(kept, len(columns), form, size=size, slots=slots)
    return one(got, columns, block_size=size, **given_)


# --- the class of a row --------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("kept", "ties", "kind"),
    [
        (KEPT, "lowest", "identical"),
        (KEPT, "highest", "wrong-tie"),
        (KEPT, "any", "identical"),
        (KEPT, "all", "mask-missing"),
        ((1, 3, 4, 5), "lowest", "wrong-tie"),
        ((1, 3, 4, 5), "highest", "identical"),
        ((1, 3, 4, 5), "any", "tied"),
        ((0, 1, 3, 4, 5), "lowest", "mask-extra"),
        ((0, 1, 3, 4, 5), "highest", "mask-extra"),
        ((0, 1, 3, 4, 5), "any", "mask-extra"),
        ((0, 1, 3, 4, 5), "all", "identical"),
        ((0, 1, 3), "any", "mask-missing"),
        ((0, 1, 3, 4), "any", "mask-missing"),
        ((0, 1, 2, 3), "any", "mask-missing"),
        ((0, 1, 5), "any", "mask-missing"),
        ((0, 1, 4, 5), "any", "mask-missing"),
        ((0, 1, 2, 5), "any", "mask-missing"),
        ((1, 2, 3, 5), "any", "mask-extra"),
        ((0, 1, 2, 3, 5), "any", "mask-extra"),
        ((0, 1, 2, 3, 4, 5), "all", "mask-extra"),
        ((2, 4), "any", "mask-missing"),
        ((), "any", "mask-missing"),
    ],
)
def test_blocks_are_judged_like_picks(
    form: str, kept: tuple[int, ...], ties: str, kind: str
) -> None:
    """In every form: too many, too few or a lost one, a loser in a tie's place, another tie."""
    assert named(masks.decide(row(kept, form, slots=6, contract=strict(ties=ties)))) == kind


SCORES = st.sampled_from([-INF, -2.0, -0.0, 0.0, 0.0, 1.0, 1.0, 2.0, INF, NAN])
RULES = st.builds(
    twin_masks.Rules,
    topk_blocks=st.integers(1, 4),
    block_size=st.sampled_from([8, 1, 2, 3]),
    nan=st.sampled_from(get_args(blocks.Nan)),
    short_rows=st.sampled_from(["identity", "any"]),
    zero_sign=st.sampled_from(["distinct", "equal"]),
    ties=st.sampled_from(["lowest", "highest", "any", "all"]),
)


@given(st.lists(st.lists(SCORES, max_size=20), min_size=1, max_size=3), RULES, st.data())
def test_the_twin_decides_what_is_legal(
    windows: list[list[float]], rules: twin_masks.Rules, data: st.DataObject
) -> None:
    """Right blocks with a few taken or left, in every form: the class or rule of each row."""
    size, starts = rules.block_size, [data.draw(st.integers(0, 3)) for _ in windows]
    kept, want = [], []
    for columns in windows:
        bits = by_twin.fp32_bits(torch.tensor(columns))
        turned = st.sets(st.integers(0, max(0, -(-len(columns) // size) - 1)), max_size=2)
        right = twin_masks.published(bits, rules)
        kept.append(set(right) ^ (data.draw(turned) if columns else set()))
        want.append(twin_masks.judged(kept[-1], bits, rules))
    width = max(len(columns) for columns in windows) + 3
    scores = [
        [NAN] * start + columns + [NAN] * (width - start - len(columns))
        for start, columns in zip(starts, windows, strict=True)
    ]
    for form in FORMS:
        rows = [
            mask_of(blocks_, len(columns), form, size=size, columns=24, slots=20)
            for blocks_, columns in zip(kept, windows, strict=True)
        ]
        decided = masks.decide(
            Published(
                got=torch.cat(rows),
                scores=torch.tensor(scores),
                at=torch.arange(len(windows)),
                column=torch.tensor(starts),
                visible=torch.tensor([len(columns) for columns in windows]),
                topk_blocks=rules.topk_blocks,
                block_size=size,
                nan=rules.nan,  # type: ignore[arg-type] # drawn from its values
                contract=strict(
                    ties=rules.ties, short_rows=rules.short_rows, zero_sign=rules.zero_sign
                ),
                ids=torch.arange(len(windows)),
            )
        )
        assert [name(value) for value in decided.codes.tolist()] == want, form
        for i, kind in enumerate(want):
            if kind not in ("identical", "tied"):
                assert decided.explain(i).rule == kind


@given(st.lists(SCORES, min_size=1, max_size=20), RULES, st.integers(0, 19))
def test_a_single_column_more_or_less_is_never_legal(
    columns: list[float], rules: twin_masks.Rules, at: int
) -> None:
    """In blocks of several columns, a bool mask with one of them turned fails."""
    at %= len(columns)
    size = rules.block_size
    kept = twin_masks.published(by_twin.fp32_bits(torch.tensor(columns)), rules)
    seen = min(size, len(columns) - at // size * size)
    if seen == 1:
        return
    got = mask_of(kept, len(columns), "bool", size=size)
    rule = "mask-missing" if bool(got[0, at]) else "mask-extra"
    got[0, at] ^= True
    published = one(
        got,
        columns,
        topk_blocks=rules.topk_blocks,
        block_size=size,
        nan=rules.nan,
        contract=strict(ties=rules.ties, short_rows=rules.short_rows, zero_sign=rules.zero_sign),
    )
    assert told(published).rule == rule


# --- mutants -------------------------------------------------------------------------------------


def turned(published: Published, *columns: int) -> Published:
    """The same bool or packed mask with some columns turned."""
    got = published.got.clone()
    for column in columns:
        if got.dtype is torch.bool:
            got[0, column] ^= True
        else:
            got[0, column // 8] ^= 1 << column % 8
    return replace(published, got=got)


def holding(published: Published, place: int, value: int) -> Published:
    """The same mask with this value in one byte or slot."""
    got = published.got.clone()
    (got.view(torch.uint8) if got.dtype is torch.bool else got)[0, place] = value
    return replace(published, got=got)


def shifted(published: Published, by: int) -> Published:
    """The same bool mask with every column moved up."""
    got = published.got.roll(by, 1)
    got[0, :by] = False
    return replace(published, got=got)


def grid_from_zero() -> Published:
    """Blocks that begin at multiples of 8 of the scores, though the row starts at column 3."""
    columns = window(BEST)
    scores = torch.tensor([[-INF] * 3 + columns])
    ends = torch.tensor([len(columns) + 3])
    got = reference.publish(scores=scores, row_start=ends * 0, row_end=ends, topk_blocks=4)
    return one(got[:, 3:].contiguous(), columns, start=3)


NANS = (4.0, NAN, 1.0, NAN, 4.0, 0.0)
LOW = (4.0, -INF, -INF, -INF, 5.0, -INF)
CUT = "admits the whole tie at the cutoff, 2 blocks where 1 has room: as score >= cutoff does"
PADDING = (
    "block 7, past the row's columns, stands in the place of its newest block 5: as when "
    "padding columns are counted"
)
LOST = "1 of 4 blocks lost to lower scores"
TIE = "the blocks at the cutoff are not the ones the contract names"
NEWEST = "the newest block 5 is left out: it is published whatever it scores"
ZEROS = (0.0, -0.0, -1.0, -1.0, -1.0, -1.0)

MUTANTS: dict[str, tuple[Published, str, str]] = {
    "one bit more": (
        turned(row(KEPT), 17),
        "mask-extra",
        "a single bit differs from the reference: column 17 is admitted",
    ),
    "one bit less": (
        turned(row(KEPT, "packed"), 25),
        "mask-missing",
        "a single bit differs from the reference: column 25 is not admitted",
    ),
    "half a block": (
        turned(row(KEPT), 24, 25, 26, 27),
        "mask-missing",
        "1 block is admitted in part",
    ),
    "newest dropped": (row((0, 1, 3)), "mask-missing", NEWEST),
    "newest dropped, dirty columns behind it": (
        turned(row((0, 1, 3)), 43, 44, 45, 46, 47),
        "mask-missing",
        NEWEST,
    ),
    "newest not pinned": (row((0, 1, 3, 4), "packed"), "mask-missing", NEWEST),
    "newest dropped of ids": (row((0, 1, 3, 4), "unordered"), "mask-missing", NEWEST),
    "winner lost": (row((0, 1, 4, 5), "ascending"), "mask-missing", LOST),
    "loser in the place of a tie": (row((1, 2, 3, 5), "packed"), "mask-extra", ""),
    "another tie": (row((1, 3, 4, 5)), "wrong-tie", TIE),
    "threshold": (row((0, 1, 3, 4, 5), contract=Contract(ties="any")), "mask-extra", CUT),
    "threshold, packed": (row((0, 1, 3, 4, 5), "packed"), "mask-extra", CUT),
    "threshold, ids": (row((0, 1, 3, 4, 5), "unordered", slots=5), "mask-extra", CUT),
    "exactly k where all ties belong": (
        row(KEPT, contract=strict(ties="all")),
        "mask-missing",
        "blocks at the cutoff are left out, and ties=all admits every one of them",
    ),
    "one place too many": (row((0, 1, 2, 3, 4, 5)), "mask-extra", ""),
    "one place too few": (row((1, 3, 5)), "mask-missing", ""),
    "inverse polarity": (
        row((2, 4)),
        "mask-missing",
        "the mask is the complement of the reference in the whole window: True means masked",
    ),
    "nothing published": (row(()), "mask-missing", NEWEST),
    "everything published": (row(range(6)), "mask-extra", ""),
    "highest bit first": (
        holding(turned(row(KEPT, "packed"), *range(40, 43)), 5, 0b1110_0000),
        "mask-missing",
        "every byte is right from its other end: the bits are packed highest first",
    ),
    "mask counted from column 0": (
        shifted(replace(row(KEPT), got=mask_of(KEPT, 43, "bool", columns=56)), 2),
        "mask-extra",
        "every column is 2 too high: counted from column 0, not from the row's start 2",
    ),
    "ids counted from column 0": (
        row((2, 3, 5, 7), "unordered", start=17),
        "out-of-window",
        "every block is 2 too high: counted from column 0, not from the row's start 17",
    ),
    "grid counted from column 0": (
        grid_from_zero(),
        "mask-extra",
        "its blocks are counted from column 0 of the scores, not from the row's start 3",
    ),
    "future block, ids": (
        row((0, 1, 3, 5, 6), "unordered", slots=5),
        "out-of-window",
        "admits blocks past the row's 43 visible columns",
    ),
    "future columns": (
        turned(row(KEPT, contract=Contract(dead="zero")), 45),
        "out-of-window",
        "admits columns past the row's 43 visible columns",
    ),
    "future columns, packed": (
        turned(row(KEPT, "packed", contract=Contract(dead="-inf")), 43),
        "out-of-window",
        "admits columns past the row's 43 visible columns",
    ),
    "padding counted": (
        replace(row((0, 1, 3)), got=mask_of((0, 1, 3, 7), 64, "bool")),
        "mask-missing",
        PADDING,
    ),
    "padding counted, ids": (
        row((0, 1, 3, 7), "ascending"),
        "out-of-window",
        PADDING,
    ),
    "negative id": (
        row((-5, 1, 3, 5), "unordered"),
        "out-of-window",
        "admits blocks past the row's 43 visible columns",
    ),
    "last block repeated": (
        replace(row(()), got=torch.tensor([[5, 5, 5, 5]], dtype=torch.int32)),
        "duplicate",
        "block 5 stands 4 times: as when free slots repeat the last block",
    ),
    "last block repeated over NaN": (
        replace(row((), best=NANS), got=torch.tensor([[5, 5, 0, 5]], dtype=torch.int32)),
        "duplicate",
        "block 5 stands 3 times: as when free slots repeat the last block",
    ),
    "NaN blocks dropped": (
        row((0, 2, 4, 5), best=NANS, contract=Contract(nan="first")),
        "mask-missing",
        "the blocks of a NaN are left out",
    ),
    "blocks at -inf": (
        row((0, 1, 4, 5), best=LOW),
        "mask-extra",
        "blocks without a score above -inf are published",
    ),
    "short row with a hole": (row((0, 2), best=(1.0, -INF, 3.0)), "mask-missing", ""),
    "empty row with a block": (
        row((0,), "unordered", best=()),
        "out-of-window",
        "admits blocks past the row's 0 visible columns",
    ),
    "byte 2": (holding(row(KEPT), 9, 2), "bits", ""),
    "byte 255 in a block left out": (holding(row(KEPT), 17, 255), "bits", ""),
    "bytes never written": (holding(row(KEPT, poison=POISON), 9, POISON % 256), "unwritten", ""),
    "bits never written": (
        holding(row(KEPT, "packed", poison=POISON), 2, POISON % 256),
        "unwritten",
        "",
    ),
    "ids never written": (
        holding(row(KEPT, "unordered", poison=POISON), 1, POISON),
        "unwritten",
        "",
    ),
    "ids that descend": (
        replace(
            row(KEPT, contract=Contract(order="ascending")),
            got=torch.tensor([[0, 3, 1, 5]], dtype=torch.int32),
        ),
        "order",
        "the blocks are right, order=ascending is not kept",
    ),
    "a pad before an id": (
        replace(
            row(KEPT, contract=Contract(order="ascending")),
            got=torch.tensor([[0, 1, -1, 3, 5]], dtype=torch.int32),
        ),
        "order",
        "the blocks are right, order=ascending is not kept",
    ),
    "+0 lost to -0": (
        row((1, 5), best=ZEROS, topk_blocks=2),
        "mask-missing",
        "1 of 2 blocks lost to lower scores",
    ),
    "step before": (
        row((0, 2, 3, 5), previous=mask_of((0, 2, 3, 5), 43, "bool")),
        "mask-missing",
        "the row holds its mask of the previous step",
    ),
    "a pick outside": (
        row(KEPT, picks=torch.tensor([[9, 33, 24, -1]])),
        "mask-missing",
        "mask and picks of the same run disagree: 1 of 3 picks not in the mask",
    ),
    "a pick outside ids": (
        row(KEPT, "ascending", picks=torch.tensor([[9, 33, 24, 17]])),
        "mask-missing",
        "mask and picks of the same run disagree: 2 of 4 picks not in the mask",
    ),
    "a column that was not picked": (
        row(KEPT, size=1, picks=torch.tensor([[3, 1, 5, 3]])),
        "mask-extra",
        "mask and picks of the same run disagree: 1 of the mask's columns not picked",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_named_and_read(mutant: str) -> None:
    """Each fault fails by its rule, and a sentence says what it looks like where that shows."""
    published, rule, reading = MUTANTS[mutant]
    assert named(masks.decide(published)) == rule
    found = told(published)
    assert (found.rule, found.status, found.row) == (rule, Status.DIFFERENT, 7)
    assert found.reading == reading


LEGAL: dict[str, tuple[Published, str]] = {
    "ids in any order": (
        replace(row(KEPT), got=torch.tensor([[3, 5, 0, 1]], dtype=torch.int32)),
        "identical",
    ),
    "both pads, anywhere": (
        replace(row(KEPT), got=torch.tensor([[-1, 3, forms.FAR_PAD, 5, 0, 1]], dtype=torch.int32)),
        "identical",
    ),
    "ascending ids, then pads": (
        replace(
            row(KEPT, contract=Contract(order="ascending")),
            got=torch.tensor([[0, 1, 3, 5, -1, forms.FAR_PAD]], dtype=torch.int32),
        ),
        "identical",
    ),
    "a pad of its own": (
        replace(row(KEPT, pad=-9), got=torch.tensor([[-9, 3, 5, 0, 1]], dtype=torch.int32)),
        "identical",
    ),
    "dirty columns past the window": (
        replace(holding(turned(row(KEPT), 43), 44, 77), poison=77),
        "identical",
    ),
    "dirty bits past the window": (turned(row(KEPT, "packed"), 43, 47), "identical"),
    "clean columns past the window": (row(KEPT, contract=Contract(dead="zero")), "identical"),
    "a tie that looks like the poison": (
        row((1, 3, 4, 5), "packed", poison=0xFF, contract=Contract(ties="any")),
        "tied",
    ),
    "a short row whole": (row((0, 1, 2), best=(1.0, -INF, NAN)), "identical"),
    "a short row by its scores": (
        row((0, 2), best=(1.0, -INF, 3.0), contract=Contract(short_rows="any")),
        "identical",
    ),
    "fewer blocks above -inf than places": (row((0, 4, 5), best=LOW), "identical"),
    "an empty row": (row((), "unordered", best=()), "identical"),
    "an empty row of no columns": (row((), best=()), "identical"),
    "an empty row of no bytes": (
        row((), "packed", best=(), picks=torch.tensor([[-1, 3]])),
        "identical",
    ),
    "NaN first": (row((0, 1, 3, 5), best=NANS, contract=Contract(nan="first")), "identical"),
    "NaN last": (row((0, 2, 4, 5), best=NANS, contract=Contract(nan="last")), "identical"),
    "NaN dropped": (row((0, 5), best=NANS, nan="drop"), "identical"),
    "NaN rejected": (row((0, 1, 3, 5), best=NANS), "undecided"),
    "NaN rejected, whatever is published": (row((2,), best=NANS), "undecided"),
    "zeros alike": (
        row((1, 5), best=ZEROS, topk_blocks=2, contract=Contract(zero_sign="equal", ties="any")),
        "tied",
    ),
    "picks inside": (row(KEPT, picks=torch.tensor([[9, 24, 42, -1]])), "identical"),
    "picks past the window": (row(KEPT, picks=torch.tensor([[9, 24, 99, -1]])), "identical"),
    "picks of a short row": (
        row((0, 1), best=(1.0, 2.0), picks=torch.tensor([[9, 99, -1, -1]])),
        "identical",
    ),
    "picks of a short row whose mask leaves a block out": (
        row(
            (0, 2),
            best=(1.0, -INF, 3.0),
            contract=Contract(short_rows="any"),
            picks=torch.tensor([[9, 1, -1, -1]]),
        ),
        "identical",
    ),
    "another tie and dirty columns past the window": (
        holding(row((1, 3, 4, 5), contract=Contract(ties="any")), 44, 77),
        "tied",
    ),
    "columns that are the picks": (
        row(KEPT, size=1, picks=torch.tensor([[3, 1, 5, 0]])),
        "identical",
    ),
}


@pytest.mark.parametrize("variant", LEGAL)
def test_a_legal_variant_is_let_through(variant: str) -> None:
    """What the contract leaves free is identical, tied or undecided."""
    published, kind = LEGAL[variant]
    assert named(masks.decide(published)) == kind


def test_a_tail_that_is_one_row_off_is_recognised() -> None:
    """Rows hold the mask of the row before them, or of the one after, and say of which."""
    random = torch.Generator().manual_seed(5)
    scores = torch.randn(6, 70, generator=random)
    visible = torch.arange(58, 64)
    right = reference.publish(
        scores=scores, row_start=visible * 0, row_end=visible, topk_blocks=3, form="packed"
    )
    published = Published(
        got=right,
        scores=scores,
        at=torch.arange(6),
        column=visible * 0,
        visible=visible,
        topk_blocks=3,
        contract=Contract(),
        ids=torch.arange(40, 46),
    )
    assert tally(masks.decide(published).codes) == {"identical": 6}
    later = masks.decide(replace(published, got=right.roll(1, 0)))
    earlier = masks.decide(replace(published, got=right.roll(-1, 0)))
    assert later.explain(3).reading == (
        "row 43 holds the mask of row 42: as when a tail is off by one"
    )
    assert earlier.explain(3).reading == (
        "row 43 holds the mask of row 44: as when a tail is off by one"
    )
    single = right.clone()
    single[3] = right[2]
    assert masks.decide(replace(published, got=single)).explain(3).reading == (
        "row 43 holds the mask of row 42: as when a tail is off by one"
    )
    # These rows differ from each other in their last columns alone.
    alike = replace(published, scores=scores[:1].expand(6, -1))
    right = written(alike, know(alike).kept)
    later = masks.decide(replace(alike, got=right.roll(1, 0)))
    assert later.explain(3).reading == (
        "row 43 holds the mask of row 42: as when a tail is off by one"
    )
    single = right.clone()
    single[3] = right[2]
    assert masks.decide(replace(alike, got=single)).explain(3).reading == (
        "a single bit differs from the reference: column 60 is not admitted"
    )


def test_a_nan_is_shown_where_it_stands() -> None:
    """An undecided row says which column ranks nowhere."""
    found = told(row(KEPT, best=NANS))
    (line,) = found.evidence
    assert (found.rule, found.status) == ("nan", Status.UNDECIDED)
    assert (line.place, line.value, line.bits) == ("column 8 (block 1)", "nan", "7FC00000")
    assert found.reading == "a NaN in the window ranks nowhere under nan=reject"


def test_findings_read_well() -> None:
    """Whole messages: blocks with their columns, scores in decimal and bits, slots, picks."""
    shown = [
        "winner lost",
        "loser in the place of a tie",
        "another tie",
        "threshold, packed",
        "newest not pinned",
        "one bit less",
        "half a block",
        "everything published",
        "future block, ids",
        "last block repeated",
        "byte 2",
        "bits never written",
        "ids that descend",
        "a pick outside",
        "a column that was not picked",
    ]
    texts = []
    for mutant in shown:
        found = told(MUTANTS[mutant][0])
        stage = Stage(
            status=Status.DIFFERENT, counts={"rows": 1}, rules={found.rule: 1}, failing=(7,)
        )
        run = Run(name="candidate", stages={found.stage: stage}, findings=(found,))
        verdict = Verdict(case=mutant, op="publish_mask", status=Status.DIFFERENT, runs=(run,))
        lines = as_text.failure(verdict).splitlines()
        texts.append("\n".join([mutant, *lines[2 : lines.index("", 2)]]))
    text = "\n\n".join(texts) + "\n"
    assert text == (MESSAGES / "masks.txt").read_text(encoding="utf-8")


# --- counts and power ----------------------------------------------------------------------------


def test_rows_and_positions_are_counted() -> None:
    """Selecting, short and empty rows, and the columns of all windows."""
    visible = torch.tensor([43, 20, 0])
    published = Published(
        got=torch.ones(3, 48, dtype=torch.bool),
        scores=torch.zeros(1, 48),
        at=torch.zeros(3, dtype=torch.int64),
        column=visible * 0,
        visible=visible,
        topk_blocks=4,
        contract=Contract(),
        ids=visible,
    )
    decided = masks.decide(published)
    assert decided.counts == {"selecting": 1, "short": 1, "empty": 1, "positions": 63}
    assert tally(decided.codes) == {"mask-extra": 1, "identical": 2}
    assert decided.power


@pytest.mark.parametrize(
    ("published", "power"),
    [
        (row(KEPT), True),
        (row(range(6), topk_blocks=6), False),
        (row((0, 1, 2, 5), best=(1.0,) * 6), True),
        (row((0, 1, 2, 5), best=(1.0,) * 6, contract=Contract(ties="any")), True),
        (row((0, 1, 2, 5), best=(1.0,) * 5 + (2.0,), contract=Contract(ties="any")), True),
        (row((), best=()), False),
    ],
)
def test_a_mask_without_a_choice_has_no_power(published: Published, power: bool) -> None:  # noqa: FBT001 - pytest's way
    """No row selects, or all blocks score alike under ties=any: nothing could be wrong."""
    assert masks.decide(published).power is power


# --- words ---------------------------------------------------------------------------------------


@given(
    st.sampled_from(["bool", "packed"]),
    st.tuples(st.integers(1, 5), st.integers(1, 150)),
    st.integers(0, 1 << 30),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from([1, 100, 1 << 20]),
)
def test_masks_differ_where_a_visible_column_differs(
    form: str, shape: tuple[int, int], seed: int, offsets: tuple[int, int], cells: int
) -> None:
    """Any width, stride and offset, dirty columns past the windows: as told column by column."""
    (rows, width), random = shape, torch.Generator().manual_seed(seed)
    dtype = torch.bool if form == "bool" else torch.uint8
    columns = width * (1 if form == "bool" else 8)
    most = 2 if form == "bool" else 256
    base = torch.randint(0, most, (rows, width), generator=random, dtype=torch.uint8)
    sides = []
    for offset in offsets:
        wide = torch.zeros(rows, width + offset, dtype=torch.uint8)
        wide[:, offset:] = base
        sides.append(wide.view(dtype)[:, offset:])
    want, got = sides
    visible = torch.randint(0, columns + 1, (rows,), generator=random)
    for at in torch.randint(0, width, (2 * rows,), generator=random).tolist():
        got.view(torch.uint8)[at % rows, at] ^= 1 << (at % 8 if form == "packed" else 0)
    live = torch.arange(columns) < visible[:, None]
    unlike = maskwords.cells(want, columns=columns) != maskwords.cells(got, columns=columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "CELLS", cells)
        found = maskwords.differing(want=want, got=got, visible=visible)
    assert found.tolist() == (unlike & live).any(1).tolist()


@pytest.mark.parametrize(
    ("want", "got", "differs"),
    [
        ([3, 1, -1], [1, 3, forms.FAR_PAD], False),
        ([3, 1, -1], [1, 3], False),
        ([3, 1], [1, 3, -1], False),
        ([3, 1], [1, 2], True),
        ([3, 1, 1], [3, 3, 1], True),
        ([3, 1, -1], [3, 1, 1], True),
        ([-1, -1], [-1, 0], True),
    ],
)
def test_ids_differ_as_sets(want: list[int], got: list[int], differs: bool) -> None:  # noqa: FBT001 - pytest's way
    """Order and pads do not count; a repeated block does."""
    one_, other = (torch.tensor([ids], dtype=torch.int32) for ids in (want, got))
    found = maskwords.differing(want=one_, got=other, visible=torch.tensor([40]))
    assert found.tolist() == [differs]


ALIKE = "masks of one form and as many rows are compared"


@pytest.mark.parametrize(
    ("got", "visible", "message"),
    [
        (
            torch.zeros(2, 8, dtype=torch.uint8),
            8,
            f"want is torch.bool [2, 8] and got torch.uint8 [2, 8]: {ALIKE}",
        ),
        (
            torch.zeros(1, 8, dtype=torch.bool),
            8,
            f"want is torch.bool [2, 8] and got torch.bool [1, 8]: {ALIKE}",
        ),
        (torch.zeros(2, 7, dtype=torch.bool), 8, "the masks have 7 columns: a row sees 8"),
    ],
)
def test_masks_that_cannot_be_compared_are_refused(got: Tensor, visible: int, message: str) -> None:
    """One sentence says why."""
    with pytest.raises(ValueError, match=r"^") as caught:
        maskwords.differing(
            want=torch.zeros(2, 8, dtype=torch.bool), got=got, visible=torch.tensor([3, visible])
        )
    assert str(caught.value) == message


ADDED = "every value is 0 or -inf: a mask to be added to scores, not one that is applied to them"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([0.0, -INF], ADDED),
        ([-0.0, -INF], ADDED),
        ([0.0, 0.0], ""),
        ([-INF, -INF], ""),
        ([0.0, 1.0], ""),
        ([0.0, -INF, INF], ""),
        ([0.0, -INF, NAN], ""),
        ([], ""),
    ],
)
def test_an_additive_mask_is_recognised(values: list[float], sentence: str) -> None:
    """Both values occur and no other does."""
    for dtype in (torch.float32, torch.bfloat16):
        assert maskwords.additive(torch.tensor([values], dtype=dtype)) == sentence
    assert maskwords.additive(torch.tensor(0.0)) == ""
    assert maskwords.additive(torch.zeros(2, 3, dtype=torch.bool)) == ""
