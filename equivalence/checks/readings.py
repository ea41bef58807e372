"""Readings: one sentence naming the likely cause, given only where the evidence shows it."""

import torch
from torch import Tensor

from equivalence.wording import listing
from refimpl import bits, topk

_ALIGNED = 64
"""A workspace has as many columns as the widest row, up to a multiple."""
_BEST = "; the other picks are its best"


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
    want: Tensor,
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
        want: int64 [need] the reference's.
        scores: [W] the row's whole buffer.
        column: where the window's first score stands in it.
        visible: scores in the window.
        k: picks a row may hold.
    """
    window = scores[column : column + visible]
    stale = _of_stale(picks, window, -(-len(scores) // _ALIGNED) * _ALIGNED)
    if rule == "out-of-window":
        # Where the other picks are the window's best, column 0 was not where it began.
        elsewhere = column == start > 0 and not stale.endswith(_BEST)
        if elsewhere and _ranks_from_zero(picks, scores, start, visible, k):
            return f"row {row} ranks from column 0, not from its start {start}"
        moved = picks - start
        if start > 0 and bool(((moved >= 0) & (moved < visible)).all()):
            return f"these are columns of the whole K: the row's start {start} was not subtracted"
        if bool((picks >= visible).all()) and _from_base(picks, want, window, k):
            return "every pick lies past the window: fits another base for the indices"
    if rule == "duplicate" and bool((picks == picks[0]).all()):
        return f"the whole row is column {int(picks[0])}"
    return stale if rule in ("out-of-window", "pad") else ""


def _from_base(picks: Tensor, want: Tensor, window: Tensor, k: int) -> bool:
    """Whether the picks are a legal row of the window, all moved by one number."""
    bases = (picks.min() - want.min(), picks.max() - want.max())
    return any(_legal(picks - base, window, k) for base in bases)


def _of_stale(picks: Tensor, window: Tensor, width: int) -> str:
    """Picks past the window but in its buffer, where the others are the best of the window."""
    visible = len(window)
    past = picks[picks >= visible]
    if not visible or not len(past) or int(past.max()) >= width or int(picks.min()) < 0:
        return ""
    keys = bits.order_key(window)
    picked = torch.zeros_like(keys, dtype=torch.bool)
    picked[picks[picks < visible]] = True
    few, most = keys[picked], keys[~picked]
    if len(few) and len(most) and int(most.max()) > int(few.min()):
        return ""
    where = listing(past.sort().values.tolist())
    columns = f"column {where}" if len(past) == 1 else f"columns {where}"
    sees = "1 visible column" if visible == 1 else f"{visible:,} visible columns"
    rest = _BEST if len(few) else ""
    return f"reads past its {sees}: {columns}, as when a stale workspace column is ranked{rest}"


def _legal(at: Tensor, window: Tensor, k: int) -> bool:
    """Whether these are the columns of a legal row of the window."""
    legal = topk.legal_set(scores=window, k=k)
    got = torch.zeros_like(legal.must)
    got[at[(at >= 0) & (at < len(window))]] = True
    if int(got.sum()) != legal.need:
        return False
    return bool((legal.must <= got).all()) and bool((got <= (legal.must | legal.ties)).all())


def _ranks_from_zero(picks: Tensor, scores: Tensor, start: int, visible: int, k: int) -> bool:
    """Whether the picks are a legal row of the window that begins at column 0."""
    window = scores[: start + visible]
    return any(_legal(at, window, k) for at in (picks + start, picks))


def of_tail(filler: str, *, first: int, last: int, n: int) -> str:
    """The last rows of the call hold nothing.

    Args:
        filler: "poison", or what fills them, in words.
        first: the number of the first of them.
        last: of the last.
        n: how many there are.
    """
    rows = f"rows {first} to {last}" if n > 1 else f"row {last}"
    one = n == 1
    what = "never written" if filler == "poison" else f"nothing but {filler}"
    was = ("was" if one else "were") if filler == "poison" else ("is" if one else "are")
    short = "one row" if one else f"{n:,} rows"
    return f"{rows}, the last of the call, {was} {what}: as when the last chunk is {short} short"


SHIFTS = {
    "picks": "holds the picks of",
    "scores": "holds the scores of",
    "slots": "holds the slots of",
    "windows": "sees only what is in the window of",
    "borrowed": "is ranked by the scores of",
}
"""What may be said of one row and another."""


def of_shift(
    words: str,
    *,
    row: int,
    other: int,
    request: str,
    by: int,
    more: int,
    short: bool,
    steady: bool = False,
) -> str:
    """A row is right for another one.

    Args:
        words: how, one of SHIFTS.
        row: its number.
        other: the number of the other row.
        request: the other row's request and token in words, or "".
        by: rows from the other one to this one.
        more: further wrong rows that fit one likewise.
        short: whether the row is the last of the call, and the one wrong row of its block.
        steady: whether more rows keep the distance than a chunk of that length has.
    """
    where = f"row {other} ({request})" if request else f"row {other}"
    told = f"{SHIFTS[words]} {where}"
    if more:
        told = f"row {row} {told}, {_far(by, more)}"
        # Two rows at one distance show no cause, unless the distance itself does.
        cause = "" if more == 1 and abs(by) > 1 else _cause(words, by, steady=steady)
        return f"{told}: as when {cause}" if cause else told
    if short and by > 1:
        return (
            f"row {row}, the last of the call, {told}: as when the last chunk is one row short"
            " and the buffer keeps what it held"
        )
    return f"row {row} {told}"


def _cause(words: str, by: int, *, steady: bool) -> str:
    if words == "windows" and steady:
        return "a window ends too early" if by > 0 else "a window ends too late"
    if abs(by) == 1:
        return "a tail is off by one"
    if by < 0:
        return "a view outlives its chunk"
    if words == "borrowed":
        return "a workspace still holds the scores of another chunk"
    return "" if steady else "a chunk forgets its row offset"


def _far(by: int, more: int) -> str:
    """A distance in rows, and how many rows keep it."""
    rows = "1 row" if abs(by) == 1 else f"{abs(by):,} rows"
    others = "1 more row" if more == 1 else f"{more:,} more rows"
    return f"{rows} {'earlier' if by > 0 else 'later'}, and {others} likewise"
