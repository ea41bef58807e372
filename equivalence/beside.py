"""Beside: the rows of a block that a wrong one is compared with, and what they are called."""

from functools import partial
from typing import Any

from torch import Tensor

from equivalence import shifted
from equivalence.blocks import Block, Job
from equivalence.case import Case
from equivalence.checks import neighbours
from equivalence.checks.neighbours import Form, Neighbours
from equivalence.checks.pages import Pages
from equivalence.checks.rows import Decided
from equivalence.selection import Picks, Selection
from refimpl import bits
from refimpl.topk import PAD

_FEWEST, _MOST = 3, 256
"""Rows that must fit where one alone shows little, and windows that one row may fit."""


def of_scores(
    job: Job, block: Block, decided: Decided, *, want: Tensor, got: Tensor, poison: float | None
) -> Decided:
    """Decided logits whose findings also look at other rows; want and got are fp32 [B, W]."""

    def around() -> Neighbours:
        inside = block.inside(got)
        held, within = shifted.scores(want, got, inside, poison)
        scored = block.visible > 1
        shows = scored & (inside & (bits.as_int(got) == bits.as_int(want))).any(1)
        fillers = {"poison": poison, "zeros": 0.0}
        return _around(
            job,
            block,
            forms=(
                Form(words="scores", holds=held, telling=scored),
                Form(
                    words="windows",
                    holds=within,
                    telling=shows,
                    own=True,
                    fewest=_FEWEST,
                    most=_MOST,
                    loose=True,
                ),
            ),
            blank={n: ((got == v) | ~inside).all(1) for n, v in fillers.items() if v is not None},
            idle=block.visible == 0,
        )

    return neighbours.tell(decided, around)


def of_picks(
    job: Job, block: Block, decided: Decided, *, selection: Selection, picks: Picks
) -> Decided:
    """Decided picks whose findings also look at other rows."""

    def around() -> Neighbours:
        telling = shifted.telling(selection)
        return _around(
            job,
            block,
            forms=(
                Form(
                    words="picks",
                    holds=shifted.picks(selection, picks),
                    telling=telling,
                ),
                Form(
                    words="windows",
                    holds=shifted.windows(selection, picks),
                    telling=telling,
                    fewest=_FEWEST,
                    most=_MOST,
                    loose=True,
                ),
                Form(
                    words="borrowed",
                    holds=shifted.borrowed(selection, picks),
                    telling=telling,
                    own=True,
                    fewest=_FEWEST,
                ),
            ),
            blank=_blank(picks.values, picks.pad, picks.poison),
            idle=(selection.want == PAD).all(1),
        )

    return neighbours.tell(decided, around)


def of_slots(job: Job, block: Block, decided: Decided, *, slots: Pages, want: Tensor) -> Decided:
    """Decided slots whose findings also look at other rows.

    Args:
        job: the case and its sides.
        block: the rows.
        decided: by their check.
        slots: as the kernel wrote them.
        want: int64 [B, n] the columns they should stand for, pads -1.
    """

    def around() -> Neighbours:
        known = (want >= 0) & (want < block.visible.clamp(min=1)[:, None])
        right = slots.of(want, known)
        return _around(
            job,
            block,
            alone=False,
            forms=(
                Form(
                    words="slots",
                    holds=shifted.slots(right, slots.values, slots.pad),
                    telling=(right != slots.pad).sum(1) > 1,
                ),
            ),
            blank=_blank(slots.values, slots.pad, slots.poison),
            idle=(right == slots.pad).all(1),
        )

    return neighbours.tell(decided, around)


def _around(job: Job, block: Block, **rest: Any) -> Neighbours:  # noqa: ANN401 - its other fields
    # Of a case that was cut no request's first row is known, of some rows not what lies between.
    some = job.names is not None or job.rows is not None
    last = -1 if some else int(job.live.nonzero()[-1, 0])
    request = partial(request_of, job.case) if job.names is None else lambda _: ""
    return Neighbours(
        ids=block.names,
        last=last,
        request=request,
        **rest,
    )


def _blank(values: Tensor, pad: int, poison: int | None) -> dict[str, Tensor]:
    """By what may fill a row of indices, the rows it fills."""
    fillers = {"poison": poison, "pads": pad, "zeros": 0 if values.shape[1] > 1 else None}
    return {name: (values == v).all(1) for name, v in fillers.items() if v is not None}


def request_of(case: Case, row: int) -> str:
    """The request and token of a row in words; "" where the inputs do not say."""
    inputs = case.inputs
    if "row_to_request" in inputs:
        request = inputs["row_to_request"]
        number, token = int(request[row]), int((request[:row] == request[row]).sum())
    elif "query_start_loc" in inputs:
        edges = inputs["query_start_loc"]
        number = int((edges <= row).sum()) - 1
        token = row - int(edges[number])
    elif "context_lens" in inputs:
        number, token = divmod(row, inputs["context_lens"].shape[1])
    else:
        return ""
    return f"request {number} token {token}"
