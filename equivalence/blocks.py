"""Rows judged together: what the reference says of a block."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from equivalence import ops
from equivalence.case import Case, take_rows
from equivalence.contract import Contract
from equivalence.errors import InvalidCase
from equivalence.selection import Selection, best_picks, reads_scores
from equivalence.sides import Side
from equivalence.windows import Windows, live
from refimpl import fast

# A GPU wants fewer and larger blocks; both stay below the 256 MiB a judge may take.
_BLOCK_BYTES = {"cpu": 48 << 20, "cuda": 128 << 20}
# Peak bytes a score cell and a pick cost while a block is sorted and compared.
_CELL_BYTES, _SLOT_BYTES = 48, 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What stays the same while the blocks of one case are judged.

    Attributes:
        case: held in memory.
        windows: of every row.
        contract: the freedoms.
        sides: what is judged.
        baseline: the side whose outputs are the reference, where one was asked for.
        called: whether the sides are calls of a candidate, which recorded logits then judge.
        names: int64 [T], what the rows are called, where the case was cut from a larger call.
        rows: int64 [n], ascending, by whole requests: only these are judged; None for all.
    """

    case: Case
    windows: Windows
    contract: Contract
    sides: tuple[Side, ...]
    baseline: Side | None = None
    called: bool = False
    names: Tensor | None = None
    rows: Tensor | None = None

    @cached_property
    def count(self) -> int:
        """Rows that are judged, live or not."""
        return len(self.windows.start if self.rows is None else self.rows)

    @cached_property
    def k(self) -> int:
        """Picks a row may hold."""
        return ops.k_of(self.case)

    @cached_property
    def source(self) -> str:
        """Whose scores judge: reference, recorded, baseline or none."""
        op = ops.find(self.case.op)
        if self.baseline is not None and "logits" in self.baseline.outputs:
            return "baseline"
        if op.score is not None and self.case.arithmetic is not None:
            return "reference"
        if "scores" in self.case.inputs or any(side.recorded is not None for side in self.sides):
            return "recorded"
        return "none"

    @cached_property
    def live(self) -> Tensor:
        """Rows that are judged, bool [T]: not broken, and meant to be written."""
        return live(self.case, self.windows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Some rows, and what the reference says of those that are live.

    Attributes:
        ids: int64 [B], the live rows' places in the call.
        names: int64 [B], what they are called.
        span: all rows of the block in the call, consecutive or int64 [n].
        keep: which of them are live.
        part: the case cut down to the block's rows.
        logits: [B, W] the reference's scores, where it computes them or a baseline gave them.
        selection: the legal picks by the scores that judge; None where each side has its own
            scores, or none.
        start, visible, column: int64 [B], the windows.
    """

    ids: Tensor
    names: Tensor
    span: slice | Tensor
    keep: Tensor
    part: Case
    logits: Tensor | None
    selection: Selection | None
    start: Tensor
    visible: Tensor
    column: Tensor

    def rows(self, tensor: Tensor) -> Tensor:
        """The live rows of a whole output: a view where all of them are."""
        block = tensor[self.span]
        return block if len(self.keep) == len(block) else block[self.keep]

    def inside(self, scores: Tensor) -> Tensor:
        """Which cells of scores [B, W] lie in their row's window, bool [B, W]."""
        column = torch.arange(scores.shape[1], device=scores.device)
        first, end = self.column[:, None], (self.column + self.visible)[:, None]
        return (column >= first) & (column < end)


def spans(job: Job) -> Iterator[slice]:
    """Ranges of the rows judged, so many at a time that the judge's own memory stays bounded."""
    sizes = ops.validate(job.case)
    ends = job.windows.column + job.windows.visible
    columns = max(int(ends.max()) if len(ends) else 1, ops.columns_of(job.case))
    step = sizes.get("n", 1)
    held = _BLOCK_BYTES.get(job.windows.start.device.type, _BLOCK_BYTES["cpu"])
    most = held // (_CELL_BYTES * columns + _SLOT_BYTES * job.k + 1)
    size = max(1, most // step) * step
    for first in range(0, job.count, size):
        yield slice(first, min(first + size, job.count))


def refer(job: Job, span: slice) -> Block | None:
    """What the reference says of these rows; None where none of them is live."""
    every = torch.arange(span.start, span.stop, device=job.live.device)
    every = every if job.rows is None else job.rows[span]
    keep = job.live[every].nonzero()[:, 0]
    if not len(keep):
        return None
    part = take_rows(job.case, every)
    ids = every[keep]
    block = Block(
        ids=ids,
        names=ids if job.names is None else job.names[ids],
        span=span if job.rows is None else every,
        keep=keep,
        part=part,
        logits=None,
        selection=None,
        start=job.windows.start[ids],
        visible=job.windows.visible[ids],
        column=job.windows.column[ids],
    )
    logits = None
    if job.source == "baseline" and job.baseline is not None:
        logits = block.rows(job.baseline.outputs["logits"])
    elif job.source == "reference":
        score = ops.find(job.case.op).score
        assert score is not None  # noqa: S101 - that is what "reference" means
        try:
            logits = score(part, fast.accumulate)
        except ValueError as error:  # it names what it cannot compute with
            raise InvalidCase(str(error)) from error
        logits = logits if len(keep) == len(every) else logits[keep]
    elif job.source == "recorded" and job.called and "scores" not in job.case.inputs:
        own = next(side.recorded for side in job.sides if side.recorded is not None)
        logits = block.rows(own)
    scores = logits
    if scores is None and "scores" in job.case.inputs:
        scores = block.rows(job.case.inputs["scores"])
    selection = None if scores is None or not job.k else select(job, block, scores)
    return replace(block, logits=logits, selection=selection)


def select(job: Job, block: Block, scores: Tensor) -> Selection:
    """The legal picks of a block by these scores [B, W]."""
    free = job.contract
    ranked = reads_scores(block.visible, k=job.k, contract=free)
    return Selection(
        scores=scores,
        at=torch.arange(len(scores), device=scores.device),
        nan=(scores.isnan() & block.inside(scores)).any(1) & ranked & (free.nan == "reject"),
        column=block.column,
        visible=block.visible,
        start=block.start,
        want=best_picks(
            scores,
            row_start=block.column,
            row_end=block.column + block.visible,
            k=job.k,
            contract=free,
        ),
        k=job.k,
        contract=free,
        ids=block.names,
    )
