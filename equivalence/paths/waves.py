"""Chunks of rows, scored and selected from in waves, wherever their scores lie.

The selection geometry, (rows, width) of each chunk, is that of vLLM 0.33.0
`qsa_select_paged_prefill`; a selector may choose its kernel by it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TypeAlias

import torch
from torch import Tensor

from equivalence.paths.layer import check_whole
from refimpl.geometry import PLAN_STYLES, chunk_plan, plan_width

STYLE = PLAN_STYLES["qsa"]
SCORE_BYTES = 4
_CELLS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How a launch is cut: `width` columns a view, half-open row ranges `chunks`."""

    width: int
    chunks: tuple[tuple[int, int], ...]

    @property
    def most_bytes(self) -> int:
        """Bytes of scores of the largest chunk."""
        most = max((end - begin for begin, end in self.chunks), default=0)
        return SCORE_BYTES * self.width * most


def budget_of(budget_bytes: int | None) -> int:
    """The budget, 512 MiB where it is None.

    Raises:
        UsageError: it is no whole number above 0.
    """
    budget = STYLE.budget_bytes if budget_bytes is None else budget_bytes
    check_whole("budget_bytes", budget)
    return int(budget or 0)


def geometry(*, rows: int, longest: int, widest: int, budget_bytes: int | None = None) -> Geometry:
    """Width min(max(64, round64(longest)), widest), chunks of max(1, budget // (4 * width)) rows.

    Args:
        rows: query rows.
        longest: columns of the longest request; for QSA ceil(max_seq_len / 4).
        widest: columns that the page table, or K, holds.
        budget_bytes: of scores; 512 MiB where it is None.

    Raises:
        UsageError: the budget is no whole number above 0.
    """
    budget = budget_of(budget_bytes)
    cuts = chunk_plan(rows=rows, columns=longest, style=STYLE, budget_bytes=budget, widest=widest)
    width = plan_width(columns=longest, style=STYLE, widest=widest)
    return Geometry(width=width, chunks=tuple(cuts))


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """One micro-batch of a layer.

    Attributes:
        rows: its rows in the call.
        longest: columns of its longest request.
        widest: columns that any row may have.
        topk: picks a row; 0 selects nothing.
        budget_bytes: of the scores of a chunk.
    """

    rows: range
    longest: int
    widest: int
    topk: int
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Rows of the call that one view holds, its width, and which micro-batch it is of."""

    batch: int
    rows: slice
    width: int

    @property
    def count(self) -> int:
        """Its rows."""
        return int(self.rows.stop - self.rows.start)


Place: TypeAlias = Callable[[Chunk], tuple[Tensor, Tensor]]
"""Where a chunk goes: fp32 [n, width] for its scores, int32 [n, topk] for its picks."""
Way: TypeAlias = Callable[[Sequence[Launch], torch.device], Place]
"""Where the chunks of these launches go."""
Order: TypeAlias = Callable[[Sequence[Sequence[Chunk]]], Iterable[Sequence[Chunk]]]
"""The chunks of each micro-batch as waves: all of a wave are scored, then all selected from."""
Fill: TypeAlias = Callable[[slice, Tensor], None]
"""(rows of the call, view) -> None: writes `view[i, :visible[i]]`."""
Pick: TypeAlias = Callable[[slice, Tensor, Tensor], None]
"""(rows of the call, view, scratch) -> None: picks of the rows, int32 [n, topk] in between."""


def alternate(chunks: Sequence[Sequence[Chunk]]) -> list[list[Chunk]]:
    """Chunk i of every micro-batch is wave i: one is scored before the other one selects."""
    return [[chunk for chunk in wave if chunk is not None] for wave in zip_longest(*chunks)]


def split(rows: int, micro_batches: int) -> list[range]:
    """Rows in so many runs of nearly one length.

    Raises:
        UsageError: that is below 1.
    """
    check_whole("micro_batches", micro_batches)
    edges = [rows * i // micro_batches for i in range(micro_batches + 1)]
    return [range(begin, end) for begin, end in pairwise(edges)]


def run(
    way: Way,
    *,
    visible: Tensor,
    widest: int,
    topk: int,
    score: Fill,
    pick: Pick,
    longest: int | None = None,
    budget_bytes: int | None = None,
    micro_batches: int = 1,
    order: Order = alternate,
) -> None:
    """Score and select from every chunk of a call.

    Args:
        way: where the chunks go.
        visible: int32 [T], columns a row may pick.
        widest: columns that any row may have.
        topk: picks a row.
        score: fills a view.
        pick: reads a view.
        longest: columns of the longest request; the most that a row sees where it is None.
        budget_bytes: of the scores of a chunk; 512 MiB where it is None.
        micro_batches: so many runs of rows, each a launch of its own, take turns.
        order: of the chunks.

    Raises:
        UsageError: the budget or the number of micro-batches is below 1.
    """
    launches = [
        Launch(
            rows=rows,
            longest=_longest(visible[rows.start : rows.stop]) if longest is None else longest,
            widest=widest,
            topk=topk,
            budget_bytes=budget_of(budget_bytes),
        )
        for rows in split(len(visible), micro_batches)
    ]
    place = way(launches, visible.device)
    for wave in order([_chunks(i, launch) for i, launch in enumerate(launches)]):
        placed = [(chunk.rows, *place(chunk)) for chunk in wave]
        for rows, view, _ in placed:
            score(rows, view)
        for rows, view, scratch in placed:
            pick(rows, view, scratch)


def _longest(visible: Tensor) -> int:
    """An engine knows it without asking the device."""
    return int(visible.max()) if len(visible) else 0


def _chunks(batch: int, launch: Launch) -> list[Chunk]:
    cut = geometry(
        rows=len(launch.rows),
        longest=launch.longest,
        widest=launch.widest,
        budget_bytes=launch.budget_bytes,
    )
    first = launch.rows.start
    return [
        Chunk(batch=batch, rows=slice(first + begin, first + end), width=cut.width)
        for begin, end in cut.chunks
    ]


def copy_windows(
    *, out: Tensor, to: Tensor, values: Tensor, column: Tensor, visible: Tensor
) -> None:
    """`out[i, to[i] + j] = values[i, column[i] + j]` for j < visible[i]; the rest of out stays.

    Args:
        out: [n, W].
        to: int32 [n], where a window begins in out.
        values: [n, V] of the same dtype.
        column: int32 [n], where it begins in values.
        visible: int32 [n], its columns.
    """
    if not values.shape[1]:
        return
    at = torch.arange(out.shape[1], device=out.device)
    step = max(1, _CELLS // max(1, out.shape[1]))
    for first in range(0, len(out), step):
        some = slice(first, first + step)
        cell = at - to[some, None]
        inside = (cell >= 0) & (cell < visible[some, None])
        source = torch.where(inside, cell + column[some, None], 0)
        out[some] = torch.where(inside, values[some].gather(1, source), out[some])
