"""Drawn tensors: scores with and without ties, ways from picks to slots, keys."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from refimpl.bits import E4M3, as_int

Form = Literal["page_table", "slot_map", "offset"]
Spans = list[tuple[int, int]]

_LEVELS = torch.tensor([0.125, 0.25, 0.5, 1.0])
_OUTSIDE = 64.0
_DISTINCT_KEYS = 7
_WIDE, _INNER, _SHORT = 1, 2, 5


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the scores of a top-k case are like.

    Attributes:
        tie_rich: selecting rows are cut inside a plateau, with repeated scores above and below;
            False gives distinct scores.
        scale: what every finite score is multiplied by.
        plateau: the score of the plateau before scaling; 0 is what relu gives keys that no head
            likes.
        signed_zeros: the plateau is -0 and +0 in equal parts.
        minus_inf: row 2 has fewer than k finite scores, and row 5 ends in -inf.
        narrow: every score is 1 + N(0, 1e-4), so that coarse keys crowd into one bucket;
            a kernel that keeps 4,096 of them shows from about 16,384 columns on.
        nan: row 0 holds a NaN and row 1 one whose sign bit is set.
    """

    tie_rich: bool = True
    scale: float = 1.0
    plateau: float = 0.5
    signed_zeros: bool = False
    minus_inf: bool = False
    narrow: bool = False
    nan: bool = False


def raw(random: torch.Generator, *shape: int) -> Tensor:
    """Random bytes, u8, every value alike."""
    count = torch.Size(shape).numel()
    words = torch.empty(-(-count // 8), dtype=torch.int64)
    words.random_(-(2**63), None, generator=random)
    return words.view(torch.uint8)[:count].view(shape)


def scores(random: torch.Generator, like: Scores, spans: Spans, k: int, columns: int) -> Tensor:
    """fp32 [rows, columns] as `like` says."""
    drawn = torch.full((len(spans), columns), _OUTSIDE)
    for row, (start, end) in enumerate(spans):
        make = _narrow if like.narrow else _tied if like.tie_rich else _distinct
        drawn[row, start:end] = make(random, like, row, end - start, k)
    drawn *= like.scale
    if like.minus_inf:
        start, end = spans[_INNER]
        drawn[_INNER, start + k // 2 : end] = -torch.inf
        drawn[_SHORT, spans[_SHORT][1] - 1] = -torch.inf
    if like.nan:
        drawn[0, spans[0][0] + 1] = torch.nan
        as_int(drawn)[_WIDE, spans[_WIDE][0] + 2] = as_int(torch.tensor(-torch.nan))
    return drawn


def _narrow(random: torch.Generator, _like: Scores, _row: int, visible: int, _k: int) -> Tensor:
    """Scores that differ only far behind the point."""
    return 1 + 1e-4 * torch.randn(visible, generator=random)


def _distinct(random: torch.Generator, like: Scores, _row: int, visible: int, _k: int) -> Tensor:
    """Scores that still differ once they are scaled."""
    drawn = torch.randn(4 * visible + 4, generator=random)
    kept = {float(scaled): float(x) for x, scaled in zip(drawn, drawn * like.scale, strict=True)}
    return torch.tensor(list(kept.values())[:visible])


def _tied(random: torch.Generator, like: Scores, row: int, visible: int, k: int) -> Tensor:
    """`above` winners, a plateau that the k-th place falls into, and losers, in random places."""
    above = {_WIDE: k - 1, _INNER: 0}.get(row, k // 2)
    above = min(above, visible // 2)
    rest = visible - above
    tied = min(rest, max(k - above + 1, rest * 2 // 3))
    levels = _LEVELS[torch.randint(len(_LEVELS), (visible,), generator=random)]
    values = like.plateau + levels
    values[above:] = like.plateau
    values[above + tied :] = (like.plateau - levels)[above + tied :]
    if like.signed_zeros:
        values[above : above + tied : 2] = -0.0
        values[above + 1 : above + tied : 2] = 0.0
    return values[torch.randperm(visible, generator=random)]


def slots(
    random: torch.Generator,
    form: Form,
    spans: Spans,
    columns: int,
    page_size: int,
    *,
    shared: bool,
) -> dict[str, Tensor]:
    """The inputs that lead from picks to slots; page 0 and slot 0 stay unused."""
    if form == "offset":
        offset = torch.randint(1000, (len(spans),), generator=random, dtype=torch.int32)
        return {"topk_indices_offset": offset}
    if form == "slot_map":
        return {"slot_map": 1 + torch.randperm(4 * columns, generator=random)[:columns].int()}
    split = spans[1][0]
    table = -(-(columns - split) // page_size)
    pages = 1 + torch.randperm(4 * table, generator=random)[: 2 * table].reshape(2, table)
    if shared:
        pages[1, 1] = pages[1, 0]
    request = torch.tensor([int(start >= split) for start, _ in spans], dtype=torch.int32)
    return {"page_table": pages.int(), "row_to_request": request}


def keys(
    random: torch.Generator, count: int, head_dim: int, *, tie_rich: bool
) -> tuple[Tensor, Tensor]:
    """e4m3 [count, head_dim] and fp32 [count]."""
    keys = torch.randn(count, head_dim, generator=random)
    scales = torch.rand(count, generator=random) + 0.5
    if tie_rich:
        keys[0] = 0
        again = torch.arange(count) % _DISTINCT_KEYS
        keys, scales = keys[again], scales[again]
    return keys.to(E4M3), scales
