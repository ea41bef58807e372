"""The control arm: runs of one case against each other."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from equivalence import published, stages
from equivalence.blocks import Block, Job
from equivalence.case import published_of
from equivalence.checks import bitwise, maskwords
from equivalence.checks.rows import failing
from equivalence.tally import RunTally


def count_picks(job: Job, block: Block, control: dict[str, Counter[str]]) -> None:
    """Index outputs of each later run against the first that has them, row by row.

    Args:
        job: the case and its sides.
        block: the rows.
        control: counts by output: rows, identical, reordered, other_set.
    """
    first: dict[str, Tensor] = {}
    which = published_of(job.case, block.ids)
    for side in job.sides:
        for stage, tensor in side.outputs.items():
            if tensor.is_floating_point():
                continue
            masked = stages.is_mask(job.case, stage)
            got = published.rows_of(job, block.ids[which], tensor) if masked else block.rows(tensor)
            if first.setdefault(stage, got) is got:
                continue
            seen = block.visible[which] if masked else None
            control.setdefault(stage, Counter()).update(_classes(first[stage], got, seen))


def _classes(one: Tensor, two: Tensor, seen: Tensor | None) -> dict[str, int]:
    """Rows that are the same, the same set, or another set; of masks in the columns `seen`."""
    rows = len(one)
    if seen is not None and one.dtype == two.dtype:
        other = int(maskwords.differing(want=one, got=two, visible=seen).sum())
        return {"rows": rows, "identical": rows - other, "reordered": 0, "other_set": other}
    if one.shape != two.shape or one.dtype != two.dtype:
        return {"rows": rows, "identical": 0, "reordered": 0, "other_set": rows}
    one, two = one.flatten(1), two.flatten(1)
    same = (one == two).all(1)
    apart = (~same).nonzero()[:, 0]
    reordered = (one[apart].sort(1).values == two[apart].sort(1).values).all(1)
    identical, moved = int(same.sum()), int(reordered.sum())
    return {
        "rows": rows,
        "identical": identical,
        "reordered": moved,
        "other_set": rows - identical - moved,
    }


def compare_logits(job: Job, block: Block, tallies: Sequence[RunTally]) -> None:
    """Logits of each later run against the first that has any: bits may not change between runs."""
    runs = [(s, t) for s, t in zip(job.sides, tallies, strict=True) if "logits" in s.outputs]
    for side, tally in runs[1:]:
        if any(found.rule == "nondeterminism" for found in tally.findings):
            continue
        decided = bitwise.decide(
            bitwise.Scores(
                want=block.rows(runs[0][0].outputs["logits"]),
                got=block.rows(side.outputs["logits"]),
                first=block.column,
                count=block.visible,
                ids=block.names,
                stage="logits",
            )
        )
        changed: list[int] = torch.nonzero(failing(decided.codes))[:, 0].tolist()
        if changed:
            reading = f"{side.name} gave other bits than {runs[0][0].name} on the same inputs"
            found = replace(decided.explain(changed[0]), rule="nondeterminism", reading=reading)
            tally.findings.append(replace(found, run=side.name))
