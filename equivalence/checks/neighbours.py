"""Neighbours: whether a wrong row holds what the reference says of another row of its block."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from equivalence.checks import readings
from equivalence.checks.rows import Decided, failing
from equivalence.verdict import Finding, Status

_SIZES = 16
"""Chunk sizes that are tried."""
_SHORTEST = 16
"""Rows of a chunk that is believed to lag."""

Holds = Callable[[Tensor, Tensor], Tensor]
"""(rows int64 [n], others int64 [n], both of the block) -> bool [n]: does one fit the other."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Form:
    """One way in which a wrong row may be right for another one.

    Attributes:
        words: what is said of it, a key of `readings.SHIFTS`.
        holds: which rows fit which others.
        telling: bool [B], rows that hardly fit, or are hardly fitted, by chance.
        own: whether it is the wrong row that must be telling, not the one it fits.
        fewest: wrong rows that must fit, one after the other.
        most: where a row fits more others than this, it shows nothing.
        loose: whether others that are nearly alike fit too: where one of them fits every row, a
            distance shows nothing.
    """

    words: str
    holds: Holds
    telling: Tensor
    own: bool = False
    fewest: int = 1
    most: int = 16
    loose: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbours:
    """What the rows of a block are compared with.

    Attributes:
        ids: int64 [B] ascending, the rows' numbers in the call.
        last: the number of the last row of the call that is judged; -1 where that is not known.
        forms: what is tried, in this order.
        blank: by what may fill a row ("poison", or in words), the rows it fills, bool [B].
        idle: bool [B], rows that owe nothing.
        request: a row's number -> its request and token in words, or "".
        alone: whether one row that fits says more than what its check says of it.
    """

    ids: Tensor
    last: int
    forms: tuple[Form, ...]
    blank: Mapping[str, Tensor]
    idle: Tensor
    request: Callable[[int], str]
    alone: bool = True


def tell(decided: Decided, around: Callable[[], Neighbours]) -> Decided:
    """The same decisions; findings also say what the rows around them show.

    Args:
        decided: the rows of one output.
        around: makes the comparison; called when a first finding is explained.
    """
    return replace(decided, explain=partial(_explain, decided, cache(around)))


def _explain(decided: Decided, around: Callable[[], Neighbours], i: int) -> Finding:
    found = decided.explain(i)
    if found.status is not Status.DIFFERENT:
        return found
    rows, wrong = around(), failing(decided.codes)
    fewest = 1 if rows.alone or not found.reading else 2
    reading = _of_tail(rows, wrong, i) or _of_shift(rows, wrong, i, fewest=fewest)
    return replace(found, reading=reading) if reading else found


def _of_tail(around: Neighbours, wrong: Tensor, i: int) -> str:
    """Rows up to the last one of the call that hold one filler and nothing else."""
    filler = next((name for name, rows in around.blank.items() if bool(rows[i])), None)
    if filler is None or int(around.ids[-1]) != around.last:
        return ""
    empty = around.blank[filler] & wrong
    other = (~(empty | around.idle)).nonzero()[:, 0]
    # With no row before them, it is not the last chunk that is short.
    if not len(other) or int(other[-1]) > i:
        return ""
    rows = around.ids[int(other[-1]) :][empty[int(other[-1]) :]]
    return readings.of_tail(filler, first=int(rows[0]), last=int(rows[-1]), n=len(rows))


def _of_shift(around: Neighbours, wrong: Tensor, i: int, *, fewest: int) -> str:
    best: tuple[Form, Shift] | None = None
    for form in around.forms:
        found = shift(around.ids, form, wrong, i)
        if found is not None and found.rows >= fewest and (not best or found.rows > best[1].rows):
            best = form, found
    if best is None:
        return ""
    row, by = int(around.ids[i]), best[1].by
    return readings.of_shift(
        best[0].words,
        row=row,
        other=row - by,
        request=around.request(row - by),
        by=by,
        more=best[1].rows - 1,
        steady=best[1].steady,
        short=row == around.last and int(wrong.sum()) == 1,
    )


@dataclass(frozen=True, kw_only=True)
class Shift:
    """How far a row lies from the one it fits.

    Attributes:
        by: rows; positive where the other row comes earlier in the call.
        rows: how many wrong rows, one after the other, fit at this distance, or in chunks.
        steady: whether they are too many for one chunk of that length, and no chunk that lags
            behind by its length begins at the first wrong row.
    """

    by: int
    rows: int
    steady: bool = False


def shift(ids: Tensor, form: Form, wrong: Tensor, i: int) -> Shift | None:
    """The distance at which row i and the most wrong rows beside it fit, the nearest of equals.

    Chunks are tried too, none longer than the rows before the first wrong one: there the
    distance grows from chunk to chunk.

    Args:
        ids: int64 [B] ascending.
        form: what fits.
        wrong: bool [B].
        i: a wrong row of the block.

    Returns:
        None where the row fits its own place, or no other, or several and no wrong row beside it
        says which.
    """
    every = torch.arange(len(ids), device=ids.device)
    fits = form.holds(torch.full_like(every, i), every)
    distances = sorted((ids[i] - ids[fits]).tolist(), key=abs)
    if not 0 < len(distances) <= form.most or 0 in distances:
        return None
    rows = wrong.nonzero()[:, 0]
    at = int(torch.searchsorted(rows, i))
    best = None
    for by in distances:
        run, others = _run(ids, form, rows, ids[rows] - by, at)
        enough = len(run) >= form.fewest and bool(form.telling[run if form.own else others].any())
        if enough and (best is None or len(run) > best.rows) and not _one_fits(form, run, every):
            lags = abs(by) >= _SHORTEST and int(ids[rows[0]]) % by == 0
            best = Shift(by=by, rows=len(run), steady=len(run) > abs(by) and not lags)
    number, first = int(ids[i]), int(ids[rows[0]])
    # Rows of the first chunk are right, and some of the next one may be so by chance.
    sizes = [n for n in range(first, 1, -1) if number - number % n in distances]
    for size in sizes[:_SIZES]:
        run, _ = _run(ids, form, rows, ids[rows] % size, at)
        enough = len(run) >= 2 * size and (best is None or len(run) > best.rows)
        if enough or (best is not None and best.steady and len(run) >= best.rows):
            best = Shift(by=number - number % size, rows=len(run))
    return best if best is None or best.rows > 1 or len(distances) == 1 else None


def _one_fits(form: Form, run: Tensor, every: Tensor) -> bool:
    """Whether one row fits all of these, the first of those that fit both ends looked at."""
    if not form.loose or len(run) < form.fewest:
        return False
    fits = (form.holds(torch.full_like(every, int(row)), every) for row in (run[0], run[-1]))
    both = torch.stack([*fits]).all(0).nonzero()[:_SIZES, 0]
    return any(bool(form.holds(run, torch.full_like(run, int(j))).all()) for j in both)


def _run(ids: Tensor, form: Form, rows: Tensor, sought: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """The rows that fit the sought numbers, one after the other, around this one, and those."""
    others = torch.searchsorted(ids, sought).clamp(max=len(ids) - 1)
    fit = ids[others] == sought
    fit[fit.clone()] = form.holds(rows[fit], others[fit])
    misses = (~fit).nonzero()[:, 0]
    after = int(torch.searchsorted(misses, at))
    end = int(misses[after]) if after < len(misses) else len(fit)
    begin = int(misses[after - 1]) + 1 if after else 0
    return rows[begin:end], others[begin:end]
