"""Two outcomes of one call beside each other: which rows changed, and which hold another set."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence import layout, ops, stages
from equivalence.case import Case
from equivalence.checks import maskwords
from equivalence.windows import Windows
from refimpl.bits import as_int

_PIECE_BYTES = 32 << 20
_SETS = (*stages.PICKS, "page_indices", "packed")
"""Outputs whose rows may hold the same in another order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Apart:
    """How one outcome differs from another, by output that both have.

    Attributes:
        changed: rows that are not the same bits, slot by slot, bool [T]; logits and masks inside
            the windows.
        other_set: of these the rows that are not the same set, bool [T]; all of them for outputs
            whose values are no columns, blocks or slots.
        missing: outputs that only one of the two has.
    """

    changed: Mapping[str, Tensor]
    other_set: Mapping[str, Tensor]
    missing: tuple[str, ...] = ()

    @property
    def any_changed(self) -> bool:
        """Whether anything changed at all."""
        return bool(self.missing) or any(bool(rows.any()) for rows in self.changed.values())


def apart(
    case: Case, windows: Windows, one: Mapping[str, Tensor], two: Mapping[str, Tensor]
) -> Apart:
    """Compare two outcomes of a case row by row, in pieces of bounded memory.

    Args:
        case: whose outputs these are.
        windows: of every row, see `ops.find(case.op).windows`.
        one: outputs by name.
        two: outputs by name, on the same device.
    """
    changed: dict[str, Tensor] = {}
    other: dict[str, Tensor] = {}
    for stage in ops.find(case.op).spec.outputs:
        if stage not in one or stage not in two:
            continue
        if stages.is_mask(case, stage):
            changed[stage] = other[stage] = _masks(case, windows, one[stage], two[stage])
        elif stage in ("logits", "scores"):
            changed[stage] = other[stage] = _cells(windows, one[stage], two[stage])
        else:
            changed[stage], other[stage] = _slots(one[stage], two[stage])
            if stage not in _SETS:
                other[stage] = changed[stage]
    return Apart(changed=changed, other_set=other, missing=tuple(sorted(one.keys() ^ two.keys())))


def published(case: Case, windows: Windows) -> Tensor:
    """The numbers of the rows that are published, int64 [P]: all where the case lists none."""
    listed = case.inputs.get("rows")
    if listed is None:
        return torch.arange(len(windows.start), device=windows.start.device)
    return listed.long()


def _cells(windows: Windows, one: Tensor, two: Tensor) -> Tensor:
    """Rows whose scores differ by a bit inside their window, bool [T]."""
    changed = torch.ones(len(one), dtype=torch.bool, device=one.device)
    if one.shape != two.shape or one.dtype != two.dtype:
        return changed
    column = torch.arange(one.shape[1], device=one.device)
    for span in _spans(one):
        first, count = windows.column[span, None], windows.visible[span, None]
        inside = (column >= first) & (column < first + count)
        changed[span] = ((as_int(one[span]) != as_int(two[span])) & inside).any(1)
    return changed


def _masks(case: Case, windows: Windows, one: Tensor, two: Tensor) -> Tensor:
    """Rows whose published masks differ in a column that they see, bool [T]."""
    every, listed = len(windows.start), published(case, windows)
    changed = torch.zeros(every, dtype=torch.bool, device=one.device)
    if one.dtype is not two.dtype:
        return changed.index_fill(0, listed, value=True)
    one, two = (layout.taken(x, listed) if len(x) == every else x for x in (one, two))
    visible = windows.visible[listed]
    changed[listed] = maskwords.differing(want=one, got=two, visible=visible)
    return changed


def _slots(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose slots differ, and those whose values differ in any order, bool [T] each."""
    changed = torch.ones(len(one), dtype=torch.bool, device=one.device)
    if one.shape != two.shape or one.dtype != two.dtype:
        return changed, changed.clone()
    # Of outputs that hold one value a row too.
    one, two = (as_int(each)[:, None].flatten(1) for each in (one, two))
    for span in _spans(one):
        changed[span] = (one[span] != two[span]).any(1)
    other = changed.clone()
    rows = changed.nonzero()[:, 0]
    for part in torch.split(rows, max(1, _PIECE_BYTES // max(1, 16 * one.shape[1]))):
        other[part] = (one[part].sort(1).values != two[part].sort(1).values).any(1)
    return changed, other


def _spans(tensor: Tensor) -> Iterator[slice]:
    """Row ranges of bounded bytes."""
    step = max(1, _PIECE_BYTES // max(1, tensor.shape[1] * 4))
    for first in range(0, len(tensor), step):
        yield slice(first, min(first + step, len(tensor)))
