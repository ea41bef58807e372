"""The top-k of sgl_kernel: `select` is a path's selector, `ragged_topk` a candidate of that op.

The op `torch.ops.sgl_kernel.fast_topk` is used where something registered it; else the shared
library named by EQUIVALENCE_SGL_KERNEL is loaded, else the module sgl_kernel is imported.
"""

import os
from typing import Any

import torch
from torch import Tensor

from equivalence import receipt, specs
from equivalence.engines import found, inputs
from equivalence.errors import UsageError
from equivalence.schema import TensorSpec

LIBRARY = "EQUIVALENCE_SGL_KERNEL"
"""Environment variable: a shared library `common_ops` of sglang-kernel."""
K = 2048
"""The only k the kernel has."""

_KERNEL = "sgl_kernel.fast_topk"
_SPECS = {
    "scores": TensorSpec(("F32",), ("T", "L")),
    "column": TensorSpec(specs.INDEX, ("T",)),
    "visible": TensorSpec(specs.INDEX, ("T",)),
    "out": TensorSpec(specs.INDEX, ("T", K)),
}


def select(*, scores: Tensor, column: Tensor, visible: Tensor, out: Tensor) -> None:
    """Write the picks of every row into `out`, relative to the row's window; pads are -1.

    Args:
        scores: fp32 [T, W], rows at any stride.
        column: int32 [T], where a row's window begins in `scores`.
        visible: int32 [T], columns in the window; a row of at most 2,048 is not read.
        out: int32 [T, 2048].

    Raises:
        UsageError: the kernel is not here, or it does not take these tensors.

    Source: sgl_kernel/top_k.py:16 of sglang-kernel 0.4.10, whose `fast_topk_v2` calls this op.
    """
    if out.shape[-1] != K:
        raise UsageError(f"{_KERNEL} has k {K}, not {out.shape[-1]}")
    tensors = {"scores": scores, "column": column, "visible": visible, "out": out}
    inputs.expect(_KERNEL, _SPECS, tensors, strided=("scores",))
    fast_topk = _found()
    if not len(scores):
        return
    fast_topk(scores, out, visible, column)
    receipt.leave(_KERNEL, rows=len(scores), version=_version(), arch=found.arch(scores), k=K)


def ragged_topk(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """Candidate of `ragged_topk`; its contract is that of sgl_kernel.fast_topk_v2.

    Args:
        scores: fp32 [T, L].
        row_start: int32 [T], first visible column.
        row_end: int32 [T], one past the last.
        k: 2048.

    Returns:
        int32 [T, 2048], relative to `row_start`.

    Raises:
        UsageError: as `select`.
    """
    picks = torch.empty((len(scores), k), dtype=torch.int32, device=scores.device)
    visible = (row_end - row_start).clamp(min=0)
    select(scores=scores, column=row_start, visible=visible, out=picks)
    return picks


def _registered() -> Any:  # noqa: ANN401 - torch has no types here
    return getattr(torch.ops.sgl_kernel, "fast_topk", None)


def _found() -> Any:  # noqa: ANN401 - torch has no types here
    """The op, registered by whoever has it."""
    op = _registered()
    if op is not None:
        return op
    path = os.environ.get(LIBRARY)
    if path:
        found.library(path, variable=LIBRARY)
        where = f"the library {path!r} that {LIBRARY} names"
    else:
        how = f"install sglang-kernel, or let {LIBRARY} name its common_ops library"
        where = str(found.module("sgl_kernel", how=how).__name__)
    op = _registered()
    if op is None:
        raise UsageError(f"{where} registers no op {_KERNEL}; sglang-kernel 0.4.6 does")
    return op


def _version() -> str:
    """Of the library the environment names where that is loaded, else of the module."""
    path = os.environ.get(LIBRARY, "")
    if path and found.is_loaded(path):
        return found.version_of_file(path)
    return found.version("sgl_kernel")
