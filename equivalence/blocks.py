"""Rows judged together: what the reference says of a block."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from equivalence import eligible, layout, ops, stages
from equivalence.case import Case, take_rows
from equivalence.checks import bounds
from equivalence.contract import Contract
from equivalence.errors import InvalidCase
from equivalence.selection import Selection, best_picks, reads_scores
from equivalence.sides import Side
from equivalence.windows import Windows, live
from refimpl import fast
from refimpl.profiles import PUBLISHED

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
        return stages.k_of(self.case)

    @cached_property
    def source(self) -> str:
        """Whose scores judge: reference, recorded, baseline or none."""
        op = ops.find(self.case.op)
        if self.baseline is not None and "logits" in self.baseline.outputs:
            return "baseline"
        profile = self.case.arithmetic
        scored = op.score is not None and profile is not None
        if scored and profile in PUBLISHED and self.contract.scores == "bits":
            scored = False
        if scored or (op.exact is not None and "scores" not in self.case.inputs):
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
        bound: fp64 [B, W], how far a kernel may lie from fp64 scores; None where bits are meant.
        scores: the same, or those among the inputs.
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
    bound: Tensor | None
    scores: Tensor | None
    selection: Selection | None
    start: Tensor
    visible: Tensor
    column: Tensor

    def rows(self, tensor: Tensor) -> Tensor:
        """The live rows of a whole output: a view where all of them are."""
        span = self.span
        block = tensor[span] if isinstance(span, slice) else layout.taken(tensor, span)
        return block if len(self.keep) == len(block) else layout.taken(block, self.keep)

    def inside(self, scores: Tensor, count: Tensor | None = None) -> Tensor:
        """Which cells of scores [B, W] lie in their row's window, or in its first `count`."""
        column = torch.arange(scores.shape[1], device=scores.device)
        end = self.column + (self.visible if count is None else count)
        return (column >= self.column[:, None]) & (column < end[:, None])


def spans(job: Job) -> Iterator[slice]:
    """Ranges of the rows judged, so many at a time that the judge's own memory stays bounded."""
    sizes = ops.validate(job.case)
    ends = job.windows.column + job.windows.visible
    columns = max(int(ends.max()) if len(ends) else 1, stages.columns_of(job.case))
    columns = max([columns, *(_width(t) for t in _masks(job))])
    step = sizes.get("n", 1)
    held = _BLOCK_BYTES.get(job.windows.start.device.type, _BLOCK_BYTES["cpu"])
    cell = _CELL_BYTES * (2 if job.contract.scores == "bound" else 1)
    most = held // (cell * columns + _SLOT_BYTES * job.k + 1)
    size = max(1, most // step) * step
    for first in range(0, job.count, size):
        yield slice(first, min(first + size, job.count))


def _masks(job: Job) -> Iterator[Tensor]:
    """Masks among the inputs and the outputs."""
    for tensors in (job.case.inputs, *(side.outputs for side in job.sides)):
        yield from (tensors[name] for name in stages.MASKS if name in tensors)


def _width(mask: Tensor) -> int:
    """Columns that a row of a mask takes to judge, as scores count."""
    return int(mask.shape[1]) * {torch.bool: 1, torch.uint8: 8}.get(mask.dtype, 4)


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
        bound=None,
        scores=None,
        selection=None,
        start=job.windows.start[ids],
        visible=job.windows.visible[ids],
        column=job.windows.column[ids],
    )
    logits, bound = _logits(job, block)
    scores = _inputs(job, block) if logits is None else logits
    block = replace(block, logits=logits, bound=bound, scores=scores)
    if scores is None or not job.k:
        return block
    return replace(block, selection=select(job, block, scores, bound))


def _logits(job: Job, block: Block) -> tuple[Tensor | None, Tensor | None]:
    """Scores of the live rows where a reference or somebody else gives them, and their bound."""
    op = ops.find(job.case.op)
    if job.source == "baseline" and job.baseline is not None:
        return block.rows(job.baseline.outputs["logits"]), None
    if job.source == "reference" and op.score is not None and op.bound is not None:
        try:
            if job.contract.scores == "bound":
                scores, bound = op.bound(block.part)
            else:
                scores, bound = op.score(block.part, fast.accumulate), None
        except ValueError as error:  # it names what it cannot compute with
            raise InvalidCase(str(error)) from error
        every = len(block.keep) == len(scores)
        if every:
            return scores, bound
        return scores[block.keep], None if bound is None else bound[block.keep]
    if job.source == "recorded" and job.called and "scores" not in job.case.inputs:
        own = next(side.recorded for side in job.sides if side.recorded is not None)
        return block.rows(own), None
    return None, None


def _inputs(job: Job, block: Block) -> Tensor | None:
    """The scores of the live rows where they are inputs of the call."""
    if "picks" in job.case.inputs:
        return eligible.of_ranks(job.case, job.windows, block.ids)[0]
    scores = job.case.inputs.get("scores")
    return None if scores is None else block.rows(scores)


def select(job: Job, block: Block, scores: Tensor, bound: Tensor | None = None) -> Selection:
    """The legal picks of a block by these scores [B, W], or by all within a bound of them."""
    free = replace(job.contract, ties="any") if job.contract.ties == "all" else job.contract
    ranked, admitted = eligible.ranked(job.case, job.windows, block.ids, scores)
    if admitted is not None:
        # What ranks as -inf is outside the mask, or becomes a pad.
        free = replace(free, minus_inf="pad")
    ranges = None
    if bound is not None:
        # A pinned column is exactly there.
        bound = torch.where(ranked == scores, bound, 0.0)
        ranges = bounds.in_windows(
            ranked,
            bound,
            column=block.column,
            visible=block.visible,
            admitted=admitted,
            minus_inf=free.minus_inf,
        )
        ranked = ranked.to(torch.float32)
    counted = reads_scores(block.visible, k=job.k, contract=free)
    return Selection(
        scores=ranked,
        at=torch.arange(len(ranked), device=ranked.device),
        nan=(ranked.isnan() & block.inside(ranked)).any(1) & counted & (free.nan == "reject"),
        column=block.column,
        visible=block.visible,
        start=block.start,
        want=best_picks(
            ranked,
            row_start=block.column,
            row_end=block.column + block.visible,
            k=job.k,
            contract=free,
        ),
        k=job.k,
        contract=free,
        ids=block.names,
        admitted=admitted,
        ranges=ranges,
    )
