"""Side by side: each output of a launch chain against what the reference says of a block."""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equivalence import beside, chosen, eligible, published, stages, wholes
from equivalence.blocks import Block, Job, select
from equivalence.checks import bitwise, within
from equivalence.checks.rows import UNDECIDED, Decided, failing
from equivalence.sides import Side
from equivalence.verdict import Finding, Status


def decide(job: Job, block: Block, side: Side) -> dict[str, Decided]:
    """Every output of one side that can be judged on this block."""
    selection = block.selection
    if selection is None and job.k and side.recorded is not None:
        selection = select(job, block, block.rows(side.recorded))
    decided: dict[str, Decided] = {}
    if "logits" in side.outputs and block.logits is not None:
        decided["logits"] = _decide_logits(job, block, side, block.logits)
    decided |= chosen.decide(job, block, side, selection)
    decided |= published.decide(
        job, block, side, chosen.picks_of(job, block, side).get("raw_indices")
    )
    if "scores" in side.outputs and block.scores is not None:
        applied, _ = eligible.ranked(job.case, job.windows, block.ids, block.scores)
        decided["scores"] = _decide_logits(job, block, side, applied, stage="scores")
    if "packed" in side.outputs:
        decided["packed"] = chosen.packed_rows(job, block, side, decided, selection)
    return decided | wholes.decide(job, block, side)


def blame(job: Job, block: Block, side: Side, decided: dict[str, Decided]) -> Counter[str]:
    """Of the rows with wrong picks: legal by the chain's own scores, or not even by those.

    Findings of rows that are legal by the chain's own scores say so from here on.
    """
    told: Counter[str] = Counter()
    picks = [name for name in stages.picked(job.case) if name in decided] or ["page_indices"]
    wrong = {n: d for n, d in decided.items() if n in picks and bool(failing(d.codes).any())}
    if not wrong or side.scores is None or block.logits is None:
        return told
    own = chosen.decide(job, block, side, select(job, block, block.rows(side.scores)))
    for stage, verdict in wrong.items():
        fails = failing(verdict.codes)
        scoring = fails & (own[stage].codes < UNDECIDED)
        # Scores that rank nothing, as NaN, blame nobody.
        selection = fails & failing(own[stage].codes)
        told.update({"scoring": int(scoring.sum()), "selection": int(selection.sum())})
        decided[stage] = replace(verdict, explain=_Blamed(verdict, scoring))
    return told


@dataclass(frozen=True)
class _Blamed:
    """An explanation that also names where the fault began."""

    verdict: Decided
    scoring: Tensor

    def __call__(self, i: int) -> Finding:
        found = self.verdict.explain(i)
        if not bool(self.scoring[i]):
            return found
        cause = "the picks are legal by the chain's own scores: the fault is in the scoring"
        return replace(found, reading="; ".join(filter(None, [found.reading, cause])))


def compared(job: Job, block: Block) -> Tensor:
    """How many scores of each row's window a kernel is meant to compute, int64 [B]."""
    if "score_end" not in job.case.inputs:
        return block.visible
    end = job.case.inputs["score_end"].long()[block.ids]
    return torch.minimum(block.visible, (end - block.start).clamp(min=0))


def unwritten_scores(job: Job, block: Block) -> list[Finding]:
    """Scores that judge, and were never written: nothing may be concluded from them."""
    judging = [job.baseline] if job.source == "baseline" else job.sides
    for side in filter(None, judging if job.source in ("baseline", "recorded") else ()):
        scores = side.outputs.get("logits") if job.source == "baseline" else side.recorded
        poison = side.poison.get("logits")
        if scores is None or poison is None:
            continue
        own = block.rows(scores)
        read = block.inside(own, compared(job, block))
        if block.selection is not None and block.selection.admitted is not None:
            read &= block.selection.admitted
        rows = ((own == poison) & read).any(1).nonzero()[:, 0]
        if len(rows):
            return [
                Finding(
                    stage="logits",
                    rule="unwritten",
                    status=Status.UNDECIDED,
                    run="baseline" if job.source == "baseline" else side.name,
                    row=int(block.names[rows[0]]),
                    reading="the scores that judge were never written here",
                )
            ]
    return []


def _decide_logits(
    job: Job, block: Block, side: Side, want: Tensor, *, stage: str = "logits"
) -> Decided:
    first, count, reference = block.column, compared(job, block), want
    got, poison = block.rows(side.outputs[stage]), side.poison.get(stage)
    inside = block.inside(want, count)
    if job.contract.dead != "ignore":
        dead = {"-inf": -torch.inf, "zero": 0.0}[job.contract.dead]
        want = torch.where(inside, want, dead)
        first, count = torch.zeros_like(first), torch.full_like(count, want.shape[1])
    elif stage == "logits" and block.selection is not None and block.selection.admitted is not None:
        # What a consumer's mask leaves out is dead: it may be -inf already, or never computed.
        want = torch.where(block.selection.admitted, want, got.to(want.dtype))
    if block.bound is not None and stage == "logits":
        return within.decide(
            within.Bounded(
                want=want,
                bound=block.bound,
                got=got,
                first=first,
                count=count,
                ids=block.names,
                stage=stage,
                poison=poison,
            )
        )
    decided = bitwise.decide(
        bitwise.Scores(
            want=want,
            got=got,
            first=first,
            count=count,
            ids=block.names,
            stage=stage,
            poison=poison,
        )
    )
    return beside.of_scores(job, block, decided, want=reference, got=got, poison=poison)
