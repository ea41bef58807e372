"""Faults of memory and plans that are used again: each differs from its honest path in one thing.

Candidates of prefill_indexer; those with `path` also serve QSA, given `qsa.layer`.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from equivalence.candidate import Candidate
from equivalence.paths import chunked, parts, tail, workspace
from equivalence.paths.parts import Selector
from equivalence.paths.plan import Batch, Planner
from equivalence.paths.planner import planner
from equivalence.paths.waves import Chunk, Launch, Place

Path = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Reused:
    """One planted fault.

    Attributes:
        name: what it is.
        candidate: a faulty candidate of prefill_indexer, or None where a planner is at fault.
        planner: makes a faulty planner, or None.
        rules: what its findings may be called.
        needs: what must hold for it to show.
    """

    name: str
    candidate: Candidate | None = None
    planner: Callable[[], Planner] | None = None
    rules: frozenset[str]
    needs: str


def stale_columns(
    *,
    path: Path = workspace.dense,
    selector: str | Selector = "reference",
    **call: Any,  # noqa: ANN401 - what `path` takes
) -> dict[str, Tensor]:
    """Rows are ranked to the width of the view, so that what an earlier chunk left is picked."""
    pick = parts.selector(selector)

    def to_the_width(*, scores: Tensor, column: Tensor, visible: Tensor, out: Tensor) -> None:
        wide = torch.full_like(visible, scores.shape[1])
        pick(scores=scores, column=column, visible=wide, out=out)

    # No table leads from a column outside the window to a slot.
    call = {name: given for name, given in call.items() if name not in ("block_table", "k_slots")}
    return path(way=workspace.views_of(), selector=to_the_width, **call)


def view_kept(
    *,
    path: Path = workspace.dense,
    **call: Any,  # noqa: ANN401 - likewise
) -> dict[str, Tensor]:
    """A view is selected from after the next chunk was scored into the same memory."""

    def pairs(chunks: Sequence[Sequence[Chunk]]) -> Iterator[Sequence[Chunk]]:
        for mine in chunks:
            for i in range(0, len(mine), 2):
                yield mine[i : i + 2]

    return path(way=workspace.views_of(), order=pairs, **call)


def workspace_shared(
    *,
    path: Path = workspace.dense,
    micro_batches: int = 2,
    **call: Any,  # noqa: ANN401 - likewise
) -> dict[str, Tensor]:
    """Micro-batches that take turns score into one workspace."""

    def one(launches: Sequence[Launch], device: torch.device) -> Place:
        held = workspace.reserve(
            rows=max(len(launch.rows) for launch in launches),
            widest=launches[0].widest,
            topk=launches[0].topk,
            budget_bytes=launches[0].budget_bytes,
            device=device,
        )
        return workspace.views(launches, [held] * len(launches))

    return path(way=one, micro_batches=micro_batches, **call)


def tail_off_by_one(
    *,
    most: int = tail.WINDOW,
    path: tail.Path = chunked.original,
    **call: Any,  # noqa: ANN401 - likewise
) -> dict[str, Tensor]:
    """Each tail row gets what the row before it picks."""
    rows = tail.tail_rows(row_to_request=call["row_to_request"], most=most)
    early = (rows - 1).clamp(min=0)
    return tail.spread(path(**tail.cut(call, early)), rows, call)


def address_key(batch: Batch) -> Hashable:
    """Where the batch's tensors stand, and their shapes: not what they say."""
    return tuple((tensor.data_ptr(), tuple(tensor.shape)) for tensor in _tensors(batch))


def address_planner() -> Planner:
    """A planner that takes tensors at one address for one batch."""
    return planner(key=address_key)


_WRONG_PICKS = frozenset({"lost-winner", "out-of-window", "wrong-tie", "order", "pad"})
_WRONG_ROWS = _WRONG_PICKS | {"hole", "page-mismatch"}

FAULTS: Mapping[str, Reused] = MappingProxyType(
    {
        fault.name: fault
        for fault in (
            Reused(
                name="stale workspace column read",
                candidate=stale_columns,
                rules=_WRONG_PICKS,
                needs="a row that sees less than the widest one",
            ),
            Reused(
                name="view outliving its chunk",
                candidate=view_kept,
                rules=_WRONG_ROWS,
                needs="two chunks, and a row of the first that selects",
            ),
            Reused(
                name="workspace shared between micro-batches",
                candidate=workspace_shared,
                rules=_WRONG_ROWS,
                needs="two micro-batches, and a row of the first that selects",
            ),
            Reused(
                name="tail off by one",
                candidate=tail_off_by_one,
                rules=_WRONG_ROWS,
                needs="a tail row that picks otherwise than the row before it",
            ),
            Reused(
                name="plan of the previous batch",
                planner=address_planner,
                rules=frozenset({"stale-round"}),
                needs="two batches whose tensors stand in one place",
            ),
        )
    }
)


def changed_in_place(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Batches of one shape, one after another in the very tensors of the first."""
    held: list[Tensor] = []
    for batch in batches:
        held = held or [tensor.clone() for tensor in _tensors(batch)]
        for then, now in zip(held, _tensors(batch), strict=True):
            then.copy_(now)
        yield _with(batch, held)


def reallocated(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Batches of one shape in new tensors, each where the one before it stood.

    It is what a caching allocator does with memory that was freed, made certain.
    """
    memory: Tensor | None = None
    for batch in batches:
        given = _tensors(batch)
        flat = torch.cat([tensor.flatten() for tensor in given])
        memory = flat if memory is None else memory.copy_(flat)
        pieces = torch.split(memory, [tensor.numel() for tensor in given])
        yield _with(batch, [p.view_as(t) for p, t in zip(pieces, given, strict=True)])


def _tensors(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.extend_lens, batch.seq_lens, batch.page_table


def _with(batch: Batch, tensors: Sequence[Tensor]) -> Batch:
    """The batch with other tensors, in the order of `_tensors`."""
    extend, total, table = tensors
    return replace(batch, extend_lens=extend, seq_lens=total, page_table=table)
