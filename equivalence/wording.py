"""Words that sentences share: numbers in a row, ranks, and what a tensor is."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def listing(values: Sequence[int], *, most: int = 4) -> str:
    """At most `most` numbers, then how many more."""
    shown = " ".join(map(str, values[:most]))
    return shown if len(values) <= most else f"{shown} and {len(values) - most:,} more"


def ranks(numbers: Sequence[int], *, most: int | None = None) -> str:
    """Ranks by their numbers, as "rank 3" or "ranks 0 1 2", all of them unless `most` is given."""
    every = len(numbers) if most is None else most
    return f"rank{'' if len(numbers) == 1 else 's'} {listing(numbers, most=every)}"


def form(tensor: "Tensor") -> str:
    """What a tensor is, as "float32 [2, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
