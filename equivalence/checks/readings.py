"""Readings: one sentence naming the likely cause, given only where the evidence shows it."""

import torch
from torch import Tensor

from refimpl import topk


def of_set(*, missing: int, below: int, surplus_ties: int, need: int, signed_zeros: bool) -> str:
    """What a row with the wrong picks looks like.

    Args:
        missing: columns above the cutoff that were not picked.
        below: columns below the cutoff that were.
        surplus_ties: tied columns picked beyond the free places.
        need: picks the row owes.
        signed_zeros: whether a +0 was lost to a -0.
    """
    if signed_zeros:
        return "a +0 was lost to a -0, which ranks below it under zero_sign=distinct"
    if missing and below:
        return f"{missing:,} of {need:,} picks lost to lower scores"
    if missing:
        many = "a tied column more than there is room for was kept and a strictly greater one lost"
        more = f"{surplus_ties} tied columns more than there is room for were kept"
        return many if surplus_ties == 1 else f"{more} and {missing} strictly greater ones lost"
    if below:
        picks = "1 pick" if below == 1 else f"{below:,} picks"
        return f"{picks} below the cutoff in place of columns at it"
    return "the picks at the cutoff are not the ones the contract names"


def of_slots(
    rule: str,
    *,
    row: int,
    start: int,
    picks: Tensor,
    scores: Tensor,
    column: int,
    visible: int,
    k: int,
) -> str:
    """What a row that breaks a rule of structure looks like.

    Args:
        rule: the rule.
        row: its number.
        start: the window's first column of the concatenated K.
        picks: int64 [n] picked columns relative to the window.
        scores: [W] the row's whole buffer.
        column: where the window's first score stands in it.
        visible: scores in the window.
        k: picks a row may hold.
    """
    if rule == "out-of-window":
        if column == start > 0 and _ranks_from_zero(picks, scores, start, visible, k):
            return f"row {row} ranks from column 0, not from its start {start}"
        moved = picks - start
        if start > 0 and bool(((moved >= 0) & (moved < visible)).all()):
            return f"these are columns of the whole K: the row's start {start} was not subtracted"
        if bool((picks >= visible).all()):
            return "every pick lies past the window: fits another base for the indices"
    if rule == "duplicate" and bool((picks == picks[0]).all()):
        return f"the whole row is column {int(picks[0])}"
    return ""


def _ranks_from_zero(picks: Tensor, scores: Tensor, start: int, visible: int, k: int) -> bool:
    """Whether the picks are a legal row of the window that begins at column 0."""
    legal = topk.legal_set(scores=scores[: start + visible], k=k)
    for at in (picks + start, picks):
        got = torch.zeros_like(legal.must)
        got[at[(at >= 0) & (at < start + visible)]] = True
        if int(got.sum()) != legal.need:
            continue
        if bool((legal.must <= got).all()) and bool((got <= (legal.must | legal.ties)).all()):
            return True
    return False
