"""A classic fault of an exact output: a cause in words, and what it gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Outputs = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """Some rows of a call that has wrong ones.

    Attributes:
        inputs: of the whole call.
        params: of the call.
        rows: int64 [n], numbers of the rows.
        stage: the output that is wrong.
    """

    inputs: Mapping[str, Tensor]
    params: Mapping[str, Any]
    rows: Tensor
    stage: str


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A classic fault.

    Attributes:
        cause: what goes wrong, in words that follow "as when".
        outputs: what it gives for the rows; without those it says nothing of, and none at all
            where it cannot be made.
        note: figures of these rows, told after the cause.
    """

    cause: str
    outputs: Callable[[Asked], Outputs]
    note: Callable[[Asked], str] = lambda _: ""
