"""Between: the rows in which two arms differ, and those of them that a contract minds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from equivalence import arms, ops, stages
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.selection import reads_scores
from equivalence.sides import Side
from equivalence.versus.forwards import Difference
from equivalence.windows import Windows, live

_PIECE_BYTES = 32 << 20
_SLOT_BYTES = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """One output of two arms: rows that differ by slots, and by sets, bool [T] each, of `rows`."""

    slots: Tensor
    sets: Tensor
    rows: int

    @property
    def counts(self) -> Difference:
        """How many."""
        return Difference(rows=self.rows, slots=int(self.slots.sum()), sets=int(self.sets.sum()))


def differences(case: Case, windows: Windows, one: Side, two: Side) -> dict[str, Rows]:
    """Every row of every output of two arms.

    An output that one of them lacks or gave in another shape differs in every row; logits that
    one of them never gives are left out. Rows that no kernel writes, or that are broken, never
    differ.
    """
    found = arms.apart(case, windows, one.outputs, two.outputs)
    rows = {s: (found.changed[s], found.other_set[s]) for s in found.changed}
    odd = {each.stage for side in (one, two) for each in side.findings}
    every = torch.ones_like(windows.start, dtype=torch.bool)
    published = torch.zeros_like(every).index_fill(0, arms.published(case, windows), value=True)
    masks = stages.MASKS if stages.publishes(case) else ()
    for stage in ops.find(case.op).spec.outputs:
        lacks = stage in found.missing or (stage in odd and stage not in rows)
        if lacks and (stage != "logits" or stage in odd):
            rows[stage] = (published, published) if stage in masks else (every, every)
    kept = live(case, windows)
    return {
        stage: Rows(
            slots=slots & kept,
            sets=sets & kept,
            rows=int(published.sum()) if stage in masks else len(every),
        )
        for stage, (slots, sets) in rows.items()
    }


def minded(
    case: Case,
    windows: Windows,
    pair: tuple[Side, Side],
    compared: Mapping[str, Rows],
    *,
    contract: Contract,
) -> Tensor:
    """Rows where two arms differ in what the contract minds, bool [T].

    Args:
        case: whose arms these are.
        windows: of every row.
        pair: the arms.
        compared: their differences.
        contract: in whose free order a row of the same sets is the same row.
    """
    one, two = (side.outputs for side in pair)
    apart = torch.zeros_like(windows.start, dtype=torch.bool)
    moved = torch.zeros_like(apart)
    for rows in compared.values():
        apart |= rows.sets
        moved |= rows.slots
    if contract.dead != "ignore" and "logits" in compared:
        apart |= _dead(case, windows, one, two) & live(case, windows)
    if contract.order != "any":
        return apart | moved
    here = (moved & ~apart).nonzero()[:, 0]
    if len(here):
        apart[_misplaced(case, windows, one, two, rows=here, contract=contract)] = True
    return apart


def _dead(
    case: Case, windows: Windows, one: Mapping[str, Tensor], two: Mapping[str, Tensor]
) -> Tensor:
    """Rows whose logits differ anywhere, outside the windows too, bool [T]."""
    every = torch.full_like(windows.visible, stages.width_of(case, "logits"))
    whole = replace(windows, column=torch.zeros_like(windows.column), visible=every)
    given = ({n: t for n, t in outputs.items() if n == "logits"} for outputs in (one, two))
    changed = arms.apart(case, whole, *given).changed
    return changed.get("logits", torch.zeros_like(every, dtype=torch.bool))


def _misplaced(
    case: Case,
    windows: Windows,
    one: Mapping[str, Tensor],
    two: Mapping[str, Tensor],
    *,
    rows: Tensor,
    contract: Contract,
) -> Tensor:
    """Of rows whose slots differ and whose sets do not, those that no free order explains.

    No order is free where it follows the input or the window, where a pad moves, or where one
    output of a row moves without the others.

    Returns:
        int64 [m], of the int64 [n] rows.
    """
    masked = stages.publishes(case)
    names = [name for name in ops.find(case.op).spec.outputs if name in one and name in two]
    names = [n for n in names if n != "logits" and not (n in stages.MASKS and masked)]
    if "raw_indices" in case.inputs or not names:
        return rows
    width = max(one[name].shape[1] for name in names)
    found = []
    for some in torch.split(rows, max(1, _PIECE_BYTES // (_SLOT_BYTES * max(1, width)))):
        visible = windows.visible[some]
        bad = ~reads_scores(visible, k=stages.k_of(case), contract=contract)
        first = {name: _wide(case, name, one[name][some], width) for name in names}
        second = {name: _wide(case, name, two[name][some], width) for name in names}
        slot = torch.arange(width, device=some.device)
        owed = visible.clamp(1, max(1, stages.k_of(case)))[:, None]
        fixed = (slot >= owed) | (contract.holes == "reject")
        for name in names:
            pad = stages.pad_of(case, name)
            bad |= (((first[name] == pad) != (second[name] == pad)) & fixed).any(1)
            if name != names[0]:
                bad |= (_paired(first, names[0], name) != _paired(second, names[0], name)).any(1)
        found.append(some[bad])
    return torch.cat(found)


def _wide(case: Case, name: str, values: Tensor, width: int) -> Tensor:
    """Slots with the pads that a wider output beside them has."""
    pad = stages.pad_of(case, name)
    return functional.pad(values.long(), (0, width - values.shape[1]), value=pad)


def _paired(outputs: Mapping[str, Tensor], one: str, two: str) -> Tensor:
    """The int32 values of two outputs that share a slot, together and in order."""
    return ((outputs[one] << 32) | (outputs[two] & 0xFFFFFFFF)).sort(1).values
