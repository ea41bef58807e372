"""Scores bit for bit: equal first by row, cell by cell only where a row differs."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from equivalence.checks.rows import IDENTICAL, Decided, code, name, score_line
from equivalence.verdict import Evidence, Finding
from refimpl import bits

_SHOWN = 4
_RULES = ("unwritten", "bits", "sign-of-zero", "nan")


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Two blocks of scores over the same windows.

    Attributes:
        want: [B, W] of the reference, already holding what `dead` says outside the windows.
        got: [B, W] of the same dtype.
        first: int64 [B], first compared column.
        count: int64 [B], compared columns.
        ids: int64 [B], the rows' numbers in the call.
        stage: the output's name.
        poison: what the buffer held before the launch, where known.
    """

    want: Tensor
    got: Tensor
    first: Tensor
    count: Tensor
    ids: Tensor
    stage: str
    poison: float | None = None

    def row(self, i: int) -> tuple[Tensor, Tensor]:
        """The compared cells of row i, want and got."""
        cells = slice(int(self.first[i]), int(self.first[i] + self.count[i]))
        return self.want[i, cells], self.got[i, cells]


def decide(scores: Scores) -> Decided:
    """Name every row identical or the first rule one of its cells breaks."""
    codes = torch.full_like(scores.count, IDENTICAL, dtype=torch.int8)
    compared = int(scores.count.sum())
    different = 0
    want, got = bits.as_int(scores.want), bits.as_int(scores.got)
    if not torch.equal(want, got):
        for i, (first, count) in enumerate(
            zip(scores.first.tolist(), scores.count.tolist(), strict=True)
        ):
            cells = slice(first, first + count)
            if torch.equal(want[i, cells], got[i, cells]):
                continue
            kinds = _kinds(*scores.row(i), poison=scores.poison)
            codes[i] = code(next(rule for rule in _RULES if bool(kinds[rule].any())))
            different += sum(int(kind.sum()) for kind in kinds.values())
    return Decided(
        codes=codes,
        counts={
            "compared": compared,
            "identical": compared - different,
            "different": different,
        },
        power=compared > 0,
        explain=partial(_explain, scores, codes),
    )


def _kinds(want: Tensor, got: Tensor, *, poison: float | None) -> dict[str, Tensor]:
    """The cells that differ, each under one rule."""
    differ = bits.as_int(want) != bits.as_int(got)
    unwritten = torch.zeros_like(differ) if poison is None else differ & (got == poison)
    nan = differ & ~unwritten & (want.isnan() | got.isnan())
    zero = differ & (want == 0) & (got == 0)
    return {
        "unwritten": unwritten,
        "bits": differ & ~unwritten & ~nan & ~zero,
        "sign-of-zero": zero,
        "nan": nan,
    }


def _explain(scores: Scores, codes: Tensor, i: int) -> Finding:
    """The finding of row i: its first differing cells, want beside got."""
    rule = name(int(codes[i]))
    want, got = scores.row(i)
    kinds = _kinds(want, got, poison=scores.poison)
    columns = kinds[rule].nonzero()[:, 0]
    first = int(scores.first[i])
    lines: list[Evidence] = []
    for column in columns[:_SHOWN].tolist():
        gap = ""
        if rule == "bits":
            ulp = int(bits.ulp_distance(got[column], want[column]))
            gap = f"{ulp:+,} ulp"
        lines += [
            score_line("want", f"column {first + column}", want[column]),
            score_line("got", f"column {first + column}", got[column], gap),
        ]
    if len(columns) > _SHOWN:
        lines.append(Evidence(label="", place=f"and {len(columns) - _SHOWN:,} more columns"))
    return Finding(
        stage=scores.stage,
        rule=rule,
        row=int(scores.ids[i]),
        place=f"columns {first}-{first + len(want)}   {len(columns):,} of {len(want):,} cells",
        evidence=tuple(lines),
        reading=_reading(want, got, columns, first),
    )


def _reading(want: Tensor, got: Tensor, columns: Tensor, first: int) -> str:
    """What the differing cells look like, where all of them look alike."""
    x, y = want[columns].double(), got[columns].double()
    if bool((y == 0).all()) and bool((x != 0).all()):
        return f"every differing score is zero, from column {first + int(columns[0])} on"
    if bool(y.isneginf().all()) and bool(x.isfinite().all()):
        return f"-inf where the reference is finite, from column {first + int(columns[0])} on"
    ratio = (y / x)[(x != 0) & x.isfinite() & y.isfinite()]
    if len(ratio) > 1 and bool((ratio == ratio[0]).all()):
        return f"every differing score is {float(ratio[0]):.9g} times the reference"
    return ""
