"""Layer-forwards that publish masks, and candidates for them."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from equivalence import generate
from equivalence.case import Case
from refimpl import forms, masks

BLOCKS, COLUMNS = 2, 96
Spoil = Callable[[Tensor], object]


def forwards(many: int, *, tail: int | None = None) -> Iterator[Case]:
    """Cases of publish_mask on two layers: nine rows of two requests, ties at the block cutoff."""
    for number in range(many):
        case = generate.publish_mask(number, topk_blocks=BLOCKS, columns=COLUMNS, tail=tail)
        about = {"layer": str(number % 2), "ratio": "1"}
        yield Case(
            op=case.op,
            inputs=case.inputs,
            params=case.params,
            provenance=about,
            name=f"forward {number}",
        )


def fixed(form: forms.Form = "bool", **rules: Any) -> Any:  # noqa: ANN401 - settings, a candidate
    """The reference, in one of the forms."""

    def publish(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        mask = masks.publish(**{**call, **rules}, form=form)
        return {"mask" if form in {"bool", "packed"} else "block_ids": mask}

    return publish


def spoils(spoil: Spoil, *, at: int, form: forms.Form = "bool") -> Any:  # noqa: ANN401 - a candidate
    """The reference, but the mask of the layer-forward of this number is spoilt."""
    turns, right = count(), fixed(form)

    def publish(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        outputs: dict[str, Tensor] = right(**call)
        if next(turns) == at:
            spoil(*outputs.values())
        return outputs

    return publish


def flip(row: int, column: int) -> Spoil:
    """Turn one bit of a bool mask, or of a packed one, around."""

    def spoil(mask: Tensor) -> None:
        if mask.dtype is torch.uint8:
            mask[row, column // 8] ^= 1 << column % 8
        else:
            mask[row, column] ^= True

    return spoil
