"""Side by side: each output of a launch chain against what the reference says of a block."""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from equivalence import beside, ops
from equivalence.blocks import Block, Job, select
from equivalence.checks import bitwise, pages, topk
from equivalence.checks.rows import IDENTICAL, UNDECIDED, Decided, failing
from equivalence.errors import InvalidCase
from equivalence.selection import Picks, Selection
from equivalence.sides import Side
from equivalence.verdict import Finding, Status
from refimpl.topk import PAD


def decide(job: Job, block: Block, side: Side) -> dict[str, Decided]:
    """Every output of one side that can be judged on this block."""
    selection = block.selection
    if selection is None and job.k and side.recorded is not None:
        selection = select(job, block, block.rows(side.recorded))
    decided: dict[str, Decided] = {}
    if "logits" in side.outputs and block.logits is not None:
        decided["logits"] = _decide_logits(job, block, side, block.logits)
    decided |= _decide_picks(job, block, side, selection)
    return decided


def blame(job: Job, block: Block, side: Side, decided: dict[str, Decided]) -> Counter[str]:
    """Of the rows with wrong picks: legal by the chain's own scores, or not even by those.

    Findings of rows that are legal by the chain's own scores say so from here on.
    """
    told: Counter[str] = Counter()
    picks = [name for name in ops.PICKS if name in decided] or ["page_indices"]
    wrong = {n: d for n, d in decided.items() if n in picks and bool(failing(d.codes).any())}
    if not wrong or side.scores is None or block.logits is None:
        return told
    own = _decide_picks(job, block, side, select(job, block, block.rows(side.scores)))
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


def unwritten_scores(job: Job, block: Block) -> list[Finding]:
    """Scores that judge, and were never written: nothing may be concluded from them."""
    judging = [job.baseline] if job.source == "baseline" else job.sides
    for side in filter(None, judging if job.source in ("baseline", "recorded") else ()):
        scores = side.outputs.get("logits") if job.source == "baseline" else side.recorded
        poison = side.poison.get("logits")
        if scores is None or poison is None:
            continue
        own = block.rows(scores)
        rows = ((own == poison) & block.inside(own)).any(1).nonzero()[:, 0]
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


def _decide_logits(job: Job, block: Block, side: Side, want: Tensor) -> Decided:
    first, count, reference = block.column, block.visible, want
    if job.contract.dead != "ignore":
        dead = {"-inf": -torch.inf, "zero": 0.0}[job.contract.dead]
        want = torch.where(block.inside(want), want, dead)
        first, count = torch.zeros_like(first), torch.full_like(count, want.shape[1])
    got, poison = block.rows(side.outputs["logits"]), side.poison.get("logits")
    decided = bitwise.decide(
        bitwise.Scores(
            want=want,
            got=got,
            first=first,
            count=count,
            ids=block.names,
            stage="logits",
            poison=poison,
        )
    )
    return beside.of_scores(job, block, decided, want=reference, got=got, poison=poison)


def _decide_picks(
    job: Job, block: Block, side: Side, selection: Selection | None
) -> dict[str, Decided]:
    """Picks by the legal set of each row, slots by the picks beside them or by that set."""
    picks = {
        stage: Picks(
            values=block.rows(side.outputs[stage]),
            base=ops.base_of(job.case, stage, job.windows)[block.ids],
            stage=stage,
            pad=ops.pad_of(job.case, stage),
            poison=_index_poison(side, stage),
        )
        for stage in ops.PICKS
        if stage in side.outputs
    }
    for each in picks.values():
        _check_space(each, block)
    decided: dict[str, Decided] = {}
    if selection is not None:
        for stage, each in picks.items():
            ranked = topk.decide(selection, each)
            decided[stage] = beside.of_picks(job, block, ranked, selection=selection, picks=each)
    if {"raw_indices", "ragged_indices"} <= set(picks):
        decided["ragged_indices"] = _offset(job, block, picks, decided.get("raw_indices"))
    if "page_indices" in side.outputs:
        slots = _pages(job, block, side)
        named = next(iter(picks), None)
        if named is not None:
            want = picks[named].columns(slots.values.shape[1])
            decided["page_indices"] = _joint(job, block, slots, want, decided.get(named))
        elif "raw_indices" in job.case.inputs:
            raw = block.rows(job.case.inputs["raw_indices"]).long()
            surplus = slots.values.shape[1] - raw.shape[1]
            want = functional.pad(raw, (0, surplus), value=PAD)
            decided["page_indices"] = _joint(job, block, slots, want, None)
        elif selection is not None:
            alone = pages.decide_alone(slots, selection)
            surplus = slots.values.shape[1] - selection.want.shape[1]
            want = functional.pad(selection.want.long(), (0, surplus), value=PAD)
            decided["page_indices"] = beside.of_slots(job, block, alone, slots=slots, want=want)
    return decided


def _offset(job: Job, block: Block, picks: dict[str, Picks], ranked: Decided | None) -> Decided:
    """Ragged indices are the raw ones of the same chain, moved by the row's offset."""
    ragged = picks["ragged_indices"]
    moved = pages.Pages(
        values=ragged.values,
        slots_of=lambda rows, columns: columns + ragged.base[rows][:, None],
        reserved=torch.iinfo(torch.int32).min,
        ids=block.names,
        pad=ragged.pad,
        poison=ragged.poison,
        stage=ragged.stage,
    )
    want = picks["raw_indices"].columns(ragged.values.shape[1])
    return _joint(job, block, moved, want, ranked)


def _check_space(picks: Picks, block: Block) -> None:
    """Refuse an output whose pad is one of a row's columns, or whose columns pass int32."""
    pad = picks.pad - picks.base
    clash = (pad >= 0) & (pad < block.visible)
    if bool(clash.any()):
        row = int(block.names[clash][0])
        raise InvalidCase(f"{picks.stage}: the pad {picks.pad} is also a column of row {row}")
    past = picks.base + block.visible > torch.iinfo(torch.int32).max
    if bool(past.any()):
        raise InvalidCase(f"{picks.stage}: row {int(block.names[past][0])} passes int32")


def _pickable(job: Job, block: Block) -> Tensor:
    """How many columns each row may pick: an empty one the first, where that is allowed."""
    return block.visible.clamp(min=1) if job.contract.empty_rows == "first" else block.visible


def _joint(
    job: Job, block: Block, slots: pages.Pages, want: Tensor, ranked: Decided | None
) -> Decided:
    visible = _pickable(job, block)
    classes = torch.full_like(visible, IDENTICAL, dtype=torch.int8)
    decided = pages.decide_joint(slots, want, visible, classes if ranked is None else ranked.codes)
    decided = beside.of_slots(job, block, decided, slots=slots, want=want)
    return decided if ranked is None else replace(decided, counts=ranked.counts)


def _pages(job: Job, block: Block, side: Side) -> pages.Pages:
    slots_of = ops.find(job.case.op).slots(block.part)
    if slots_of is None:
        raise InvalidCase("page_indices need a page table or a slot map among the inputs")
    return pages.Pages(
        values=block.rows(side.outputs["page_indices"]),
        slots_of=lambda rows, columns: slots_of(block.keep[rows], columns),
        reserved=job.contract.reserved_pages * ops.page_size_of(job.case),
        ids=block.names,
        pad=ops.pad_of(job.case, "page_indices"),
        poison=_index_poison(side, "page_indices"),
    )


def _index_poison(side: Side, stage: str) -> int | None:
    poison = side.poison.get(stage)
    return None if poison is None else int(poison)
