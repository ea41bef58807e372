"""Logits in blocks of rows and columns: what bounds the memory of every scoring function."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from refimpl import heads
from refimpl.bits import E4M3
from refimpl.profiles import Profile
from refimpl.tensorcore import INSTRUCTIONS, Instruction, canonical_nan

_MIN_COLUMNS = 1 << 6


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How much is scored at once; it bounds every intermediate, and changes no bit.

    Attributes:
        cells: of [rows, heads, columns].
        columns: at most.
    """

    cells: int
    columns: int


# 2 MiB of fp32 stay in a processor's cache; a GPU wants fewer and longer launches.
TILES = {"cpu": Tile(cells=1 << 19, columns=1 << 13), "cuda": Tile(cells=1 << 22, columns=1 << 16)}


def tile_of(device: torch.device) -> Tile:
    """The tile of a device, by its type."""
    return TILES.get(device.type, TILES["cpu"])


Keys = Callable[[int, int], tuple[Tensor, Tensor | None]]


class Accumulate(Protocol):
    """The seam for a faster chain: `tensorcore.accumulate` or a function proved equal to it."""

    def __call__(self, a: Tensor, b: Tensor, *, instruction: Instruction) -> Tensor:
        """Map [M, D] and [N, D] to fp32 [M, N]."""
        ...


def accumulate_exact(a: Tensor, b: Tensor) -> Tensor:
    """Multiply [M, D] by [N, D] in fp64: exact for e4m3, products added in order for bf16."""
    x, y = a.to(torch.float64), b.to(torch.float64)
    if a.dtype is E4M3:
        return x @ y.t()
    total = x[:, :1] * y[:, 0]
    for d in range(1, x.shape[1]):
        total = total + x[:, d : d + 1] * y[:, d]
    return total


def logits_block(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
    weights: Tensor | None,
    *,
    profile: Profile,
    accumulate: Accumulate,
) -> Tensor:
    """Score q [R, H, D] against k [n, D], weights [R, H] and k_scale [n]: fp32 [R, n]."""
    rows = q.shape[0]
    a = q.flatten(0, 1)
    if profile.instructions is None:
        acc = accumulate_exact(a, k)
    else:
        acc = accumulate(a, k, instruction=INSTRUCTIONS[profile.instructions[q.dtype]])
    acc = acc.view(rows, q.shape[1], -1)
    if profile.reduction == "quad" and weights is not None and k_scale is not None:
        logits = heads.reduce_quad(
            acc, weights, k_scale, rounded=profile.rounded_product, scale=profile.scale
        )
    elif profile.reduction == "pairs":
        logits = heads.add_lanes(heads.relu(acc))
    else:
        logits = heads.reduce_exact(acc, weights, k_scale)
    return canonical_nan(logits)


def row_groups(
    windows: Sequence[tuple[int, int]], *, head_count: int, cells_most: int = TILES["cpu"].cells
) -> Iterator[tuple[int, int, int, int]]:
    """Cut rows into groups whose windows nearly coincide: (first row, end row, first, end column).

    A group computes at most an eighth more cells than its windows hold, and fits into one block;
    a row longer than a block is a group of its own. Empty windows are skipped.
    """
    first = 0
    while first < len(windows):
        low, high = windows[first]
        end, cells = first + 1, high - low
        while cells and end < len(windows):
            union = min(low, windows[end][0]), max(high, windows[end][1])
            rows, wide = end + 1 - first, union[1] - union[0]
            more = cells + windows[end][1] - windows[end][0]
            if (
                rows * max(wide, _MIN_COLUMNS) * head_count > cells_most
                or 8 * rows * wide > 9 * more
            ):
                break
            (low, high), cells, end = union, more, end + 1
        if cells:
            yield first, end, low, high
        first = end


def fill(
    out: Tensor,
    q: Tensor,
    weights: Tensor | None,
    windows: Sequence[tuple[int, int]],
    keys: Keys,
    *,
    shift: Sequence[int] | None = None,
    profile: Profile,
    accumulate: Accumulate,
) -> None:
    """Write the logits of q [T, H, D] inside `windows` to out [T, width], and nothing outside.

    `keys(c0, c1)` gives the keys and scales of those columns; `shift` is the column that a row's
    cell 0 stands for. Blocks of rows and columns bound every intermediate.
    """
    head_count, tile = q.shape[1], tile_of(q.device)
    for i, end, c0, c1 in cut(windows, head_count=head_count, tile=tile):
        k, k_scale = keys(c0, c1)
        w = None if weights is None else weights[i:end]
        block = logits_block(q[i:end], k, k_scale, w, profile=profile, accumulate=accumulate)
        place(out, block, windows, at=(i, c0), shift=shift)


def cut(
    windows: Sequence[tuple[int, int]], *, head_count: int, tile: Tile
) -> Iterator[tuple[int, int, int, int]]:
    """Cut windows into blocks that fit a tile: (first row, end row, first column, end column)."""
    for i, end, low, high in row_groups(windows, head_count=head_count, cells_most=tile.cells):
        width = min(tile.columns, max(1, tile.cells // (head_count * (end - i))))
        for c0 in range(low, high, width):
            yield i, end, c0, min(c0 + width, high)


def place(
    out: Tensor,
    block: Tensor,
    windows: Sequence[tuple[int, int]],
    *,
    at: tuple[int, int],
    shift: Sequence[int] | None = None,
) -> None:
    """Write a block's cells that lie inside windows; `at` is its first row and column."""
    first, c0 = at
    for t, row in enumerate(block, first):
        left, right = max(c0, windows[t][0]), min(c0 + block.shape[1], windows[t][1])
        base = shift[t] if shift else 0
        if left < right:
            out[t, left - base : right - base] = row[left - c0 : right - c0]


def clip_windows(start: Tensor, end: Tensor, columns: int) -> list[tuple[int, int]]:
    """Pair two int32 [T]; a backward or negative window is empty, none passes `columns`."""
    return [
        (s, min(e, columns)) if 0 <= s < min(e, columns) else (0, 0)
        for s, e in zip(start.tolist(), end.tolist(), strict=True)
    ]
