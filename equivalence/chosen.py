"""What a launch chain chose: its picks, slots and packed rows beside the legal ones of a block."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from equivalence import beside, ops, slotmap, stages
from equivalence.blocks import Block, Job
from equivalence.checks import packed, pages, topk
from equivalence.checks.rows import IDENTICAL, Decided, failing
from equivalence.errors import InvalidCase
from equivalence.selection import Picks, Selection
from equivalence.sides import Side
from equivalence.windows import param
from refimpl.topk import PAD


def packed_rows(
    job: Job,
    block: Block,
    side: Side,
    decided: dict[str, Decided],
    selection: Selection | None,
) -> Decided:
    """Packed rows beside the block ids of the call or of the chain, or by the ids they hold."""
    got = packed.Packed(
        values=block.rows(side.outputs["packed"]),
        positions=job.case.inputs["positions"][block.ids],
        visible=block.visible.int(),
        ids=block.names,
        block_size=int(param(job.case, "block_size")),
        poison=_index_poison(side, "packed"),
    )
    if "block_ids" in job.case.inputs:
        return packed.decide_joint(got, job.case.inputs["block_ids"][block.ids])
    if "block_ids" in decided:
        own = picks_of(job, block, side)["block_ids"]
        ranked = decided["block_ids"]
        joint = packed.decide_joint(got, own.columns(job.k)[:, : job.k], ranked.codes)
        return replace(joint, counts=ranked.counts)
    structure, ids = packed.decide_alone(got)
    if selection is None:
        return structure
    zero = torch.zeros_like(block.ids)
    ranked = topk.decide(selection, Picks(values=ids.int(), base=zero, stage="packed"))
    broken = failing(structure.codes)
    return replace(
        ranked,
        codes=torch.where(broken, structure.codes, ranked.codes),
        explain=lambda i: (structure if bool(broken[i]) else ranked).explain(i),
    )


def decide(job: Job, block: Block, side: Side, selection: Selection | None) -> dict[str, Decided]:
    """Picks by the legal set of each row, slots by the picks beside them or by that set."""
    picks = picks_of(job, block, side)
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
        elif selection is not None and selection.ranges is None:
            alone = pages.decide_alone(slots, selection)
            surplus = slots.values.shape[1] - selection.want.shape[1]
            want = functional.pad(selection.want.long(), (0, surplus), value=PAD)
            decided["page_indices"] = beside.of_slots(job, block, alone, slots=slots, want=want)
    return decided


def picks_of(job: Job, block: Block, side: Side) -> dict[str, Picks]:
    """The outputs of a side that are picks."""
    return {
        stage: Picks(
            values=block.rows(side.outputs[stage]),
            base=stages.base_of(job.case, stage, job.windows)[block.ids],
            stage=stage,
            pad=stages.pad_of(job.case, stage),
            poison=_index_poison(side, stage),
        )
        for stage in stages.picked(job.case)
        if stage in side.outputs
    }


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
        reserved=job.contract.reserved_pages * slotmap.page_size_of(job.case),
        ids=block.names,
        pad=stages.pad_of(job.case, "page_indices"),
        poison=_index_poison(side, "page_indices"),
    )


def _index_poison(side: Side, stage: str) -> int | None:
    poison = side.poison.get(stage)
    return None if poison is None else int(poison)
