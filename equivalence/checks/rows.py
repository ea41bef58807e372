"""What a check says of a block of rows: a class or a rule for each, decided once."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equivalence.verdict import RULES, Evidence, Finding

CLASSES = ("identical", "reordered", "tied", "open", "undecided")
IDENTICAL, REORDERED, TIED, OPEN, UNDECIDED = range(len(CLASSES))
_FIRST_RULE = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Decided:
    """The rows of one output, decided.

    Attributes:
        codes: int8 [B], an index into CLASSES, or `code(rule)`.
        counts: what else was counted.
        power: whether anything here could have been wrong differently.
        explain: the finding of row i of the block, made from the masks that decided it.
        ids: int64 [B], the rows' numbers where they are not all of the block's.
    """

    codes: Tensor
    power: bool
    counts: dict[str, int] = field(default_factory=dict)
    explain: Callable[[int], Finding]
    ids: Tensor | None = None


def code(rule: str) -> int:
    """The code of a row that fails by this rule."""
    return _FIRST_RULE + RULES.index(rule)


def name(value: int) -> str:
    """The class or rule of a code."""
    return CLASSES[value] if value < _FIRST_RULE else RULES[value - _FIRST_RULE]


def failing(codes: Tensor) -> Tensor:
    """Which rows fail by a rule, bool [B]."""
    return codes >= _FIRST_RULE


def tally(codes: Tensor) -> dict[str, int]:
    """Rows by class or rule."""
    return {name(value): n for value, n in Counter(codes.tolist()).items()}


def set_first(codes: Tensor, undecided: Tensor, which: Tensor, value: int) -> None:
    """Give `value` to rows of `which` that no earlier rule has named."""
    codes[which & undecided] = value
    undecided &= ~which


def number(value: float, dtype: torch.dtype = torch.float32) -> str:
    """A score in decimal, with the digits that its dtype can hold."""
    digits = 9 if dtype == torch.float32 else 5
    return f"{value:.{digits}g}"


def hexadecimal(value: Tensor) -> str:
    """The bits of one value of any dtype, in hex."""
    raw = value.reshape(1).view(torch.uint8).flip(0).tolist()
    return "".join(f"{byte:02X}" for byte in raw)


def score_line(label: str, place: str, value: Tensor, note: str = "") -> Evidence:
    """One score as evidence."""
    return Evidence(
        label=label,
        place=place,
        value=number(float(value), value.dtype),
        bits=hexadecimal(value),
        note=note,
    )
