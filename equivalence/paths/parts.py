"""The parts of a dense indexer path: what scores a chunk of rows, and what picks from the scores.

A scorer and a selector are functions, so an engine's kernel and a plain formula exchange freely.
Each leaves a receipt of what really ran.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from equivalence import receipt
from equivalence.errors import UsageError
from refimpl import bits, fast, scoring, topk
from refimpl.tensorcore import canonical_nan

SCRATCH_BYTES = 64 << 20
"""What the parts of this module take beside their result, whatever the rows."""
_CELLS = 1 << 19
"""Cells a part works on at once; sorting one takes about 50 bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Logits:
    """The scores of some rows.

    Attributes:
        values: fp32 [n, W], garbage outside the windows.
        column: int32 [n], where each row's window begins in `values`.
    """

    values: Tensor
    column: Tensor


Scorer: TypeAlias = Callable[..., Logits]
"""f(*, q, k, k_scale, weights, row_start, row_end) -> Logits"""
Selector: TypeAlias = Callable[..., None]
"""f(*, scores [n, W], column int32 [n], visible int32 [n], out int32 [n, k]) -> None

It writes every cell of `out`: picks relative to the window, pads -1.
"""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How a scorer lays [n, L] scores out in memory.

    Attributes:
        spare_columns: added to the columns before they are rounded up.
        column_multiple: columns of a row are rounded up to this.
        quantum_heads: rows are rounded up to quantum_heads // H of them; 0 where they are not.
    """

    spare_columns: int = 0
    column_multiple: int = 1
    quantum_heads: int = 0

    def cells(self, *, rows: int, columns: int, heads: int) -> int:
        """Scores that `rows` rows of `columns` columns take."""
        quantum = max(1, self.quantum_heads // heads)
        steps = -(-(columns + self.spare_columns) // self.column_multiple)
        return -(-rows // quantum) * quantum * steps * self.column_multiple


STORAGES: Mapping[str, Storage] = MappingProxyType(
    {
        # DeepGEMM csrc attention.hpp:160-172, absolute columns
        "deep_gemm": Storage(spare_columns=256, column_multiple=256, quantum_heads=128),
    }
)
"""Of the scorers that pad; every other allocates just [n, L]."""


def reference_logits(
    *, q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, row_start: Tensor, row_end: Tensor
) -> Logits:
    """The bits of DeepGEMM on Hopper; -inf outside the windows. See `scoring.mqa_logits`."""
    receipt.leave("refimpl.mqa_logits", rows=len(q), arithmetic="deep_gemm.sm90")
    values = scoring.mqa_logits(
        q=q,
        k=k,
        k_scale=k_scale,
        weights=weights,
        row_start=row_start,
        row_end=row_end,
        accumulate=fast.accumulate,
    )
    return Logits(values=values, column=row_start)


def torch_logits(
    *, q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, row_start: Tensor, row_end: Tensor
) -> Logits:
    """The plain fp32 formula, sum over heads of weight * relu(q . k), times the key's scale.

    These are not the bits of any kernel. They do not depend on how many rows are called:
    a dot of e4m3 is exact in fp64 up to D = 65,536, whatever order a GEMM adds in, and what follows
    is one rounded operation a cell after another, head by head. A NaN stays a NaN.

    Args:
        q: e4m3 [n, H, D].
        k: e4m3 [L, D].
        k_scale: fp32 [L].
        weights: fp32 [n, H].
        row_start: int32 [n].
        row_end: int32 [n]; not read, for every column is scored.
    """
    del row_end
    receipt.leave("torch.mqa_logits", rows=len(q))
    rows, heads, columns = len(q), q.shape[1], len(k)
    values = q.new_empty((rows, columns), dtype=torch.float32)
    wide = min(columns, max(1, _CELLS // heads))
    tall = max(1, _CELLS // (heads * max(1, wide)))
    for c in range(0, columns, max(1, wide)):
        keys = k[c : c + wide].double().t()
        for r in range(0, rows, tall):
            some = q[r : r + tall].double()
            dots = (some.flatten(0, 1) @ keys).float().view(len(some), heads, -1).relu_()
            dots *= weights[r : r + tall, :, None]
            total = dots[:, 0].clone()
            for head in range(1, heads):
                total += dots[:, head]
            values[r : r + tall, c : c + wide] = canonical_nan(total * k_scale[c : c + wide])
    return Logits(values=values, column=row_start)


def reference_topk(*, scores: Tensor, column: Tensor, visible: Tensor, out: Tensor) -> None:
    """The strict picks: best first, the lowest column of tied ones. See `topk.ragged_topk`."""
    receipt.leave("refimpl.ragged_topk", rows=len(scores))
    step = max(1, _CELLS // max(1, scores.shape[1]))
    for r in range(0, len(scores), step):
        some = slice(r, r + step)
        out[some] = topk.ragged_topk(
            scores=scores[some],
            row_start=column[some],
            row_end=column[some] + visible[some],
            k=out.shape[1],
        )


def torch_topk(*, scores: Tensor, column: Tensor, visible: Tensor, out: Tensor) -> None:
    """`torch.topk(sorted=True)` inside each window: by value, tied columns as it likes.

    It ranks integer keys of the scores, so that an -inf inside a window still stands above what
    is outside. Its contract is that of `torch.topk`: NaN first, -0 and +0 alike, a short row
    ranked like any other.
    """
    receipt.leave("torch.topk", rows=len(scores), k=out.shape[1])
    width, k = scores.shape[1], out.shape[1]
    at = torch.arange(width, device=scores.device)
    step = max(1, _CELLS // max(1, width))
    for r in range(0, len(scores), step):
        some = slice(r, r + step)
        first, count = column[some, None], visible[some, None]
        keys = bits.order_key(scores[some], zero_sign="equal", nan="first")
        keys = torch.where((at >= first) & (at < first + count), keys, torch.iinfo(keys.dtype).min)
        best = keys.topk(min(k, width), dim=1, sorted=True).indices - first
        held = at[: min(k, width)] < count
        out[some] = topk.PAD
        out[some, : min(k, width)] = torch.where(held, best, topk.PAD).int()


def _elsewhere(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when it is first called."""

    def part(**call: Any) -> Any:  # noqa: ANN401 - whatever the part takes and gives
        return getattr(import_module(module), name)(**call)

    part.__name__ = part.__qualname__ = name
    return part


SCORERS: Mapping[str, Scorer] = MappingProxyType(
    {
        "reference": reference_logits,
        "torch": torch_logits,
        "deep_gemm": _elsewhere("equivalence.engines.deepgemm", "score"),
    }
)
SELECTORS: Mapping[str, Selector] = MappingProxyType(
    {
        "reference": reference_topk,
        "torch": torch_topk,
        "sgl_kernel": _elsewhere("equivalence.engines.sglang", "select"),
    }
)


def scorer(part: str | Scorer) -> Scorer:
    """The scorer of a name in SCORERS, or the function itself.

    Raises:
        UsageError: no scorer has that name.
    """
    return _find(part, SCORERS, "scorer")


def selector(part: str | Selector) -> Selector:
    """The selector of a name in SELECTORS, or the function itself.

    Raises:
        UsageError: no selector has that name.
    """
    return _find(part, SELECTORS, "selector")


def name_of(part: str | Callable[..., Any]) -> str:
    """What a message calls a part."""
    return part if isinstance(part, str) else getattr(part, "__qualname__", type(part).__name__)


def _find(
    part: str | Callable[..., Any], table: Mapping[str, Callable[..., Any]], kind: str
) -> Callable[..., Any]:
    if isinstance(part, str):
        if part not in table:
            raise UsageError(f"no {kind} named {part!r}: one of {', '.join(table)}")
        return table[part]
    if not callable(part):
        raise UsageError(f"{kind} is {part!r}: it is a function or one of {', '.join(table)}")
    return part
