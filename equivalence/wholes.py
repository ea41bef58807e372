"""Outputs of a side that a reference gives whole, beside that reference."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from equivalence import layout, ops
from equivalence.blocks import Block, Job
from equivalence.checks import whole
from equivalence.checks.rows import Decided
from equivalence.sides import Side
from refimpl import bits


def decide(job: Job, block: Block, side: Side) -> dict[str, Decided]:
    """Outputs that a reference gives whole."""
    op = ops.find(job.case.op)
    if op.exact is None:
        return {}
    want, free = op.exact(job.case, block.ids), op.free(job.case, block.ids)
    got = {stage: block.rows(side.outputs[stage]) for stage in want if stage in side.outputs}
    return {
        stage: whole.decide(
            whole.Whole(
                want=want[stage],
                got=mine,
                ids=block.names,
                stage=stage,
                poison=side.poison.get(stage),
                free=free.get(stage),
                reading=partial(_read, job, block, stage=stage, want=want, got=got),
            )
        )
        for stage, mine in got.items()
    }


def _read(
    job: Job,
    block: Block,
    wrong: Tensor,
    *,
    stage: str,
    want: Mapping[str, Tensor],
    got: Mapping[str, Tensor],
) -> str:
    """What a wrong row looks like, beside the right rows of its block."""
    reading = ops.find(job.case.op).reading
    if reading is None:
        return ""
    differ = bits.as_int(want[stage]) != bits.as_int(got[stage])
    right = (~(differ.flatten(1).any(1) if differ.dim() > 1 else differ)).nonzero()[:, 0]
    at = torch.cat([wrong, right])
    others = {name: layout.taken(t, at) for name, t in got.items() if name != stage}
    return reading(
        stage=stage,
        inputs=job.case.inputs,
        params=job.case.params,
        want=layout.taken(want[stage], at),
        got=layout.taken(got[stage], at),
        rows=block.ids[at],
        beside=others,
    )
