"""Scores of kernels whose bits nobody claims, against the reference with a bound a cell."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from equivalence.checks.rows import (
    IDENTICAL,
    Decided,
    code,
    hexadecimal,
    name,
    score_line,
    set_first,
)
from equivalence.verdict import Evidence, Finding

_SHOWN = 4
_RULES = ("unwritten", "bits", "nan")


@dataclass(frozen=True, kw_only=True, eq=False)
class Bounded:
    """Two blocks of scores over the same windows, and how far they may be apart.

    Attributes:
        want: fp64 [B, W] of the reference.
        bound: fp64 [B, W]; inf where nothing is known.
        got: [B, W], fp32, bf16 or fp16.
        first: int64 [B], first compared column.
        count: int64 [B], compared columns.
        ids: int64 [B], the rows' numbers in the call.
        stage: the output's name.
        poison: what the buffer held before the launch, where known.
    """

    want: Tensor
    bound: Tensor
    got: Tensor
    first: Tensor
    count: Tensor
    ids: Tensor
    stage: str
    poison: float | None = None

    def take(self, which: Tensor) -> "Bounded":
        """The same for some rows of the block."""
        return Bounded(
            want=self.want[which],
            bound=self.bound[which],
            got=self.got[which],
            first=self.first[which],
            count=self.count[which],
            ids=self.ids[which],
            stage=self.stage,
            poison=self.poison,
        )


def decide(scores: Bounded) -> Decided:
    """Name every row identical, all its cells within their bounds, or the first rule broken."""
    kinds, known = _kinds(scores)
    codes = torch.full_like(scores.count, IDENTICAL, dtype=torch.int8)
    undecided = torch.ones_like(codes, dtype=torch.bool)
    for rule in _RULES:
        set_first(codes, undecided, kinds[rule].any(1), code(rule))
    compared = int(scores.count.sum())
    different = sum(int(kind.sum()) for kind in kinds.values())
    counts = {
        "compared": compared,
        "within": compared - different,
        "different": different,
        "unbounded": compared - int(known.sum()),
    }
    return Decided(
        codes=codes,
        counts=counts,
        power=bool(known.any()),
        explain=partial(_explain, scores, codes),
    )


def _kinds(scores: Bounded) -> tuple[dict[str, Tensor], Tensor]:
    """Cells that are out of bounds, each under one rule, and the cells that are compared at all."""
    column = torch.arange(scores.want.shape[1], device=scores.want.device)
    first = scores.first[:, None]
    inside = (column >= first) & (column < first + scores.count[:, None])
    want, got = scores.want, scores.got.to(torch.float64)
    known = inside & scores.bound.isfinite()
    close = ((got - want).abs() <= scores.bound) | (got == want) | (got.isnan() & want.isnan())
    off = known & ~close
    unwritten = torch.zeros_like(off) if scores.poison is None else off & (got == scores.poison)
    nan = off & ~unwritten & (want.isnan() | got.isnan())
    return {"unwritten": unwritten, "bits": off & ~unwritten & ~nan, "nan": nan}, known


def _explain(scores: Bounded, codes: Tensor, i: int) -> Finding:
    """The finding of row i: its first cells out of bounds, want beside got."""
    rule = name(int(codes[i]))
    row = scores.take(torch.tensor([i], device=codes.device))
    columns = _kinds(row)[0][rule][0].nonzero()[:, 0]
    lines: list[Evidence] = []
    for column in columns[:_SHOWN].tolist():
        want, got = row.want[0, column], row.got[0, column]
        distance, bound = float((got.double() - want).abs()), float(row.bound[0, column])
        place = f"column {column}"
        lines += [
            Evidence(
                label="want",
                place=place,
                value=f"{float(want):.17g}",
                bits=hexadecimal(want),
                note=f"give or take {bound:.3g}",
            ),
            score_line("got", place, got, f"off by {distance:.3g}"),
        ]
    if len(columns) > _SHOWN:
        lines.append(Evidence(label="", place=f"and {len(columns) - _SHOWN:,} more columns"))
    first, count = int(row.first[0]), int(row.count[0])
    return Finding(
        stage=scores.stage,
        rule=rule,
        row=int(row.ids[0]),
        place=f"columns {first}-{first + count}   {len(columns):,} of {count:,} cells",
        evidence=tuple(lines),
    )
