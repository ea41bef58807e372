"""Every rank's composed pages against one process: which differ, how, and from each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from equivalence.checks.composed import readings, wanted
from equivalence.checks.composed.known import Known, Seen, bytes_of, key_of
from equivalence.checks.composed.told import SHOWN, Told, groups
from equivalence.checks.composed.wanted import Kind, Piece, Step
from equivalence.verdict import Evidence, Finding, Stage
from refimpl import batch as batches
from refimpl.bits import as_int
from refimpl.compose import planes

_PLANES = {"token": ("",), "index": ("key ", "scale ")}


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """What all ranks hold of one kind.

    Attributes:
        step: what they composed.
        kind: which.
        got: one byte a value [cp, layers, S, page_bytes].
        earlier: the steps before on the same ranks, the latest last.
        poison: what the buffers held before, where known.
    """

    step: Step
    kind: Kind
    got: Tensor
    earlier: Sequence[Step] = ()
    poison: int | None = None


def decide(held: Held) -> tuple[Stage, list[Finding]]:
    """Compare every page of every rank, layer by layer, and the ranks with each other."""
    step, kind = held.step, held.kind
    got = as_int(held.got)
    layers, cp, slots = len(kind.pools), step.batch.cp, len(step.batch.slot_pages)
    told, known = Told(), Known(step=step, kind=kind, earlier=held.earlier, poison=held.poison)
    power, zeros = False, readings.Zeros()
    movable = wanted.remote(step.batch)
    for layer in range(layers):
        for piece in wanted.layer(step, kind, layer):
            power = power or (movable and bool(piece.want.any()))
            wrong = {
                rank: frozenset(rows)
                for rank in range(cp)
                if len(rows := _differing(got[rank, layer, piece.slots], piece.want))
            }
            for rank, some in wrong.items():
                slots_now = {piece.slots.start + row for row in some} & known.current_set
                told.current[rank, layer] += len(slots_now)
            if wrong:
                spoilt = frozenset.intersection(*(wrong.get(r, frozenset()) for r in range(cp)))
                zeros.right(known, set(range(len(piece.want))) - spoilt, piece)
                _tell(told, known, got[:, layer], piece, layer=layer, wrong=wrong, zeros=zeros)
    return told.stage(cp * layers * slots, power=power, unit="page"), [
        readings.first_staged(known, zeros.explain(known, found), wrong=told.current[at])
        for found, at in zip(told.findings, told.places, strict=True)
    ]


def _differing(got: Tensor, want: Tensor) -> list[int]:
    """Rows that differ, ascending; equal memory is told from other at the speed of a read."""
    one, two = (_wide(each) for each in (got, want))
    if one.dtype == two.dtype and torch.equal(one, two):
        return []
    rows: list[int] = (got != want).any(1).nonzero()[:, 0].tolist()
    return rows


def _wide(pages: Tensor) -> Tensor:
    """Eight bytes at once, where memory allows it."""
    width, whole = pages.shape[1], pages.is_contiguous()
    fits = whole and not width % 8 and not pages.storage_offset() % 8
    return pages.view(torch.int64) if fits and len(pages) else pages


def _tell(
    told: Told,
    known: Known,
    got: Tensor,
    piece: Piece,
    *,
    layer: int,
    wrong: Mapping[int, frozenset[int]],
    zeros: readings.Zeros,
) -> None:
    """The findings of some slots of a layer, slot by slot and rank by rank."""
    step = known.step
    for row in sorted({row for rows in wrong.values() for row in rows}):
        slot = piece.slots.start + row
        want = bytes_of(piece.want[row])
        holders: dict[bytes, list[int]] = {}
        told.failing.add(slot)
        for rank in range(step.batch.cp):
            if row not in wrong.get(rank, ()):
                holders.setdefault(b"", []).append(rank)
                continue
            page = bytes_of(got[rank, slot])
            key = key_of(page)
            holders.setdefault(key, []).append(rank)
            seen = Seen(layer=layer, slot=slot, want=want, got=page)
            rule, reading = readings.of_page(known, seen, key)
            if rule == "page-zero":
                zeros.wrong(known, slot)
            found = partial(_finding, known, seen, rank, rule, reading)
            told.add(rule, found, at=(rank, layer))
        if len(holders) > 1:
            told.add("diverged", partial(_diverged, known, layer, slot, holders))


def _finding(known: Known, seen: Seen, rank: int, rule: str, reading: str) -> Finding:
    """One page of one rank."""
    differ = (seen.want != seen.got).nonzero()[0].tolist()
    lines = []
    for byte in differ[:SHOWN]:
        where = _where(known, byte)
        for label, page in (("want", seen.want), ("got", seen.got)):
            value = int(page[byte])
            lines.append(Evidence(label=label, place=where, value=str(value), bits=f"{value:02X}"))
    if len(differ) > SHOWN:
        lines.append(Evidence(label="", place=f"and {len(differ) - SHOWN:,} more bytes"))
    place = f"rank {rank} {_place(known, seen.layer, seen.slot)}"
    return Finding(
        stage=f"{known.kind.name}_pages",
        rule=rule,
        row=seen.slot,
        place=f"{place}   {len(differ):,} of {len(seen.want):,} bytes",
        evidence=tuple(lines),
        reading=reading,
    )


def _place(known: Known, layer: int, slot: int) -> str:
    """Where a page belongs: its layer, kind, slot, logical page, owner and writer."""
    page = known.page(slot)
    if page <= batches.NOTHING:
        return f"layer {layer} {known.kind.name} slot {slot} padding"
    owner, writer = int(known.step.batch.owner[page]), known.writers.get(slot)
    by = "" if writer is None else f" writer {writer}"
    return f"layer {layer} {known.kind.name} slot {slot} page {page} owner {owner}{by}"


def _where(known: Known, byte: int) -> str:
    """A byte of a page, with its token and what part of that it is."""
    size, first = known.step.batch.page_size, 0
    widths = planes(known.kind.name, known.kind.rows.shape[-1])
    for name, width in zip(_PLANES[known.kind.name], widths, strict=True):
        if byte < (first + width) * size:
            token, at = divmod(byte - first * size, width)
            return f"byte {byte} (token {token} {name}byte {at})"
        first += width
    return f"byte {byte}"


def _diverged(known: Known, layer: int, slot: int, holders: Mapping[bytes, list[int]]) -> Finding:
    """Ranks that do not hold the same bytes: as bad as a wrong byte, and another fault."""
    return Finding(
        stage=f"{known.kind.name}_pages",
        rule="diverged",
        row=slot,
        place=_place(known, layer, slot),
        reading=groups(holders, "page"),
    )
