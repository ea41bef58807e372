"""Published masks of a launch chain, beside what the reference publishes of a block of rows."""

from dataclasses import replace

import torch
from torch import Tensor

from equivalence import eligible, layout, stages
from equivalence.blocks import Block, Job
from equivalence.case import place_of, published_of
from equivalence.checks import bounds, masks
from equivalence.checks.published import Published
from equivalence.checks.rows import Decided
from equivalence.selection import Picks
from equivalence.sides import Side
from equivalence.windows import param


def decide(job: Job, block: Block, side: Side, picks: Picks | None) -> dict[str, Decided]:
    """Every form of a mask that a side gives, on the rows that both sides publish.

    Args:
        job: the case and its sides.
        block: the rows.
        side: what is judged.
        picks: of the same chain, where it gave some.
    """
    given = {stage: side.outputs[stage] for stage in stages.MASKS if stage in side.outputs}
    scores = block.scores
    if scores is None and side.recorded is not None:
        scores = block.rows(side.recorded)
    if not given or scores is None or not stages.publishes(job.case):
        return {}
    which = published_of(job.case, block.ids)
    if not len(which):
        return {}
    scores = eligible.pinned(job.case, scores, column=block.column, visible=block.visible)
    ranges = None
    if block.bound is not None and block.scores is not None:
        bound = torch.where(scores == block.scores, block.bound, 0.0)
        ranges = bounds.in_windows(scores, bound, column=block.column, visible=block.visible)
        scores = scores.to(torch.float32)
    # A block is published for its best column: picks of other columns may lie outside.
    exact = param(job.case, "block_size") == 1 and int(param(job.case, "topk_blocks")) > job.k
    own = picks.columns(picks.values.shape[1])[which] if picks is not None and exact else None
    names = block.names[which]
    seen = {
        stage: (
            Published(
                got=rows_of(job, block.ids[which], tensor),
                scores=scores,
                at=which,
                column=block.column[which],
                visible=block.visible[which],
                topk_blocks=int(param(job.case, "topk_blocks")),
                block_size=int(param(job.case, "block_size")),
                contract=job.contract,
                ids=names,
                stage=stage,
                pad=stages.pad_of(job.case, stage),
                poison=_poison(side, stage),
                picks=own,
                ranges=ranges,
            )
        )
        for stage, tensor in given.items()
    }
    decided = {stage: masks.decide(each) for stage, each in seen.items()}
    if set(seen) == set(stages.MASKS):
        decided["block_ids"] = masks.beside(
            decided["block_ids"], seen["block_ids"], decided["mask"], seen["mask"]
        )
    return {stage: replace(each, ids=names) for stage, each in decided.items()}


def rows_of(job: Job, rows: Tensor, tensor: Tensor) -> Tensor:
    """Published rows of a mask, which may hold every row of the call."""
    listed = job.case.inputs.get("rows")
    if listed is None or len(tensor) == len(job.windows.start):
        return layout.taken(tensor, rows)
    return layout.taken(tensor, place_of(listed, rows))


def _poison(side: Side, stage: str) -> int | None:
    poison = side.poison.get(stage)
    return None if poison is None else int(poison)
