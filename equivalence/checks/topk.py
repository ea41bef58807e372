"""Picks against the legal set of their row."""

from functools import partial

import torch
from torch import Tensor

from equivalence.checks import bounds, pickevidence
from equivalence.checks.rows import (
    REORDERED,
    TIED,
    UNDECIDED,
    Decided,
    code,
    set_first,
)
from equivalence.contract import Contract
from equivalence.selection import (
    Picks,
    Selection,
    census,
    has_power,
    reads_scores,
)
from refimpl import topk

_SHOWN = 4
_LOWEST, _HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def decide(selection: Selection, picks: Picks) -> Decided:
    """Name every row identical, reordered, tied, or the first rule it breaks."""
    codes = name_rows(selection, picks)
    codes[selection.nan] = UNDECIDED
    counts, power = census(selection), has_power(selection)
    if selection.ranges is not None:
        need = (selection.want != topk.PAD).sum(1)
        more, sure = bounds.census(selection.ranges.take(selection.at), need)
        counts |= {f"{kind}_columns": more[kind] for kind in ("forced", "excluded", "open")}
        counts["too_open"], power = more["too-open"], power and sure
    return Decided(
        codes=codes,
        counts=counts,
        power=power,
        explain=partial(pickevidence.explain, selection, picks, codes),
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
    if selection.admitted is not None:
        outside = usable & ~selection.admits(relative)
        set_first(codes, open_rows, outside.any(1), code("mask-extra"))
    # The reference's own set is right whatever it scores, unless its order counts.
    scored = open_rows & ~same if contract.order == "any" else open_rows
    at = scored.nonzero()[:, 0]
    if len(at):
        codes[at] = _name_choices(selection.take(at), relative[at], usable[at], same[at])
    return codes


def _name_choices(selection: Selection, relative: Tensor, usable: Tensor, same: Tensor) -> Tensor:
    """The class or rule of rows whose structure is right, by their scores, int8 [B]."""
    contract = selection.contract
    if selection.ranges is not None:
        ranges, columns = selection.ranges.take(selection.at), relative + selection.column[:, None]
        return bounds.name_choices(ranges, columns, usable, same, order=contract.order)
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
