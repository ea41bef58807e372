"""A selection: what the reference knows of a block of rows, and what a kernel picked of it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from equivalence.checks.bounds import Ranges
from equivalence.checks.rows import score_line
from equivalence.contract import Contract
from equivalence.verdict import Finding, Status
from refimpl import bits, topk

_BEFORE = topk.PAD - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """What the reference knows of a block of rows.

    Attributes:
        scores: [N, W] fp32, bf16 or fp16.
        at: int64 [B], which row of `scores` each row is.
        column: int64 [B], where the window's first score stands in `scores`.
        visible: int64 [B], how many scores the window has.
        start: int64 [B], the window's first column of the concatenated K.
        want: int32 [B, k], the reference's picks relative to the window, pads -1.
        nan: bool [B], rows that cannot be ranked: a NaN in the window under nan=reject.
        k: picks a row may hold.
        contract: the freedoms.
        ids: int64 [B], the rows' numbers in the call.
        admitted: bool [N, W], cells that may be picked; None where the window says all.
        ranges: where the scores may lie, [N, W]; None where they are known to the bit.
    """

    scores: Tensor
    at: Tensor
    column: Tensor
    visible: Tensor
    start: Tensor
    want: Tensor
    nan: Tensor
    k: int
    contract: Contract
    ids: Tensor
    admitted: Tensor | None = None
    ranges: Ranges | None = None

    def take(self, which: Tensor) -> "Selection":
        """The same for some rows of the block."""
        return Selection(
            scores=self.scores,
            at=self.at[which],
            column=self.column[which],
            visible=self.visible[which],
            start=self.start[which],
            want=self.want[which],
            nan=self.nan[which],
            k=self.k,
            contract=self.contract,
            ids=self.ids[which],
            admitted=self.admitted,
            ranges=self.ranges,
        )

    def window(self, i: int) -> Tensor:
        """The scores of row i's window."""
        first = int(self.column[i])
        return self.scores[int(self.at[i]), first : first + int(self.visible[i])]

    def keys(self, relative: Tensor) -> Tensor:
        """Order keys at window-relative columns [B, n] that lie in the buffer."""
        # Without a column no row reads a score, and whatever stands there decides nothing.
        scores = self.scores if self.scores.shape[1] else functional.pad(self.scores, (0, 1))
        column = (relative + self.column[:, None]).clamp(0, scores.shape[1] - 1)
        # Rows come in order, so as many as there are means all of them.
        every = len(self.at) == len(scores)
        found = scores.gather(1, column) if every else scores[self.at[:, None], column]
        return bits.order_key(
            found,
            zero_sign=self.contract.zero_sign,
            nan=nan_order(self.contract),
        )

    def admits(self, relative: Tensor) -> Tensor:
        """Whether columns [B, n] that lie in their window may be picked, bool [B, n]."""
        if self.admitted is None or not self.admitted.shape[1]:
            return torch.ones_like(relative, dtype=torch.bool)
        column = (relative + self.column[:, None]).clamp(0, self.admitted.shape[1] - 1)
        return self.admitted[self.at[:, None], column]

    def legal(self, i: int) -> topk.LegalSet:
        """The legal set of row i."""
        return topk.legal_set(
            scores=self.window(i),
            k=self.k,
            minus_inf=self.contract.minus_inf,
            nan=nan_order(self.contract),
            zero_sign=self.contract.zero_sign,
        )


def nan_order(contract: Contract) -> bits.NanOrder:
    """Where a contract ranks NaN: what is dropped ranks first before it is."""
    return "first" if contract.nan == "drop" else contract.nan


def best_picks(
    scores: Tensor, *, row_start: Tensor, row_end: Tensor, k: int, contract: Contract
) -> Tensor:
    """`refimpl.topk.ragged_topk` with the freedoms of a contract."""
    return topk.ragged_topk(
        scores=scores,
        row_start=row_start,
        row_end=row_end,
        k=k,
        order=contract.order,
        # A row of picks has room for no whole tie set.
        ties="any" if contract.ties == "all" else contract.ties,
        short_rows=contract.short_rows,
        empty_rows=contract.empty_rows,
        minus_inf=contract.minus_inf,
        nan=nan_order(contract),
        zero_sign=contract.zero_sign,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Picks:
    """One output of picks.

    Attributes:
        values: int32 [B, slots] as the kernel wrote them.
        base: int64 [B], what was added to a window-relative column.
        pad: the value of an unused slot.
        poison: what the buffer held before the launch, where known.
        stage: the output's name.
    """

    values: Tensor
    base: Tensor
    stage: str
    pad: int = topk.PAD
    poison: int | None = None

    def take(self, which: Tensor) -> "Picks":
        """The same for some rows of the block."""
        return Picks(
            values=self.values[which],
            base=self.base[which],
            stage=self.stage,
            pad=self.pad,
            poison=self.poison,
        )

    def relative(self) -> Tensor:
        """int64 [B, slots] window-relative columns; the pad is moved like any value."""
        return self.values.long() - self.base[:, None]

    def columns(self, slots: int) -> Tensor:
        """int64 [B, slots] window-relative columns, pads -1 and what lies before the window -2."""
        relative = self.relative()
        relative = torch.where(relative < 0, _BEFORE, relative)
        relative = torch.where(self.values == self.pad, topk.PAD, relative)
        return functional.pad(relative, (0, slots - relative.shape[1]), value=topk.PAD)

    def written(self, want: Tensor) -> Tensor:
        """The reference's picks as this output would hold them, int32 [B, slots]."""
        moved = want
        if self.pad != topk.PAD or bool(self.base.any()):
            moved = torch.where(want == topk.PAD, self.pad, want + self.base[:, None]).int()
        surplus = self.values.shape[1] - want.shape[1]
        return functional.pad(moved, (0, surplus), value=self.pad) if surplus > 0 else moved


def census(selection: Selection) -> dict[str, int]:
    """Rows that really select, short rows and empty ones."""
    visible, k = selection.visible, selection.k
    selecting, empty = int((visible > k).sum()), int((visible == 0).sum())
    return {"selecting": selecting, "short": len(visible) - selecting - empty, "empty": empty}


def reads_scores(visible: Tensor, *, k: int, contract: Contract) -> Tensor:
    """Rows whose picks depend on their scores, bool [B]."""
    return visible > (k if contract.short_rows == "identity" else 0)


def has_power(selection: Selection) -> bool:
    """Whether some selecting row had a choice that could have been wrong."""
    selecting = (selection.visible > selection.k).nonzero()[:, 0].tolist()
    if selection.contract.ties != "any":
        return bool(selecting)
    for i in selecting:
        window = selection.window(i)
        if bool((bits.as_int(window) != bits.as_int(window[:1])).any()):
            return True
    return False


def nan_finding(selection: Selection, i: int, *, stage: str) -> Finding:
    """Row i is undecided: a score it must rank is NaN."""
    window = selection.window(i)
    column = int(window.isnan().nonzero()[0, 0])
    return Finding(
        stage=stage,
        rule="nan",
        status=Status.UNDECIDED,
        row=int(selection.ids[i]),
        place=place_of(selection, i),
        evidence=(score_line("nan", column_of(selection, i, column), window[column]),),
        reading="a NaN in the window ranks nowhere under nan=reject",
    )


def place_of(selection: Selection, i: int) -> str:
    """The window of row i in words."""
    start = int(selection.start[i])
    return f"columns {start}-{start + int(selection.visible[i])}   k {selection.k}"


def column_of(selection: Selection, i: int, column: int) -> str:
    """A window-relative column of row i in words, with its place in the concatenated K."""
    start = int(selection.start[i])
    return f"column {column}" if start == 0 else f"column {column} (K {start + column})"
