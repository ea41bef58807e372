"""Picks of kernels whose bits nobody claims, by intervals in which their scores may lie.

A score that may lie anywhere in an interval leaves a legal set of selections: column j is *forced*
if fewer than `need` others can reach its low end, *excluded* if at least `need` others surely beat
its high end, else *open*. Some scores inside the intervals lead to a selection of `need` columns
exactly when no column left out surely beats a picked one; then it has every forced column and no
excluded one.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from equivalence.checks.rows import (
    OPEN,
    REORDERED,
    Decided,
    code,
    name,
    set_first,
)
from equivalence.verdict import Evidence, Finding

_SHOWN = 4
_MOST_OPEN = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranges:
    """Where the scores of a block of rows may lie.

    Attributes:
        low: [B, W], what each score is at least.
        high: [B, W], what it is at most.
        eligible: bool [B, W], the columns that may be picked.
    """

    low: Tensor
    high: Tensor
    eligible: Tensor

    def take(self, which: Tensor) -> "Ranges":
        """The same for some rows of the block."""
        return Ranges(low=self.low[which], high=self.high[which], eligible=self.eligible[which])


def intervals(
    scores: Tensor, bound: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """The ends of [score - bound, score + bound], rounded outward to `dtype`.

    Args:
        scores: fp64.
        bound: fp64, at least 0. inf and a NaN score say nothing: -inf to inf; 0 is the score.
        dtype: fp64, fp32 or bf16, what the ends are kept in.

    Returns:
        low and high, `dtype`.
    """
    exact = bound == 0
    unknown = scores.isnan() | bound.isnan() | bound.isinf()
    infinity = torch.full_like(scores, torch.inf)
    ends = []
    for sign in (-1, 1):
        end = torch.nextafter(scores + sign * bound, sign * infinity)
        end = torch.where(unknown, sign * infinity, torch.where(exact, scores, end))
        near = end.to(dtype)
        inward = sign * near.to(torch.float64) < sign * end
        ends.append(torch.where(inward, torch.nextafter(near, (sign * infinity).to(dtype)), near))
    return ends[0], ends[1]


def in_windows(
    scores: Tensor,
    bound: Tensor,
    *,
    column: Tensor,
    visible: Tensor,
    admitted: Tensor | None = None,
    minus_inf: str = "pick",
) -> Ranges:
    """The ranges of rows whose windows lie in their scores.

    Args:
        scores: fp64 [B, W].
        bound: fp64 [B, W].
        column: int64 [B], where a row's window begins.
        visible: int64 [B], its columns.
        admitted: bool [B, W], columns that may be picked; None where the window says all.
        minus_inf: of the contract; `pad` picks no score of -inf.
    """
    at = torch.arange(scores.shape[1], device=scores.device)
    eligible = (at >= column[:, None]) & (at < (column + visible)[:, None])
    if admitted is not None:
        eligible = eligible & admitted
    if minus_inf == "pad":
        eligible = eligible & ~scores.isneginf()
    low, high = intervals(scores, bound)
    return Ranges(low=low, high=high, eligible=eligible)


def classify(ranges: Ranges, need: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which columns every legal selection has, which none has, and which one may have.

    Args:
        ranges: of [B, W].
        need: int64 [B], picks that a row owes; at most its eligible columns.

    Returns:
        forced, excluded and open, bool [B, W]; of a column that is not eligible none holds.
    """
    low, high, eligible = ranges.low, ranges.high, ranges.eligible
    forced = low > _ranked(high.masked_fill(~eligible, -torch.inf), need + 1)
    # Where every eligible column is owed, nobody is left to reach a low end.
    forced |= (need >= eligible.sum(1))[:, None]
    excluded = high < _ranked(low.masked_fill(~eligible, -torch.inf), need)
    excluded |= (need == 0)[:, None]
    forced, excluded = forced & eligible & ~excluded, excluded & eligible
    return forced, excluded, eligible & ~forced & ~excluded


def _ranked(x: Tensor, rank: Tensor) -> Tensor:
    """The rank-th largest of each row, [B, 1]; -inf past the end, and meaningless at rank 0."""
    most = min(max(int(rank.max()), 1), x.shape[1]) if len(rank) else 0
    if not most:
        return x.new_full((len(x), 1), -torch.inf)
    best = x.topk(most, dim=1).values
    value = best.gather(1, (rank - 1).clamp(0, most - 1)[:, None])
    return torch.where((rank > x.shape[1])[:, None], -torch.inf, value)


def name_choices(
    ranges: Ranges, columns: Tensor, usable: Tensor, same: Tensor, *, order: str = "any"
) -> Tensor:
    """The class or rule of rows whose structure is right, by the intervals of their scores.

    Ties have no rule here: which columns tie is known to the kernel alone.

    Args:
        ranges: of [B, W].
        columns: int64 [B, slots], picks as columns of the ranges.
        usable: bool [B, slots], slots that hold a pick.
        same: bool [B], rows that hold the reference's own set.
        order: of the contract; `ascending` is by column.

    Returns:
        int8 [B]: REORDERED, OPEN, or the code of `lost-winner` or `order`.
    """
    codes = torch.full_like(same, REORDERED, dtype=torch.int8)
    undecided = torch.ones_like(same)
    best, worst = _ends(ranges, columns, usable)
    set_first(codes, undecided, ~same & (best > worst), code("lost-winner"))
    set_first(codes, undecided, _out_of_order(ranges, columns, usable, order), code("order"))
    set_first(codes, undecided, ~same, OPEN)
    return codes


def _picked(ranges: Ranges, columns: Tensor, usable: Tensor) -> Tensor:
    """Which columns were picked, bool [B, W]."""
    spare = ranges.low.shape[1]
    out = torch.zeros((len(columns), spare + 1), dtype=torch.bool, device=columns.device)
    out.scatter_(1, torch.where(usable, columns, spare), value=True)
    return out[:, :spare]


def _ends(ranges: Ranges, columns: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """The best low end that was left out and the worst high end that was picked, [B] each."""
    picked = _picked(ranges, columns, usable)
    left = ranges.low.masked_fill(picked | ~ranges.eligible, -torch.inf)
    taken = ranges.high.masked_fill(~picked, torch.inf)
    if not left.shape[1]:
        return left.new_full((len(left),), -torch.inf), left.new_full((len(left),), torch.inf)
    return left.amax(1), taken.amin(1)


def _out_of_order(ranges: Ranges, columns: Tensor, usable: Tensor, order: str) -> Tensor:
    """Rows in which a pick surely stands behind one that it should precede, bool [B]."""
    if order == "any" or not ranges.low.shape[1]:
        return torch.zeros_like(usable[:, 0])
    at = columns.clamp(0, ranges.low.shape[1] - 1)
    after = columns.double() if order == "ascending" else -ranges.low.gather(1, at).double()
    before = columns.double() if order == "ascending" else -ranges.high.gather(1, at).double()
    first = before.masked_fill(~usable, -torch.inf).cummax(1).values[:, :-1]
    return (usable[:, 1:] & (after[:, 1:] < first)).any(1)


def census(ranges: Ranges, need: Tensor) -> tuple[dict[str, int], bool]:
    """Columns by class, and whether a row has power: at most a quarter of its picks are open.

    Args:
        ranges: of [B, W].
        need: int64 [B].
    """
    forced, excluded, open_ = classify(ranges, need)
    owed = need - forced.sum(1)
    selecting = (ranges.eligible.sum(1) > need) & (need > 0)
    strong = selecting & (_MOST_OPEN * owed <= need)
    counts = {
        "forced": int(forced.sum()),
        "excluded": int(excluded.sum()),
        "open": int(open_.sum()),
        "too-open": int((selecting & ~strong).sum()),
    }
    return counts, bool(strong.any())


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """Picks whose structure is right: in their slots, inside the window, none twice.

    Attributes:
        ranges: of [B, W].
        want: bool [B, W], the reference's own set.
        columns: int64 [B, slots], picks as columns of the ranges.
        usable: bool [B, slots], slots that hold a pick; of each row as many as `want` has columns.
        ids: int64 [B], the rows' numbers in the call.
        stage: the output's name.
        order: of the contract.
    """

    ranges: Ranges
    want: Tensor
    columns: Tensor
    usable: Tensor
    ids: Tensor
    stage: str
    order: str = "any"


def decide(chosen: Chosen) -> Decided:
    """Name every row reordered, open, or the rule that it breaks."""
    ranges, columns, usable = chosen.ranges, chosen.columns, chosen.usable
    same = (_picked(ranges, columns, usable) == chosen.want).all(1)
    codes = name_choices(ranges, columns, usable, same, order=chosen.order)
    counts, power = census(ranges, chosen.want.sum(1))
    return Decided(
        codes=codes, counts=counts, power=power, explain=partial(_explain, chosen, codes)
    )


def _explain(chosen: Chosen, codes: Tensor, i: int) -> Finding:
    one = torch.tensor([i], device=codes.device)
    evidence, reading = explain_set(
        chosen.ranges.take(one), chosen.columns[one], chosen.usable[one]
    )
    return Finding(
        stage=chosen.stage,
        rule=name(int(codes[i])),
        row=int(chosen.ids[i]),
        evidence=evidence,
        reading=reading,
    )


def explain_set(
    ranges: Ranges, columns: Tensor, usable: Tensor
) -> tuple[tuple[Evidence, ...], str]:
    """What the only row lost, and what stands in its place: evidence and reading."""
    best, worst = _ends(ranges, columns, usable)
    picked = _picked(ranges, columns, usable)
    forced, excluded, _ = classify(ranges, usable.sum(1))
    missing, extra = forced & ~picked, excluded & picked
    if not bool(missing.any() or extra.any()):
        missing = ranges.eligible & ~picked & (ranges.low > worst[:, None])
        extra = picked & (ranges.high < best[:, None])
    lines: list[Evidence] = []
    for label, which, by in (("missing", missing, -ranges.low), ("extra", extra, ranges.high)):
        found = which[0].nonzero()[:, 0]
        ranked = found[by[0, found].sort(stable=True).indices]
        for column in ranked[:_SHOWN].tolist():
            low, high = float(ranges.low[0, column]), float(ranges.high[0, column])
            lines.append(
                Evidence(
                    label=label,
                    place=f"column {column}",
                    value=f"{low:.9g} to {high:.9g}",
                    note=_beside(label, low=low, high=high, best=best, worst=worst),
                )
            )
        if len(ranked) > _SHOWN:
            lines.append(Evidence(label=label, place=f"and {len(ranked) - _SHOWN:,} more"))
    lost, taken = int(missing.sum()), int(extra.sum())
    reading = ""
    if lost:
        left = "1 column" if lost == 1 else f"{lost:,} columns"
        beaten = "1 pick is" if taken == 1 else f"{taken:,} picks are"
        reading = f"{left} left out for less, {beaten} surely beaten"
    return tuple(lines), reading


def _beside(label: str, *, low: float, high: float, best: Tensor, worst: Tensor) -> str:
    if label == "missing":
        return f"{low - float(worst):.3g} above the most that a pick can be"
    return f"{float(best) - high:.3g} below the least of a column left out"
