"""Layer-forwards of fifty rows, some of them tied at the cutoff, and selectors for them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from equivalence import receipt
from equivalence.case import Case
from refimpl.bits import order_key
from refimpl.topk import ragged_topk

ROWS, COLUMNS, K = 50, 64, 16
FREE = "order=any,ties=any"


def scores(number: int) -> Tensor:
    """fp32 [50, 64] of distinct scores, but every fourth has ties at the cutoff.

    Of numbers 0, 4, ... every row has 11 scores above a plateau of zeros; of 2, 6, ... row 5 has
    two equal scores for one last place.
    """
    random = torch.Generator().manual_seed(number)
    drawn = torch.rand(ROWS, COLUMNS, generator=random).argsort(1).float() - 52
    if number % 4 == 0:
        return drawn.relu()
    if number % 4 == 2:
        drawn[5][drawn[5] == 11 - K] = 12.0 - K
    return drawn


def arguments(number: int) -> dict[str, Any]:
    """The keywords of a call of ragged_topk."""
    start = torch.zeros(ROWS, dtype=torch.int32)
    end = torch.full((ROWS,), COLUMNS, dtype=torch.int32)
    return {
        "scores": scores(number),
        "row_start": start,
        "row_end": end,
        "k": K,
    }


def forwards(count: int = 48) -> Iterator[Case]:
    """Cases of ragged_topk on two layers; those of ratio 2 are tied."""
    for number in range(count):
        call = arguments(number)
        params = {"k": call.pop("k")}
        about = {"layer": str(number // 2 % 2), "ratio": str(2 - number % 2)}
        yield Case(
            op="ragged_topk", inputs=call, params=params, provenance=about, name=f"forward {number}"
        )


def fixed(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """The reference."""
    return ragged_topk(scores=scores, row_start=row_start, row_end=row_end, k=k)


def honest(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """Right, and takes tied columns as torch's random numbers fall; every window is a whole row."""
    del row_start, row_end
    shuffle = torch.rand(scores.shape).argsort(1)
    keys = order_key(scores).gather(1, shuffle)
    best = keys.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return shuffle.gather(1, best).int()


def loses(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
    """Honest, but row 17 takes its lowest score for its highest."""
    picks = honest(**call)
    picks[17, 0] = call["scores"][17].argmin()
    return picks


def last(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """The reference, but the highest of tied columns win."""
    return ragged_topk(scores=scores, row_start=row_start, row_end=row_end, k=k, ties="highest")


def toy(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
    """The reference, but row 17 takes its lowest score for its highest; it leaves a receipt."""
    receipt.leave("toy.topk", rows=len(call["scores"]), version="1.0", arch="cpu", k=call["k"])
    picks = fixed(**call)
    picks[17, 0] = call["scores"][17].argmin()
    return picks
