"""Rows that a reference gives whole, bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from equivalence.checks.rows import (
    IDENTICAL,
    Decided,
    code,
    hexadecimal,
    name,
    number,
    set_first,
)
from equivalence.verdict import Evidence, Finding
from refimpl import bits

_SHOWN = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Whole:
    """Two blocks of rows of one output.

    Attributes:
        want: [B, ...] of the reference.
        got: the same shape and dtype.
        ids: int64 [B], the rows' numbers in the call.
        stage: the output's name.
        poison: what the buffer held before the launch, where known.
        free: of rows that are pages of bytes, bool [B, bytes]: those that the call may change.
        reading: what wrong rows (int64 [n]) of the block look like, in one sentence, or "".
    """

    want: Tensor
    got: Tensor
    ids: Tensor
    stage: str
    poison: float | None = None
    free: Tensor | None = None
    reading: Callable[[Tensor], str] = lambda _: ""


def decide(whole: Whole) -> Decided:
    """Name every row identical or the first rule one of its values breaks."""
    want, got = (_flat(side) for side in (whole.want, whole.got))
    codes = torch.full_like(whole.ids, IDENTICAL, dtype=torch.int8)
    if want.numel() and not torch.equal(want, got):
        differ = want != got
        open_rows = torch.ones_like(codes, dtype=torch.bool)
        if whole.poison is not None:
            unwritten = differ & (got == _poison(whole))
            set_first(codes, open_rows, unwritten.any(1), code("unwritten"))
        if whole.free is not None:
            set_first(codes, open_rows, (differ & ~whole.free).any(1), code("wrote-outside"))
        set_first(codes, open_rows, differ.any(1), code("bits"))
    return Decided(
        codes=codes,
        power=bool(want.numel()),
        explain=partial(_explain, whole, codes),
    )


def _flat(rows: Tensor) -> Tensor:
    """The bits of every row, [B, values]."""
    cells = bits.as_int(rows)
    return cells.flatten(1) if cells.dim() > 1 else cells[:, None]


def _poison(whole: Whole) -> Tensor:
    dtype = torch.uint8 if whole.got.itemsize == 1 else whole.got.dtype
    held = torch.tensor(whole.poison, dtype=dtype, device=whole.got.device)
    return bits.as_int(held)


def _explain(whole: Whole, codes: Tensor, i: int) -> Finding:
    """The finding of row i: its first differing values, want beside got."""
    rule, row = name(int(codes[i])), int(whole.ids[i])
    free = whole.free[i] if whole.free is not None and rule == "wrote-outside" else None
    want, got = whole.want[i].flatten(), whole.got[i].flatten()
    differ = bits.as_int(want) != bits.as_int(got)
    if rule == "unwritten":
        differ &= bits.as_int(got) == _poison(whole)
    if free is not None:
        differ &= ~free
    places = differ.nonzero()[:, 0]
    at, what = ("at", "values") if free is None else ("at byte", "bytes")
    lines = []
    for place in places[:_SHOWN].tolist():
        where = f"{at} {' '.join(map(str, _index(place, whole.want.shape[1:])))}"
        lines += [_line("want", where, want[place]), _line("got", where, got[place])]
    if len(places) > _SHOWN:
        lines.append(Evidence(label="", place=f"and {len(places) - _SHOWN:,} more {what}"))
    lines += [] if free is None else [Evidence(label="allowed", place="", note=_runs(free))]
    of = "" if free is None else f" of page {row}"
    return Finding(
        stage=whole.stage,
        rule=rule,
        row=row,
        place=f"{len(places):,} of {len(want):,} {what}{of}",
        evidence=tuple(lines),
        reading=whole.reading(torch.tensor([i], device=codes.device)),
    )


def _runs(free: Tensor) -> str:
    """The bytes of a page that the call may change, the first runs of them one by one."""
    edges = functional.pad(free.byte(), (1, 1)).int().diff()
    first, end = ((edges == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
    runs = [f"{one}-{two - 1}" for one, two in zip(first, end, strict=True)]
    more = f" and {len(runs) - _SHOWN:,} runs more" if len(runs) > _SHOWN else ""
    return f"bytes {' '.join(runs[:_SHOWN])}{more}" if runs else "no byte of it"


def _index(place: int, shape: torch.Size) -> list[int]:
    """A flat place as one number a dimension."""
    index: list[int] = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        index.append(at)
    return index[::-1]


def _line(label: str, place: str, value: Tensor) -> Evidence:
    floating = value.is_floating_point()
    told = number(float(value), value.dtype) if floating else str(int(value))
    return Evidence(
        label=label,
        place=place,
        value=told,
        bits=hexadecimal(value) if floating or value.element_size() == 1 else "",
    )
