"""What rows may pick of their scores: columns that are pinned, masked, or on some rank."""

import torch
from torch import Tensor

from equivalence import layout
from equivalence.case import Case
from equivalence.errors import InvalidCase
from equivalence.windows import Windows, param
from refimpl import forms, ranks, selection
from refimpl.blocks import row_blocks


def ranked(
    case: Case, windows: Windows, rows: Tensor, scores: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Scores as top-k ranks them, and the cells that may be picked; None where the window says all.

    A cell that may not be picked ranks as -inf.

    Args:
        case: the whole call.
        windows: of every row.
        rows: int64 [B].
        scores: [B, W] of these rows.
    """
    column, visible = windows.column[rows], windows.visible[rows]
    scores = pinned(case, scores, column=column, visible=visible)
    if "picks" in case.inputs:
        return of_ranks(case, windows, rows)
    held = _held(case)
    if held is None:
        return scores, None
    return _admitted(case, scores, layout.taken(held, rows), column=column, visible=visible)


def expect(case: Case, windows: Windows) -> None:
    """Raise InvalidCase unless the mask or the picks of ranks among the inputs can be read."""
    held = _held(case)
    most = max(1, int(windows.visible.max())) if len(windows.visible) else 1
    try:
        if "picks" in case.inputs:
            picks = case.inputs["picks"]
            if windows.broken:
                picks = picks.index_fill(1, torch.tensor(list(windows.broken)).to(picks.device), -1)
            ranks.expect_own(picks, windows.visible, int(param(case, "interleave")))
        if held is None:
            return
        size = int(param(case, "block_size"))
        for rows in row_blocks(len(held), most):
            visible = windows.visible[rows].int()
            near = {"columns": most, "first": rows.start, "block_size": size}
            forms.read(held[rows], visible=visible, **near)
    except ValueError as error:
        raise InvalidCase(f"inputs: {error}") from error


def _held(case: Case) -> Tensor | None:
    """The mask that a consumer applies; block ids beside visible_blocks are no mask."""
    if "visible_blocks" in case.inputs:
        return None
    return case.inputs.get("mask", case.inputs.get("block_ids"))


def pinned(case: Case, scores: Tensor, *, column: Tensor, visible: Tensor) -> Tensor:
    """Scores whose first and last columns of each window are +inf, where the call says so."""
    first, last = (int(param(case, name) or 0) for name in ("init_tokens", "local_tokens"))
    if not first and not last:
        return scores
    end = column + visible
    return selection.pin_tokens(
        scores=scores, row_start=column, row_end=end, init_tokens=first, local_tokens=last
    )


def _admitted(
    case: Case, scores: Tensor, held: Tensor, *, column: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor]:
    size = int(param(case, "block_size"))
    width = max(1, int(visible.max())) if len(visible) else 1
    near = forms.read(held, visible=visible.int(), columns=width, block_size=size)
    relative = torch.arange(scores.shape[1], device=scores.device) - column[:, None]
    cells = near.gather(1, relative.clamp(0, width - 1))
    cells &= (relative >= 0) & (relative < visible[:, None])
    return scores.masked_fill(~cells, -torch.inf), cells


def of_ranks(case: Case, windows: Windows, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What all ranks picked of their own tokens, by token: scores [B, W], and which are there."""
    picks, scores = (case.inputs[name][:, rows] for name in ("picks", "scores"))
    lens, interleave = windows.visible[rows], int(param(case, "interleave"))
    width = max(1, int(lens.max())) if len(lens) else 1
    rank = torch.arange(len(picks), device=picks.device)[:, None, None]
    token = ranks.global_ids(picks.long(), rank=rank, ranks=len(picks), interleave=interleave)
    # Pads go to one column past the others.
    at = torch.where(token < 0, width, token).transpose(0, 1).flatten(1)
    held = scores.new_full((len(rows), width + 1), -torch.inf)
    held.scatter_(1, at, scores.transpose(0, 1).flatten(1))
    there = torch.zeros_like(held, dtype=torch.bool).scatter_(1, at, value=True)
    return held[:, :width], there[:, :width]
