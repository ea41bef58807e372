"""Picks against the legal set of their row."""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from equivalence.checks import readings
from equivalence.checks.rows import (
    REORDERED,
    TIED,
    UNDECIDED,
    Decided,
    code,
    listing,
    name,
    score_line,
    set_first,
)
from equivalence.contract import Contract
from equivalence.selection import (
    Picks,
    Selection,
    census,
    column_of,
    has_power,
    nan_finding,
    place_of,
    reads_scores,
)
from equivalence.verdict import Evidence, Finding
from refimpl import bits, topk

_SHOWN = 4
_LOWEST, _HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def decide(selection: Selection, picks: Picks) -> Decided:
    """Name every row identical, reordered, tied, or the first rule it breaks."""
    codes = name_rows(selection, picks)
    codes[selection.nan] = UNDECIDED
    return Decided(
        codes=codes,
        counts=census(selection),
        power=has_power(selection),
        explain=partial(_explain, selection, picks, codes),
    )


def name_rows(selection: Selection, picks: Picks) -> Tensor:
    """The class or rule of every row by its legal set, int8 [B]."""
    want = picks.written(selection.want)
    codes = torch.zeros(len(want), dtype=torch.int8, device=want.device)
    if not torch.equal(picks.values, want):
        differ = (picks.values != want).any(1).nonzero()[:, 0]
        codes[differ] = _name_others(selection.take(differ), picks.take(differ))
    return codes


def _name_others(selection: Selection, picks: Picks) -> Tensor:
    """The class or rule of rows that are not the reference's own, int8 [B]."""
    got, contract = picks.values, selection.contract
    relative, pad = picks.relative(), got == picks.pad
    valid = ~pad
    visible = selection.visible[:, None]
    inside = (relative >= 0) & (relative < visible)
    slot = torch.arange(got.shape[1], device=got.device)
    need = (selection.want != topk.PAD).sum(1)
    holes = contract.holes == "allow"
    prefix = selection.visible.clamp(max=selection.k) if holes else need
    count = valid.sum(1)

    codes = torch.full_like(need, REORDERED, dtype=torch.int8)
    open_rows = torch.ones_like(need, dtype=torch.bool)
    if picks.poison is not None:
        poisoned = (got == picks.poison) & ~inside & valid
        set_first(codes, open_rows, poisoned.any(1), code("unwritten"))
    surplus = (valid & (slot >= prefix[:, None])).any(1) | (count > need)
    set_first(codes, open_rows, surplus, code("pad"))
    set_first(codes, open_rows, count < need, code("hole"))
    set_first(codes, open_rows, (valid & ~inside).any(1), code("out-of-window"))
    usable = valid & inside
    unique, same = _compare_sets(selection, relative, usable)
    set_first(codes, open_rows, ~unique, code("duplicate"))

    ranked = reads_scores(selection.visible, k=selection.k, contract=contract)
    set_first(codes, open_rows, ~ranked, code("order"))
    # The reference's own set is right whatever it scores, unless its order counts.
    scored = open_rows & ~same if contract.order == "any" else open_rows
    at = scored.nonzero()[:, 0]
    if len(at):
        codes[at] = _name_choices(selection.take(at), relative[at], usable[at], same[at])
    return codes


def _name_choices(selection: Selection, relative: Tensor, usable: Tensor, same: Tensor) -> Tensor:
    """The class or rule of rows whose structure is right, by their scores, int8 [B]."""
    contract = selection.contract
    keys = selection.keys(relative).long()
    wanted = selection.want != topk.PAD
    want_keys = selection.keys(selection.want.long()).long()
    cutoff = want_keys.masked_fill(~wanted, _HIGHEST).amin(1, keepdim=True)
    must = (wanted & (want_keys > cutoff)).sum(1)
    lost = (usable & (keys < cutoff)).any(1) | ((usable & (keys > cutoff)).sum(1) < must)
    codes = torch.full_like(must, REORDERED, dtype=torch.int8)
    open_rows = torch.ones_like(same)
    set_first(codes, open_rows, lost, code("lost-winner"))
    if contract.ties != "any":
        set_first(codes, open_rows, ~same, code("wrong-tie"))
    set_first(codes, open_rows, _out_of_order(contract, relative, keys, usable), code("order"))
    set_first(codes, open_rows, ~same, TIED)
    return codes


def _compare_sets(selection: Selection, relative: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that pick no column twice, and rows that pick every column the reference picks.

    Each slot writes its number at its column: where another slot's number is read back, the
    column was taken twice, and where -1 still stands at a column of the reference, it was not
    taken at all. Only touched cells are read, so the memory is not cleared.
    """
    rows, spare = len(relative), int(selection.visible.max())
    cells = torch.empty((rows, spare + 1), dtype=torch.int32, device=relative.device)
    want = selection.want.long()
    want = torch.where(want == topk.PAD, spare, want)
    got = torch.where(usable, relative, spare)
    slot = torch.arange(relative.shape[1], dtype=torch.int32, device=relative.device)
    cells.scatter_(1, want, topk.PAD)
    cells.scatter_(1, got, slot.expand_as(got))
    unique = ((cells.gather(1, got) == slot) | ~usable).all(1)
    same = ((cells.gather(1, want) != topk.PAD) | (want == spare)).all(1)
    return unique, same


def _out_of_order(contract: Contract, relative: Tensor, keys: Tensor, usable: Tensor) -> Tensor:
    """Rows whose picks do not stand as `order` says, bool [B]."""
    if contract.order == "any":
        return torch.zeros_like(usable[:, 0])
    rank = -keys if contract.order == "score" else relative
    before = rank.masked_fill(~usable, _LOWEST).cummax(1).values[:, :-1]
    return (usable[:, 1:] & (rank[:, 1:] < before)).any(1)


def _explain(selection: Selection, picks: Picks, codes: Tensor, i: int) -> Finding:
    """The finding of row i, from the legal set that decided it."""
    if int(codes[i]) == UNDECIDED:
        return nan_finding(selection, i, stage=picks.stage)
    rule = name(int(codes[i]))
    row, place = int(selection.ids[i]), place_of(selection, i)
    one = torch.tensor([i], device=codes.device)
    selection, picks = selection.take(one), picks.take(one)
    if rule in ("lost-winner", "wrong-tie"):
        evidence, reading = _explain_set(selection, picks)
    elif rule == "order":
        evidence, reading = _explain_order(selection, picks)
    else:
        evidence, reading = _explain_slots(selection, picks, rule)
    return Finding(
        stage=picks.stage, rule=rule, row=row, place=place, evidence=evidence, reading=reading
    )


def _explain_set(selection: Selection, picks: Picks) -> tuple[tuple[Evidence, ...], str]:
    """Cutoff, what is missing and what stands in its place."""
    window, legal = selection.window(0), selection.legal(0)
    assert legal.cutoff is not None  # noqa: S101 - a row that lost a pick owes one
    got = torch.zeros_like(legal.must)
    chosen = picks.relative()[0][picks.values[0] != picks.pad]
    got[chosen] = True
    ties = legal.ties.nonzero()[:, 0].tolist()
    keys = bits.order_key(
        window, zero_sign=selection.contract.zero_sign, nan=selection.contract.nan
    )
    want = torch.zeros_like(got)
    want[selection.want[0][selection.want[0] != topk.PAD].long()] = True
    below = got & (keys < legal.cutoff)
    missing = legal.must & ~got
    if not bool(missing.any()):
        missing = (legal.ties if bool(below.any()) else want) & ~got
    extra = below if bool(below.any()) else got & legal.ties & ~want
    lines = [
        score_line(
            "cutoff",
            f"rank {legal.need - 1}",
            window[ties[0]],
            f"shared by columns {listing(ties, most=5)}" if len(ties) > 1 else f"column {ties[0]}",
        )
    ]
    for label, which in (("missing", missing), ("extra", extra)):
        columns = which.nonzero()[:, 0]
        ranked = columns[keys[columns].sort(descending=label == "missing", stable=True).indices]
        for column in ranked[:_SHOWN].tolist():
            gap = int(keys[column]) - legal.cutoff
            lines.append(
                score_line(label, column_of(selection, 0, column), window[column], _gap(gap))
            )
        if len(ranked) > _SHOWN:
            lines.append(Evidence(label=label, place=f"and {len(ranked) - _SHOWN:,} more"))
    lost = legal.must & ~got
    swapped = window[missing | extra]
    signs = set(bits.as_int(swapped).tolist())
    zeros = bool((swapped == 0).all()) and len(signs) > 1
    reading = readings.of_set(
        missing=int(lost.sum()),
        below=int(below.sum()),
        surplus_ties=int((got & legal.ties).sum()) - legal.free,
        need=legal.need,
        signed_zeros=zeros,
    )
    return tuple(lines), reading


def _gap(ulp: int) -> str:
    if ulp == 0:
        return "at the cutoff"
    return f"{ulp:+,} ulp {'above' if ulp > 0 else 'below'} the cutoff"


def _explain_order(selection: Selection, picks: Picks) -> tuple[tuple[Evidence, ...], str]:
    """The first two picks that stand the wrong way round."""
    relative = picks.relative()
    want = picks.written(selection.want)
    slots = (picks.values[0] != picks.pad).nonzero()[:, 0].tolist()
    if bool(reads_scores(selection.visible, k=selection.k, contract=selection.contract)[0]):
        rank = relative[0]
        if selection.contract.order == "score":
            rank = -selection.keys(relative)[0].long()
        wrong = list(next((a, b) for a, b in pairwise(slots) if rank[b] < rank[a]))
        reading = f"the picks are right, order={selection.contract.order} is not kept"
    else:
        first = int((picks.values[0] != want[0]).nonzero()[0, 0])
        wrong = [first]
        reading = "a row of at most k columns is 0, 1, 2, ... and reads no scores"
    window = selection.window(0)
    lines = []
    for slot in wrong:
        column = int(relative[0, slot])
        lines.append(score_line(f"slot {slot}", column_of(selection, 0, column), window[column]))
    return tuple(lines), reading


def _explain_slots(
    selection: Selection, picks: Picks, rule: str
) -> tuple[tuple[Evidence, ...], str]:
    """The slots that break a rule of structure."""
    got, relative = picks.values[0], picks.relative()[0]
    visible = int(selection.visible[0])
    valid = got != picks.pad
    inside = (relative >= 0) & (relative < visible)
    need = int((selection.want[0] != topk.PAD).sum())
    slot = torch.arange(len(got), device=got.device)
    bad = {
        "unwritten": (got == picks.poison) & ~inside if picks.poison is not None else ~valid,
        "pad": valid & (slot >= need),
        "hole": ~valid & (slot < need),
        "out-of-window": valid & ~inside,
        "duplicate": _repeats(relative, valid & inside),
    }[rule]
    slots = bad.nonzero()[:, 0].tolist()
    notes = {
        "unwritten": "the buffer's poison",
        "pad": f"the row owes {need} picks, then pads ({picks.pad})",
        "hole": f"a pad among the first {need} slots",
        "out-of-window": f"the window has {visible} columns",
        "duplicate": "already picked",
    }
    lines = [
        Evidence(label="slot", place=str(s), value=f"holds {int(got[s])}", note=notes[rule])
        for s in slots[:_SHOWN]
    ]
    if len(slots) > _SHOWN:
        lines.append(Evidence(label="slot", place=f"and {len(slots) - _SHOWN:,} more"))
    return tuple(lines), readings.of_slots(
        rule,
        row=int(selection.ids[0]),
        start=int(selection.start[0]),
        picks=relative[valid],
        want=selection.want[0][selection.want[0] != topk.PAD].long(),
        scores=selection.scores[int(selection.at[0])],
        column=int(selection.column[0]),
        visible=visible,
        k=selection.k,
    )


def _repeats(relative: Tensor, usable: Tensor) -> Tensor:
    """Slots whose column stands in an earlier slot."""
    seen: set[int] = set()
    out = torch.zeros_like(usable)
    for slot in usable.nonzero()[:, 0].tolist():
        column = int(relative[slot])
        out[slot] = column in seen
        seen.add(column)
    return out
