"""Why a row of picks is not legal: the columns, scores and slots that a finding shows."""

from itertools import pairwise

import torch
from torch import Tensor

from equivalence.checks import bounds, readings
from equivalence.checks.rows import UNDECIDED, name, score_line
from equivalence.selection import (
    Picks,
    Selection,
    column_of,
    nan_finding,
    nan_order,
    place_of,
    reads_scores,
)
from equivalence.verdict import Evidence, Finding
from equivalence.wording import listing
from refimpl import bits, topk

_SHOWN = 4


def explain(selection: Selection, picks: Picks, codes: Tensor, i: int) -> Finding:
    """The finding of row i, from the legal set that decided it."""
    if int(codes[i]) == UNDECIDED:
        return nan_finding(selection, i, stage=picks.stage)
    rule = name(int(codes[i]))
    row, place = int(selection.ids[i]), place_of(selection, i)
    one = torch.tensor([i], device=codes.device)
    selection, picks = selection.take(one), picks.take(one)
    if rule == "lost-winner" and selection.ranges is not None:
        columns = picks.relative() + selection.column[:, None]
        ranges = selection.ranges.take(selection.at)
        evidence, reading = bounds.explain_set(ranges, columns, picks.values != picks.pad)
    elif rule in ("lost-winner", "wrong-tie"):
        evidence, reading = _explain_set(selection, picks)
    elif rule == "order":
        evidence, reading = _explain_order(selection, picks)
    elif rule == "mask-extra":
        evidence, reading = _explain_outside(selection, picks)
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
        window, zero_sign=selection.contract.zero_sign, nan=nan_order(selection.contract)
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


def _explain_outside(selection: Selection, picks: Picks) -> tuple[tuple[Evidence, ...], str]:
    """The picks that the mask does not admit."""
    relative = picks.relative()
    outside = (picks.values != picks.pad) & ~selection.admits(relative)
    slots = outside[0].nonzero()[:, 0].tolist()
    lines = [
        Evidence(
            label="slot",
            place=str(slot),
            value=column_of(selection, 0, int(relative[0, slot])),
            note="outside the mask",
        )
        for slot in slots[:_SHOWN]
    ]
    if len(slots) > _SHOWN:
        lines.append(Evidence(label="slot", place=f"and {len(slots) - _SHOWN:,} more"))
    every = len(slots) == int((picks.values != picks.pad).sum())
    reading = "every pick is outside the mask: its polarity may be inverse"
    return tuple(lines), reading if every else ""


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
