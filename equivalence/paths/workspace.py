"""Scores in one bounded buffer that every chunk uses again, beside a fresh tensor a chunk.

A view is compact, [rows, width] at the head of the buffer: the next chunk, or layer, overwrites
it. It is never cleared: columns from `visible` on hold what was there before.
Both ways cut rows alike and hand a selector the same (rows, width). vLLM "Reuse bounded prefill
logits workspace" does this for QSA.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from equivalence.errors import UsageError
from equivalence.paths import parts, waves
from equivalence.paths.layer import allocate, keep, layer_of, score, select
from equivalence.paths.parts import Logits, Scorer, Selector
from equivalence.paths.waves import Chunk, Launch, Order, Place, Way
from refimpl.geometry import plan_width


@dataclass(frozen=True, kw_only=True, eq=False)
class Workspace:
    """The memory of one micro-batch, reserved once.

    Attributes:
        scores: fp32 [capacity], flat.
        scratch: int32 [slots], what a selector writes into; it shares no memory with `scores`.
    """

    scores: Tensor
    scratch: Tensor

    @property
    def held_bytes(self) -> int:
        """Bytes of both buffers."""
        return self.scores.nbytes + self.scratch.nbytes

    def view(self, rows: int, width: int) -> Tensor:
        """The head of `scores` as [rows, width].

        Raises:
            UsageError: that is more than was reserved.
        """
        return _head(self.scores, rows, width, "scores")

    def picks(self, rows: int, topk: int) -> Tensor:
        """The head of `scratch` as [rows, topk]; raises as `view`."""
        return _head(self.scratch, rows, topk, "picks")


def _head(flat: Tensor, rows: int, width: int, noun: str) -> Tensor:
    if rows * width > len(flat):
        raise UsageError(
            f"a view of {rows} x {width} takes {rows * width:,} {noun};"
            f" the workspace reserved {len(flat):,}"
        )
    return flat[: rows * width].view(rows, width)


def reserve(
    *,
    rows: int,
    widest: int,
    topk: int,
    budget_bytes: int | None = None,
    device: torch.device | str | None = None,
) -> Workspace:
    """Memory for every chunk of any launch of at most so many rows and columns.

    Args:
        rows: query rows of the largest launch.
        widest: columns of the widest one, 64 or more, or of all; a row fits whatever the budget.
        topk: picks a row.
        budget_bytes: of scores; 512 MiB where it is None.
        device: where.

    Raises:
        UsageError: a number is negative.
    """
    budget = waves.budget_of(budget_bytes)
    for name, value in (("rows", rows), ("widest", widest), ("topk", topk)):
        if value < 0:
            raise UsageError(f"{name} is {value}; it is 0 or more")
    # The narrowest view has the most rows.
    narrow = waves.geometry(rows=rows, longest=0, widest=widest, budget_bytes=budget)
    most = narrow.chunks[0][1] if narrow.chunks else 0
    scores = max(widest, min(budget // waves.SCORE_BYTES, rows * widest))
    return Workspace(
        scores=torch.empty(scores, dtype=torch.float32, device=device),
        scratch=torch.empty(most * topk, dtype=torch.int32, device=device),
    )


def kept_bytes(sizes: Iterable[int]) -> int:
    """What a caching allocator holds after these allocations, each freed before the next one.

    A freed block serves a request that it is large enough for, and is never given back.
    """
    largest = held = 0
    for size in sizes:
        if size > largest:
            largest, held = size, held + size
    return held


def own_tensors(launches: Sequence[Launch], device: torch.device) -> Place:
    """A fresh tensor for the scores of every chunk, and one for its picks."""

    def place(chunk: Chunk) -> tuple[Tensor, Tensor]:
        topk = launches[chunk.batch].topk
        return (
            torch.empty(chunk.count, chunk.width, dtype=torch.float32, device=device),
            torch.empty(chunk.count, topk, dtype=torch.int32, device=device),
        )

    return place


def views_of(workspaces: Sequence[Workspace] | None = None) -> Way:
    """Views of one workspace a micro-batch; None reserves what the call needs."""

    def way(launches: Sequence[Launch], device: torch.device) -> Place:
        held = [_for(launch, device) for launch in launches] if workspaces is None else workspaces
        if len(held) != len(launches):
            raise UsageError(
                f"{len(launches)} micro-batches take one workspace each, not {len(held)}"
            )
        for (i, one), (j, other) in combinations(enumerate(held), 2):
            if len(one.scores) and one.scores.data_ptr() == other.scores.data_ptr():
                raise UsageError(f"micro-batches {i} and {j} share a workspace: they take one each")
        return views(launches, held)

    return way


def views(launches: Sequence[Launch], held: Sequence[Workspace]) -> Place:
    """Views of the heads of these workspaces, micro-batch by micro-batch."""

    def place(chunk: Chunk) -> tuple[Tensor, Tensor]:
        mine = held[chunk.batch]
        topk = launches[chunk.batch].topk
        return mine.view(chunk.count, chunk.width), mine.picks(chunk.count, topk)

    return place


def _for(launch: Launch, device: torch.device) -> Workspace:
    return reserve(
        rows=len(launch.rows),
        widest=launch.widest,
        topk=launch.topk,
        budget_bytes=launch.budget_bytes,
        device=device,
    )


def fresh(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - what `dense` takes
    """A candidate of prefill_indexer, see `dense`: every chunk has tensors of its own."""
    return dense(way=own_tensors, **call)


def reused(*, workspaces: Sequence[Workspace] | None = None, **call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - what `dense` takes
    """A candidate of prefill_indexer, see `dense`: every chunk is a view of a workspace."""
    return dense(way=views_of(workspaces), **call)


def dense(
    *,
    way: Way,
    scorer: str | Scorer = "reference",
    selector: str | Selector = "reference",
    keep_logits: bool = False,
    budget_bytes: int | None = None,
    micro_batches: int = 1,
    order: Order = waves.alternate,
    **call: Any,  # noqa: ANN401 - the inputs and parameters of prefill_indexer
) -> dict[str, Tensor]:
    """A dense layer, chunk by chunk.

    A scorer's result lives until its windows are copied to the view: a kernel that writes into
    memory of its caller would need no more than the view.

    Args:
        way: where the chunks go.
        scorer: as in `chunked.original`.
        selector: as in `chunked.original`.
        keep_logits: as in `chunked.original`.
        budget_bytes: of the scores of a chunk; 512 MiB where it is None.
        micro_batches: so many runs of rows, each with its own memory, take turns.
        order: of the chunks.
        call: the fields of `Layer`.

    Returns:
        As `chunked.original`.

    Raises:
        UsageError: as `chunked.original`, or the budget or micro_batches is below 1.
    """
    given = layer_of(call, dense)
    outputs = allocate(given, keep_logits=keep_logits)
    write = parts.selector(selector)

    def fill(rows: slice, view: Tensor) -> None:
        got, visible = score(given, rows, scorer), given.visible(rows)
        waves.copy_windows(
            out=view,
            to=torch.zeros_like(visible),
            values=got.values,
            column=got.column,
            visible=visible,
        )

    def pick(rows: slice, view: Tensor, scratch: Tensor) -> None:
        def through(*, out: Tensor, **scores: Tensor) -> None:
            write(out=scratch, **scores)
            out.copy_(scratch)

        logits = Logits(values=view, column=torch.zeros_like(given.row_start[rows]))
        keep(given, rows, logits, outputs)
        select(given, rows, logits, through, outputs)

    waves.run(
        way,
        visible=given.visible(slice(None)),
        widest=plan_width(columns=len(given.k), style=waves.STYLE),
        topk=given.topk,
        score=fill,
        pick=pick,
        budget_bytes=budget_bytes,
        micro_batches=micro_batches,
        order=order,
    )
    return outputs
