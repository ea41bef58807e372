"""What the reference gives for a case under a contract, in every form the case asks for."""

import torch
from torch import Tensor

from equivalence import ops, poisons, slotmap, stages
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.selection import best_picks
from refimpl import fast
from refimpl.topk import PAD

UNWRITTEN = poisons.INDEX[0]
"""Stands among picks for a slot that keeps the buffer's poison: nothing is added to it."""
_FP32_WHOLE = 1 << 24


def right_outputs(case: Case, *, contract: Contract | None = None) -> dict[str, Tensor]:
    """What the reference gives for a case under a contract, in every form its inputs allow.

    Raises:
        InvalidCase: the case does not fit its op.
    """
    op, free = ops.find(case.op), contract or Contract()
    ops.validate(case)
    windows = op.windows(case)
    outputs: dict[str, Tensor] = {}
    if "raw_indices" in case.inputs:
        return {"page_indices": _slots(case, case.inputs["raw_indices"].long())}
    scores = case.inputs.get("scores")
    if op.score is not None:
        scores = outputs["logits"] = op.score(case, fast.accumulate)
    if scores is None or not stages.k_of(case):
        return outputs
    picks = best_picks(
        scores,
        row_start=windows.column,
        row_end=windows.column + windows.visible,
        k=stages.k_of(case),
        contract=free,
    )
    return outputs | forms(case, picks.long())


def forms(case: Case, picks: Tensor) -> dict[str, Tensor]:
    """Window-relative picks int64 [T, slots], pads -1, as every output of the op.

    A column that no table holds gets a slot that no table holds.
    """
    op = ops.find(case.op)
    windows = op.windows(case)
    out: dict[str, Tensor] = {}
    for stage in stages.picked(case):
        if stage != "ragged_indices" or "topk_indices_offset" in case.inputs:
            moved = picks + stages.base_of(case, stage, windows)[:, None]
            out[stage] = _write(picks, moved, stages.pad_of(case, stage))
    if op.slots(case) is not None:
        out["page_indices"] = _slots(case, picks)
    return out


def _write(picks: Tensor, values: Tensor, pad: int) -> Tensor:
    values = torch.where(picks == PAD, pad, values)
    return torch.where(picks == UNWRITTEN, UNWRITTEN, values).int()


def _slots(case: Case, picks: Tensor) -> Tensor:
    """int32 slots of picks; a column that no table holds gets a slot that no table holds."""
    op = ops.find(case.op)
    slots_of, windows = op.slots(case), op.windows(case)
    assert slots_of is not None  # noqa: S101 - callers ask first
    table = case.inputs.get("page_table", case.inputs.get("block_table"))
    size, start = slotmap.page_size_of(case), windows.start[:, None]
    if table is None:
        table = case.inputs["slot_map" if "slot_map" in case.inputs else "k_slots"]
        first, end = -start, len(table) - start
    else:
        first, end = torch.zeros_like(start), torch.full_like(start, table.shape[1] * size)
    held = (picks >= first) & (picks < end)
    rows = torch.arange(len(picks), device=picks.device)
    # A row without any held column still needs a column to look up: any that exists.
    spare = first.expand_as(picks)
    slots = slots_of(rows, torch.where(held, picks, spare))
    beyond = (int(table.max()) + 1) * size + picks % _FP32_WHOLE
    return _write(picks, torch.where(held, slots, beyond), stages.pad_of(case, "page_indices"))
