"""Every rank's composed pages against one process: which differ, how, and from each other."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from equivalence import poisons
from equivalence.checks import composereadings as readings
from equivalence.checks.composeknown import Known, Seen, bytes_of, key_of
from equivalence.checks.rows import listing
from equivalence.compose import wanted
from equivalence.compose.wanted import Kind, Piece, Step
from equivalence.tally import KEPT
from equivalence.verdict import Evidence, Finding, Stage, Status
from refimpl import batch as batches
from refimpl.bits import as_int
from refimpl.compose import planes

_SHOWN = 3
_ALL = (-1, -1)
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


@dataclass(kw_only=True)
class _Told:
    """What was found so far.

    Attributes:
        rules: findings, each counted.
        failing: slots.
        findings: the first of each rule.
        places: the rank and layer of each of them.
        current: how many current pages are wrong, by rank and layer.
    """

    rules: Counter[str] = field(default_factory=Counter)
    failing: set[int] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    current: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, rule: str, found: Callable[[], Finding], *, at: tuple[int, int] = _ALL) -> None:
        """Count a finding, and make and keep it if it is one of the first of its rule."""
        self.rules[rule] += 1
        if self.rules[rule] <= KEPT:
            self.findings.append(found())
            self.places.append(at)


def decide(held: Held) -> tuple[Stage, list[Finding]]:
    """Compare every page of every rank, layer by layer, and the ranks with each other."""
    step, kind = held.step, held.kind
    got = as_int(held.got)
    layers, cp, slots = len(kind.pools), step.batch.cp, len(step.batch.slot_pages)
    told, known = _Told(), Known(step=step, kind=kind, earlier=held.earlier, poison=held.poison)
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
    different = sum(n for rule, n in told.rules.items() if rule != "diverged")
    count = cp * layers * slots
    return Stage(
        status=_status(count, different),
        counts={"rows": count, "identical": count - different, "different": different},
        power=power,
        rules=dict(told.rules),
        failing=tuple(sorted(told.failing)),
        unit="page",
    ), [
        readings.first_staged(known, zeros.explain(known, found), wrong=told.current[at])
        for found, at in zip(told.findings, told.places, strict=True)
    ]


def _status(count: int, different: int) -> Status:
    if different:
        return Status.DIFFERENT
    return Status.EQUAL if count else Status.UNDECIDED


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
    told: _Told,
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
    for byte in differ[:_SHOWN]:
        where = _where(known, byte)
        for label, page in (("want", seen.want), ("got", seen.got)):
            value = int(page[byte])
            lines.append(Evidence(label=label, place=where, value=str(value), bits=f"{value:02X}"))
    if len(differ) > _SHOWN:
        lines.append(Evidence(label="", place=f"and {len(differ) - _SHOWN:,} more bytes"))
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
    others = [ranks for key, ranks in holders.items() if key]
    right = holders.get(b"")
    return Finding(
        stage=f"{known.kind.name}_pages",
        rule="diverged",
        row=slot,
        place=_place(known, layer, slot),
        reading=_groups(right, others, "page"),
    )


def _groups(right: list[int] | None, others: list[list[int]], what: str) -> str:
    """Which ranks hold what."""
    if right is not None:
        first, rest = f"{_ranks(right)} the reference's {what}", others
    else:
        first, rest = f"{_ranks(others[0])} one {what}", others[1:]
    told = ", ".join([first, *(f"{_ranks(ranks, verb=False)} another" for ranks in rest)])
    none = "neither" if len(others) == 2 else "none of them"  # noqa: PLR2004 - two groups
    return told if right is not None else f"{told}, {none} the reference's"


def _ranks(ranks: list[int], *, verb: bool = True) -> str:
    one = len(ranks) == 1
    name = f"rank{'' if one else 's'} {listing(ranks, most=8)}"
    return f"{name} {'holds' if one else 'hold'}" if verb else name


def locations(step: Step, got: Tensor) -> tuple[Stage, list[Finding]]:
    """Where every rank says that current tokens stand, int32 [cp, T]."""
    want = batches.row_locations(step.batch)
    size, cells = step.batch.page_size, len(step.batch.slot_pages) * step.batch.page_size
    told = _Told()
    holders: dict[bytes, list[int]] = {}
    for rank, mine in enumerate(got):
        places = (mine != want).nonzero()[:, 0]
        key = key_of(bytes_of(mine)) if len(places) else b""
        holders.setdefault(key, []).append(rank)
        if not len(places):
            continue
        told.failing |= set((want[places] // size).tolist())
        found = _of_locations(rank, want, mine, places, size=size, cells=cells)
        told.add(found.rule, partial(_same, found))
    different = sum(told.rules.values())
    if len(holders) > 1:
        right, others = holders.get(b""), [ranks for key, ranks in holders.items() if key]
        reading = _groups(right, others, "table of locations")
        found = Finding(stage="row_locations", rule="diverged", reading=reading)
        told.add("diverged", partial(_same, found))
    count = len(got)
    return Stage(
        status=_status(count, different),
        counts={"rows": count, "identical": count - different, "different": different},
        power=bool(len(want)),
        rules=dict(told.rules),
        failing=tuple(sorted(told.failing)),
    ), told.findings


def _same(found: Finding) -> Finding:
    return found


def _of_locations(
    rank: int, want: Tensor, got: Tensor, places: Tensor, *, size: int, cells: int
) -> Finding:
    """The wrong locations of one rank."""
    one, two = want[places].long(), got[places].long()
    moved = two - one
    lines = []
    for i in range(min(_SHOWN, len(places))):
        for label, side in (("want", one), ("got", two)):
            at = int(side[i])
            note = f"slot {at // size} token {at % size}" if 0 <= at < cells else "nowhere"
            lines.append(
                Evidence(label=label, place=f"token {int(places[i])}", value=str(at), note=note)
            )
    if len(places) > _SHOWN:
        lines.append(Evidence(label="", place=f"and {len(places) - _SHOWN:,} more"))
    outside, other = (two < 0) | (two >= cells), bool((one // size != two // size).any())
    reading = ""
    if bool((two == poisons.INDEX[0]).all()):
        rule = "unwritten"
    elif bool(outside.any()):
        rule = "out-of-window"
    else:
        rule = "page-mismatch" if other else "bits"
    if rule != "unwritten" and bool((moved == moved[0]).all()):
        pages, rest = divmod(int(moved[0]), size)
        by = f"{pages:+,} pages" if not rest else f"{int(moved[0]):+,}"
        reading = f"every wrong one is off by {by.replace('1 pages', '1 page')}"
    return Finding(
        stage="row_locations",
        rule=rule,
        place=f"rank {rank}   {len(places):,} of {len(want):,} locations",
        evidence=tuple(lines),
        reading=reading,
    )
