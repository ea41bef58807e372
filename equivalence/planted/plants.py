"""Wrong or varied outputs, made from a case and its right outputs: picks, slots and logits."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from equivalence import ops, poisons, stages
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.planted import edits
from equivalence.planted.edits import Edit, Row
from equivalence.planted.reference import forms, right_outputs
from refimpl.bits import as_int
from refimpl.topk import PAD

Outputs = Mapping[str, Tensor]
_FP32_WHOLE = 1 << 24
_SURPLUS = 3
_ONE = slice(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Planted:
    """Outputs of which some rows were changed.

    Attributes:
        outputs: every output, whole.
        rows: the rows that differ from the right outputs.
    """

    outputs: Outputs
    rows: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CandidateFault:
    """A faulty candidate of an op that has one right answer.

    Attributes:
        candidate: called as the reference that it stands for.
        rules: what its findings may be called.
        shows: what it does, in one sentence.
        needs: what must hold for it to show.
    """

    candidate: Callable[..., Tensor]
    rules: frozenset[str]
    shows: str
    needs: str


Plant = Callable[[Case, Outputs, int], Planted | None]
"""(case, its right outputs, seed) -> what a faulty kernel gives; None where it does not apply."""


def judged_as(case: Case, planted: Planted, *, stages: Iterable[str] | None = None) -> Case:
    """The case with these outputs as its one recorded run, of buffers that held the poison."""
    kept = {n: t for n, t in planted.outputs.items() if stages is None or n in set(stages)}
    poison = {
        f"poison.{n}": repr((poisons.SCORE if t.is_floating_point() else poisons.INDEX)[0])
        for n, t in kept.items()
    }
    return replace(case, recorded=(kept,), provenance={**case.provenance, **poison})


def _row(case: Case, right: Outputs, row: int, contract: Contract) -> Row:
    """Row `row` of the right picks."""
    windows = ops.find(case.op).windows(case)
    raw = right["raw_indices"][row].long()
    base = int(stages.base_of(case, "raw_indices", windows)[row])
    pads = raw == stages.pad_of(case, "raw_indices")
    return Row(
        picks=torch.where(pads, PAD, raw - base),
        buffer=(right["logits"] if "logits" in right else case.inputs["scores"])[row],
        column=int(windows.column[row]),
        visible=int(windows.visible[row]),
        start=int(windows.start[row]),
        k=stages.k_of(case),
        contract=contract,
    )


def seeded(count: int, seed: int) -> list[int]:
    """All numbers below `count`, in an order of the seed's."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return [int(i) for i in order]


def changed(right: Outputs, wrong: Outputs, rows: Iterable[int]) -> Planted:
    """The right outputs with some replaced.

    Raises:
        ValueError: a row named differs in none of them, so nothing was planted.
    """
    planted = Planted(outputs={**right, **wrong}, rows=tuple(sorted(rows)))
    for row in planted.rows:
        if all(torch.equal(as_int(t[row]), as_int(right[name][row])) for name, t in wrong.items()):
            raise ValueError(f"row {row} is still right in {', '.join(wrong)}: nothing was planted")
    return planted


def picks(edit: Edit, contract: str = "strict") -> Plant:
    """Plant an edit in the first row, in the seed's order, that has room for it."""

    def plant(case: Case, right: Outputs, seed: int) -> Planted | None:
        if "raw_indices" not in right:
            return None
        free = Contract.parse(contract)
        for number in seeded(len(right["raw_indices"]), seed):
            row = _row(case, right, number, free)
            wrong = edit(row)
            if wrong is not None and not torch.equal(wrong, row.picks):
                return _replaced(case, right, {number: wrong})
        return None

    return plant


def _replaced(case: Case, right: Outputs, rows: Mapping[int, Tensor]) -> Planted:
    """The right outputs with these rows of picks, in every form."""
    every = torch.full_like(right["raw_indices"], PAD, dtype=torch.int64)
    for number, row in rows.items():
        every[number] = row
    every_form = forms(case, every)
    wrong = {name: right[name].clone() for name in every_form}
    for name, tensor in every_form.items():
        wrong[name][list(rows)] = tensor[list(rows)]
    return changed(right, wrong, rows)


def rows_exchanged(case: Case, right: Outputs, seed: int) -> Planted | None:
    """Two rows stand in each other's places, both of columns that the other window has."""
    if "raw_indices" not in right:
        return None
    free = Contract()
    rows = {i: _row(case, right, i, free) for i in seeded(len(right["raw_indices"]), seed)}
    full = {i: row for i, row in rows.items() if row.selects}
    for i, one in full.items():
        for j, two in full.items():
            if i != j and _loses(one, two.picks) and _loses(two, one.picks):
                return _replaced(case, right, {i: two.picks, j: one.picks})
    return None


def _loses(row: Row, picks: Tensor) -> bool:
    """Whether these picks lie in the row's window and miss a winner of it."""
    if int(picks.max()) >= row.visible:
        return False
    got = torch.zeros_like(row.legal.must)
    got[picks] = True
    return bool((row.legal.must & ~got).any())


def all_unwritten(_case: Case, right: Outputs, _seed: int) -> Planted | None:
    """The launch wrote nothing."""
    if "raw_indices" not in right:
        return None
    poisoned = {
        name: torch.full_like(t, poisons.INDEX[0]) for name, t in right.items() if name != "logits"
    }
    return changed(right, poisoned, range(len(right["raw_indices"])))


def pages(change: Callable[[Tensor], Tensor]) -> Plant:
    """Change the slots of one row, int64 [picks], while the picks beside them stay right."""

    def plant(case: Case, right: Outputs, seed: int) -> Planted | None:
        if "page_indices" not in right:
            return None
        pad = stages.pad_of(case, "page_indices")
        for row in seeded(len(right["page_indices"]), seed):
            slots = right["page_indices"][row].long()
            valid = slots != pad
            wrong = slots.clone()
            wrong[valid] = change(slots[valid])
            if not torch.equal(wrong, slots):
                whole = right["page_indices"].clone()
                whole[row] = wrong.int()
                return changed(right, {"page_indices": whole}, [row])
        return None

    return plant


def last_off(by: int) -> Callable[[Tensor], Tensor]:
    """The last slot off by a number."""

    def change(slots: Tensor) -> Tensor:
        return torch.cat([slots[:-1], slots[-1:] + by])

    return change


def turned(slots: Tensor) -> Tensor:
    """Every slot in its neighbour's place."""
    return slots.roll(1)


def through_fp32(slots: Tensor) -> Tensor:
    """What an index becomes that travels as fp32: whole up to 2**24, even above."""
    return torch.where(slots > _FP32_WHOLE, slots.float().long(), slots)


def pages_of_other_tie(case: Case, right: Outputs, seed: int) -> Planted | None:
    """Slots of another legal choice than the one beside them."""
    other = picks(edits.other_tie)(case, right, seed)
    if other is None or "page_indices" not in right:
        return None
    return changed(right, {"page_indices": other.outputs["page_indices"]}, other.rows)


def alone(plant: Plant) -> Plant:
    """The slots of a plant, without the picks beside them."""

    def without(case: Case, right: Outputs, seed: int) -> Planted | None:
        planted = plant(case, right, seed)
        if planted is None or "page_indices" not in planted.outputs:
            return None
        return replace(planted, outputs={"page_indices": planted.outputs["page_indices"]})

    return without


def logits(
    change: Callable[[Tensor], Tensor],
    where: Callable[[Tensor, Tensor], Tensor],
    *,
    cells: slice = _ONE,
) -> Plant:
    """Change logits of one row: of the cells for which `where(row, inside)` holds, a slice."""

    def plant(case: Case, right: Outputs, seed: int) -> Planted | None:
        if "logits" not in right:
            return None
        inside = _inside(case, right["logits"])
        for row in seeded(len(inside), seed):
            at = where(right["logits"][row], inside[row]).nonzero()[:, 0][cells]
            if len(at):
                wrong = right["logits"].clone()
                wrong[row, at] = change(wrong[row, at])
                return changed(right, {"logits": wrong}, [row])
        return None

    return plant


def flipped(values: Tensor) -> Tensor:
    """The lowest bit of the fraction flipped."""
    return (as_int(values) ^ 1).view(values.dtype)


def filled(value: float) -> Callable[[Tensor], Tensor]:
    """One value everywhere."""

    def change(values: Tensor) -> Tensor:
        return torch.full_like(values, value)

    return change


def wider(_case: Case, right: Outputs, _seed: int) -> Planted | None:
    """More slots than k, pads in the surplus."""
    if "raw_indices" not in right:
        return None
    wide = {
        name: functional.pad(tensor, (0, _SURPLUS), value=PAD)
        for name, tensor in right.items()
        if name != "logits"
    }
    return Planted(outputs={**right, **wide}, rows=tuple(range(len(right["raw_indices"]))))


def as_promised(case: Case, right: Outputs, _seed: int) -> Planted | None:
    """The right outputs themselves, where they are not those of the strict contract."""
    strict = right_outputs(case)
    names = [name for name in strict if name != "logits"]
    rows = [
        row
        for row in range(len(right[names[0]]) if names else 0)
        if all(not torch.equal(right[name][row], strict[name][row]) for name in names)
    ]
    return Planted(outputs=right, rows=tuple(rows)) if rows else None


def dead_zero(case: Case, right: Outputs, _seed: int) -> Planted | None:
    """Zeros in every cell outside a window."""
    if "logits" not in right:
        return None
    inside = _inside(case, right["logits"])
    rows = (~inside).any(1).nonzero()[:, 0].tolist()
    return changed(right, {"logits": torch.where(inside, right["logits"], 0.0)}, rows)


def _inside(case: Case, scores: Tensor) -> Tensor:
    """Cells inside the windows, bool like `scores`."""
    windows = ops.find(case.op).windows(case)
    column = torch.arange(scores.shape[1], device=scores.device) - windows.column[:, None]
    return (column >= 0) & (column < windows.visible[:, None])
