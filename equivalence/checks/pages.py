"""Physical slots: of the picks beside them slot by slot, or of some legal set of their row."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from equivalence.checks.rows import (
    IDENTICAL,
    REORDERED,
    TIED,
    UNDECIDED,
    Decided,
    code,
    failing,
    name,
    set_first,
)
from equivalence.selection import Selection, census, has_power, nan_finding, nan_order, reads_scores
from equivalence.verdict import Evidence, Finding
from refimpl import bits, topk

_SHOWN = 4
SlotsOf = Callable[[Tensor, Tensor], Tensor]
"""(rows int64 [b] of the block, relative columns int64 [b, n]) -> slots int64 [b, n]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pages:
    """Slots a kernel wrote for a block of rows.

    Attributes:
        values: int32 [B, slots].
        slots_of: the map from window-relative columns to slots.
        reserved: slots 0 .. reserved-1 hold no key.
        ids: int64 [B], the rows' numbers in the call.
        pad: the value of an unused slot.
        poison: what the buffer held before the launch, where known.
        stage: the output's name.
    """

    values: Tensor
    slots_of: SlotsOf
    reserved: int
    ids: Tensor
    pad: int = topk.PAD
    poison: int | None = None
    stage: str = "page_indices"

    def of(self, relative: Tensor, valid: Tensor) -> Tensor:
        """Slots of columns [B, n]; pads where not valid."""
        every = torch.arange(len(relative), device=relative.device)
        return torch.where(valid, self.slots_of(every, relative.where(valid, 0)), self.pad)


def decide_joint(pages: Pages, want: Tensor, visible: Tensor, classes: Tensor) -> Decided:
    """Slots beside the picks of the same launch chain, slot by slot.

    Args:
        pages: the slots.
        want: int64 [B, slots] the columns they should stand for, pads -1.
        visible: int64 [B]; a column outside the window has no slot and is not compared, unless
            the slot was not even written.
        classes: int8 [B] what the picks were decided to be; a row of right slots takes their
            class, or identical where the picks themselves fail or are undecided.
    """
    got = pages.values.long()
    known = (want >= 0) & (want < visible[:, None])
    valid = want != topk.PAD
    written = torch.ones_like(valid) if pages.poison is None else got != pages.poison
    slots = torch.where(valid & ~known & written, got, pages.of(want, known))
    unsaid = failing(classes) | (classes == UNDECIDED)
    codes = torch.where(unsaid, IDENTICAL, classes)
    open_rows = torch.ones_like(codes, dtype=torch.bool)
    bad = got != slots
    set_first(codes, open_rows, (bad & ~written).any(1), code("unwritten"))
    set_first(codes, open_rows, (bad & ~valid).any(1), code("pad"))
    set_first(codes, open_rows, (bad & (got == pages.pad)).any(1), code("hole"))
    set_first(codes, open_rows, bad.any(1), code("page-mismatch"))
    zero = known & (got < pages.reserved)
    set_first(codes, open_rows, zero.any(1), code("page-zero"))
    return Decided(
        codes=codes,
        counts={},
        power=bool(valid.any()),
        explain=partial(_explain_joint, pages, want, slots, codes),
    )


def _explain_joint(pages: Pages, want: Tensor, slots: Tensor, codes: Tensor, i: int) -> Finding:
    rule = name(int(codes[i]))
    got = pages.values[i].long()
    valid = want[i] != topk.PAD
    bad = valid & (got < pages.reserved) if rule == "page-zero" else got != slots[i]
    at = bad.nonzero()[:, 0].tolist()
    lines = [
        Evidence(
            label="slot",
            place=f"{s}   column {int(want[i, s])}" if bool(valid[s]) else f"{s}   a pad",
            value=f"want {int(slots[i, s])}   got {int(got[s])}",
            note=f"{int(got[s] - slots[i, s]):+,}" if rule == "page-mismatch" else "",
        )
        for s in at[:_SHOWN]
    ]
    if len(at) > _SHOWN:
        lines.append(Evidence(label="slot", place=f"and {len(at) - _SHOWN:,} more"))
    shift = set((got - slots[i])[at].tolist())
    reading = ""
    if rule == "page-zero":
        reading = f"slots 0-{pages.reserved - 1} are reserved and hold no key"
    elif rule == "page-mismatch" and sorted(got.tolist()) == sorted(slots[i].tolist()):
        reading = "the same slots in another order than the picks beside them"
    elif rule == "page-mismatch" and len(shift) == 1 and len(at) > 1:
        reading = f"every wrong slot is off by {shift.pop():+,}"
    return Finding(
        stage=pages.stage,
        rule=rule,
        row=int(pages.ids[i]),
        place=f"{len(at):,} of {len(got):,} slots",
        evidence=tuple(lines),
        reading=reading,
    )


def decide_alone(pages: Pages, selection: Selection) -> Decided:
    """Slots of a launch of its own: the image of some legal set of the row, as a multiset."""
    got = pages.values.long()
    want = pages.of(selection.want.long(), selection.want != topk.PAD)
    want = functional.pad(want, (0, got.shape[1] - want.shape[1]), value=pages.pad)
    codes = torch.zeros(len(got), dtype=torch.int8, device=got.device)
    differ = (got != want).any(1)
    if selection.contract.order == "any":
        # The reference's own slots in another order need no look at the row's columns.
        ranked = reads_scores(selection.visible, k=selection.k, contract=selection.contract)
        at = (differ & ranked & ~_holed(pages, want)).nonzero()[:, 0]
        same = (got[at].sort(1).values == want[at].sort(1).values).all(1)
        codes[at[same]] = REORDERED
        differ[at[same]] = False
    for i in differ.nonzero()[:, 0].tolist():
        codes[i] = _name_row(pages, selection, i)
    zero = (got < pages.reserved) & (got != pages.pad) & ~failing(codes)[:, None]
    codes[zero.any(1)] = code("page-zero")
    codes[selection.nan] = UNDECIDED
    return Decided(
        codes=codes,
        counts=census(selection),
        power=has_power(selection),
        explain=partial(_explain_alone, pages, selection, codes),
    )


def _holed(pages: Pages, want: Tensor) -> Tensor:
    """Rows with a pad where the reference has a slot, or the other way round, bool [B]."""
    return ((pages.values == pages.pad) != (want == pages.pad)).any(1)


def _image(pages: Pages, selection: Selection, i: int) -> list[int]:
    """The slot of every column of row i's window, and of column 0 where an empty row picks it."""
    count = max(int(selection.visible[i]), int(selection.want[i].max()) + 1)
    columns = torch.arange(count, device=selection.visible.device)
    row = torch.tensor([i], device=columns.device)
    return [int(slot) for slot in pages.slots_of(row, columns[None])[0]]


def _name_row(pages: Pages, selection: Selection, i: int) -> int:
    """The class or rule of one row of slots."""
    image = _image(pages, selection, i)
    columns: dict[int, list[int]] = defaultdict(list)
    for column, slot in enumerate(image):
        columns[slot].append(column)
    got = [(at, slot) for at, slot in enumerate(pages.values[i].tolist()) if slot != pages.pad]
    slots = [slot for _, slot in got]
    rule = _broken_structure(pages, selection, i, got, columns)
    if not rule:
        rule = _broken_choice(selection, i, Counter(slots), image)
    if not rule and not _in_order(selection, i, slots, columns):
        rule = "order"
    if rule:
        return code(rule)
    return REORDERED if Counter(slots) == Counter(_wanted(selection, i, image)) else TIED


def _wanted(selection: Selection, i: int, image: list[int]) -> list[int]:
    """The slots of the reference's picks of row i."""
    return [image[column] for column in selection.want[i].tolist() if column != topk.PAD]


def _broken_structure(
    pages: Pages,
    selection: Selection,
    i: int,
    got: list[tuple[int, int]],
    columns: Mapping[int, list[int]],
) -> str:
    """The first rule of structure a row of slots breaks, or ""."""
    need = int((selection.want[i] != topk.PAD).sum())
    prefix = need
    if selection.contract.holes == "allow":
        prefix = min(selection.k, int(selection.visible[i]))
    count = Counter(slot for _, slot in got)
    broken = {
        "unwritten": pages.poison in count and pages.poison not in columns,
        "pad": len(got) > need or any(at >= prefix for at, _ in got),
        "hole": len(got) < need,
        "out-of-window": any(slot not in columns for slot in count),
        "duplicate": any(many > len(columns.get(slot, ())) for slot, many in count.items()),
    }
    return next((rule for rule, holds in broken.items() if holds), "")


def _broken_choice(selection: Selection, i: int, count: Counter[int], image: list[int]) -> str:
    """The rule by which the slots are not those of a legal set, or ""."""
    contract = selection.contract
    wanted = Counter(_wanted(selection, i, image))
    if contract.short_rows == "identity" and int(selection.visible[i]) <= selection.k:
        return "order"
    legal = selection.legal(i)
    must = Counter(image[c] for c in legal.must.nonzero()[:, 0].tolist())
    ties = Counter(image[c] for c in legal.ties.nonzero()[:, 0].tolist())
    if must - count or (count - must) - ties:
        return "lost-winner"
    return "wrong-tie" if contract.ties != "any" and count != wanted else ""


def _in_order(
    selection: Selection, i: int, values: list[int], columns: Mapping[int, list[int]]
) -> bool:
    """Whether some choice of columns behind the slots stands as `order` says."""
    order = selection.contract.order
    if order == "any":
        return True
    if order == "ascending":
        return _ascends(selection, i, values, columns)
    keys = bits.order_key(
        selection.window(i),
        zero_sign=selection.contract.zero_sign,
        nan=nan_order(selection.contract),
    ).tolist()
    left = {slot: sorted(columns[slot], key=keys.__getitem__) for slot in set(values)}
    ranks = [keys[left[value].pop()] for value in values]
    return all(a >= b for a, b in pairwise(ranks))


def _ascends(
    selection: Selection, i: int, values: list[int], columns: Mapping[int, list[int]]
) -> bool:
    """Whether some legal set, by ascending column, has exactly these slots.

    A winner stands in the next place, a tied column stands there or is left out:
    `reached` holds how many places may be filled.
    """
    legal = selection.legal(i)
    want = selection.want[i]
    must, may = legal.must, legal.must | legal.ties
    if selection.contract.ties != "any":
        must = torch.zeros_like(may)
        must[want[want != topk.PAD].long()] = True
        may = must
    slot_of = {column: slot for slot, each in columns.items() for column in each}
    places: dict[int, list[int]] = defaultdict(list)
    for place, slot in enumerate(values):
        places[slot].append(place)
    reached, certain = {0}, must.tolist()
    for column in may.nonzero()[:, 0].tolist():
        further = {at + 1 for at in places[slot_of[column]] if at in reached}
        reached = further if certain[column] else reached | further
    return len(values) in reached


def _explain_alone(pages: Pages, selection: Selection, codes: Tensor, i: int) -> Finding:
    if int(codes[i]) == UNDECIDED:
        return nan_finding(selection, i, stage=pages.stage)
    rule = name(int(codes[i]))
    got = pages.values[i].tolist()
    image = _image(pages, selection, i)
    want = _wanted(selection, i, image)
    missing = list((Counter(want) - Counter(got)).elements())
    extra = list((Counter(v for v in got if v != pages.pad) - Counter(want)).elements())
    column_of = {slot: column for column, slot in enumerate(image)}
    lines = []
    for label, slots in (("missing", missing), ("extra", extra)):
        for slot in slots[:_SHOWN]:
            where = f"column {column_of[slot]}" if slot in column_of else "no column of the row"
            lines.append(Evidence(label=label, place=f"slot {slot}", note=where))
        if len(slots) > _SHOWN:
            lines.append(Evidence(label=label, place=f"and {len(slots) - _SHOWN:,} more"))
    start, visible = int(selection.start[i]), int(selection.visible[i])
    return Finding(
        stage=pages.stage,
        rule=rule,
        row=int(pages.ids[i]),
        place=f"columns {start}-{start + visible}   k {selection.k}",
        evidence=tuple(lines),
        reading=f"slots 0-{pages.reserved - 1} are reserved" if rule == "page-zero" else "",
    )
