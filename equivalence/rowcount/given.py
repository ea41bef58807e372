"""Given: outputs of a call of some rows, row by row, whatever their dimensions and widths."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from equivalence import layout, stages
from equivalence.case import Case, place_of, published_of
from equivalence.windows import Windows
from refimpl.topk import PAD


def kept(case: Case, stage: str, rows: Tensor) -> Tensor:
    """Which of these rows (int64) an output has, int64: all, or the published ones of a mask."""
    if stages.is_mask(case, stage):
        return published_of(case, rows)
    return torch.arange(len(rows), device=rows.device)


def declared(case: Case, outputs: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Outputs of a call of these rows, of masks the published rows where all of them were given."""
    cut = {}
    for stage, tensor in outputs.items():
        which = kept(case, stage, rows)
        more = tensor.dim() > 0 and len(which) < len(rows) == len(tensor)
        cut[stage] = layout.taken(tensor, which.to(tensor.device)) if more else tensor
    return cut


def taken(case: Case, stage: str, whole: Tensor, rows: Tensor) -> Tensor:
    """What the whole call gave for these rows, of a mask for those that are published."""
    at = _places(case, stage, rows)
    if len(at) and bool((at.diff() == 1).all()):
        return whole[int(at[0]) : int(at[0]) + len(at)]
    return layout.taken(whole, at)


def between(case: Case, stage: str, got: Tensor, rows: Tensor, piece: slice) -> Tensor:
    """What a call of `rows` gave for those of a piece of them."""
    edges = torch.tensor([piece.start, piece.stop], device=rows.device)
    first, end = torch.searchsorted(kept(case, stage, rows), edges).tolist()
    return got[first:end]


def every(case: Case, stage: str, some: Tensor, rows: Tensor) -> Tensor:
    """A row for each of `rows`, of which `some` are those that the output has; others are blank."""
    which = kept(case, stage, rows)
    if len(which) == len(rows):
        return some
    cells = layout.as_bytes(some)
    out = cells.new_full((len(rows), *cells.shape[1:]), _blank(some))
    out[which] = cells
    return out.view(some.dtype)


def put(case: Case, stage: str, whole: Tensor, rows: Tensor, got: Tensor) -> Tensor:
    """The whole call's output, as wide as either, with what another call gave for these rows."""
    if stages.is_mask(case, stage):
        width = max(whole.shape[1], got.shape[1])
        whole, got = wide(whole, width), wide(got, width)
    layout.as_bytes(whole)[_places(case, stage, rows)] = layout.as_bytes(got)
    return whole


def wide(mask: Tensor, width: int) -> Tensor:
    """A mask with more columns or slots, which admit nothing."""
    if mask.shape[1] >= width:
        return mask
    cells = layout.as_bytes(mask)
    more = functional.pad(cells, (0, width - cells.shape[1]), value=_blank(mask))
    return more.view(mask.dtype)


def _places(case: Case, stage: str, rows: Tensor) -> Tensor:
    """Where the whole call's output has these rows, of a mask those that are published."""
    if not stages.is_mask(case, stage) or "rows" not in case.inputs:
        return rows
    at = place_of(case.inputs["rows"], rows)
    return at[at >= 0]


def _blank(mask: Tensor) -> int:
    return PAD if mask.dtype is torch.int32 else 0


def flat(tensor: Tensor) -> Tensor:
    """An output as one row of values a row, [T, n]."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]


def width_of(tensor: Tensor) -> int:
    """Bytes of a row."""
    return (tensor[:1].numel() or 1) * tensor.element_size()


def misfit(
    case: Case, stage: str, whole: Tensor, rows: Tensor, got: Tensor, *, windows: Windows
) -> tuple[str, str, str] | None:
    """Why an output of a call of these rows is none of the whole call's kind; None where it is.

    Args:
        case: the whole call.
        stage: the output.
        whole: what the whole call gave.
        rows: int64, of the other call.
        got: what that gave, of a mask the published rows.
        windows: of these rows.

    Returns:
        The rule, what is wanted and what was got.
    """
    which = kept(case, stage, rows)
    dims = whole.shape[1:]
    fits = tuple(got.shape) == (len(which), *dims)
    if stages.is_mask(case, stage):
        inputs = {**case.inputs, "rows": which} if "rows" in case.inputs else case.inputs
        part = Case(op=case.op, inputs=inputs, params=case.params)
        fit = stages.fit(part, stage, windows, rows=len(which))
        rule, wanted, mine = fit.misfit(got) or ("", "", "")
        if rule == "shape":
            return rule, wanted, mine
        fits, dims = True, got.shape[1:]
    if fits and got.dtype is whole.dtype:
        return None
    want = f"{[len(which), *dims]} {whole.dtype}".replace("torch.", "")
    mine = f"{list(got.shape)} {got.dtype}".replace("torch.", "")
    return "dtype" if fits else "shape", want, mine
