"""The MQA logits of DeepGEMM: `score` is the scorer of a path, the others candidates of their op.

Two generations are known, and what the installed module has decides.
`fp8_mqa_logits` gives absolute columns and can clean them; it is preferred where both are there.
`fp8_fp4_mqa_logits` alone (sgl-deep-gemm 0.2.5) gives row-relative columns and never cleans.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from equivalence import receipt, specs
from equivalence.engines import found, inputs
from equivalence.errors import UsageError
from equivalence.paths.parts import Logits
from equivalence.schema import TensorSpec
from refimpl.bits import SCALE_BYTES

_HOW = "pip install sgl-deep-gemm==0.1.4, where there is a Hopper GPU and nvcc 12.9 or later"

_HEADS, _HEAD_DIMS, _PAGE, _NEXT_N = (32, 64), (32, 64, 128), 64, (1, 2)
_COPIED = ("q", "k", "k_scale", "weights", "kv_cache")
"""Tensors the kernels copy in bulk."""
_CELLS = 1 << 22
"""Cells moved at once: their indices take 32 MiB."""


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """One function of the module, and whether it is of the generation that can clean."""

    name: str
    call: Callable[..., Tensor]
    absolute: bool

    def query(self, q: Tensor) -> Tensor | tuple[Tensor, None]:
        """The query as this generation takes it: the newer one wants room for a scale."""
        return q if self.absolute else (q, None)


def score(
    *,
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    clean_logits: bool = False,
    max_seqlen_k: int | None = None,
) -> Logits:
    """Score the keys of each row's window.

    Args:
        q: e4m3 [T, H, D], H 32 or 64, D 32, 64 or 128.
        k: e4m3 [L, D].
        k_scale: fp32 [L].
        weights: fp32 [T, H].
        row_start: int32 [T], first column of a row's window.
        row_end: int32 [T], one past its last, at most L.
        clean_logits: -inf outside the windows, which only absolute columns can have.
        max_seqlen_k: cells of a row-relative row; None gives absolute columns where the module
            has them, and else as many cells as the longest window.

    Returns:
        fp32 [T, L] with windows at `row_start`, or [T, max_seqlen_k] with windows at 0.

    Raises:
        UsageError: the kernel is not here, or it does not take these tensors.

    Source: DeepGEMM 54e2261 attention.hpp:76-196; deep_gemm/__init__.py:209 of sgl-deep-gemm 0.1.4
    and :161 of 0.2.5.
    """
    kernel = _kernel("mqa_logits")
    tensors = {
        "q": q,
        "k": k,
        "k_scale": k_scale,
        "weights": weights,
        "row_start": row_start,
        "row_end": row_end,
    }
    wanted = _plain("mqa_logits", tensors)
    _expect_heads(kernel.name, inputs.expect(kernel.name, wanted, tensors, aligned=_COPIED))
    relative = max_seqlen_k is not None or not kernel.absolute
    if relative and clean_logits:
        raise UsageError(f"clean_logits: {kernel.name} cleans no row-relative columns")
    cells = _cells(row_start, row_end, max_seqlen_k) if relative else len(k)
    column = torch.zeros_like(row_start) if relative else row_start
    if not len(q) or not len(k):
        return Logits(values=_nothing(q, len(q), cells), column=column)
    flags: dict[str, bool | int] = {"max_seqlen_k": cells} if relative else {}
    if kernel.absolute:
        flags["clean_logits"] = clean_logits
    values = kernel.call(kernel.query(q), (k, k_scale), weights, row_start, row_end, **flags)
    columns = "row-relative" if relative else "absolute"
    _leave(kernel, q, rows=len(q), columns=columns, clean_logits=clean_logits)
    return Logits(values=values, column=column)


def mqa_logits(
    *,
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    columns: str = "absolute",
    width: int | None = None,
    clean_logits: bool = False,
) -> dict[str, Tensor]:
    """Candidate of `mqa_logits`; cells are moved only where the kernel has other columns.

    Args:
        q: as in `score`.
        k: likewise.
        k_scale: likewise.
        weights: likewise.
        row_start: likewise.
        row_end: likewise.
        columns: `absolute` or `row-relative`.
        width: cells of a row; L where it is None.
        clean_logits: as in `score`.

    Returns:
        "logits": fp32 [T, width].

    Raises:
        UsageError: as `score`.
    """
    cells = len(k) if width is None else width
    logits = score(
        q=q,
        k=k,
        k_scale=k_scale,
        weights=weights,
        row_start=row_start,
        row_end=row_end,
        clean_logits=clean_logits,
        max_seqlen_k=cells if columns == "row-relative" else None,
    )
    values = logits.values
    if columns == "absolute" and logits.column is not row_start:
        return {"logits": _moved(values, row_start - logits.column, cells)}
    missing = cells - values.shape[1]
    if missing > 0:
        return {"logits": functional.pad(values, (0, missing), value=-torch.inf)}
    return {"logits": values[:, :cells]}


def paged_mqa_logits(
    *,
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    page_size: int = _PAGE,
) -> dict[str, Tensor]:
    """Candidate of `paged_mqa_logits`.

    Args:
        q: e4m3 [B, next_n, H, D], next_n 1 or 2.
        kv_cache: uint8 [pages, 64 * (D + 4)]: of each page all values, then all fp32 scales.
        weights: fp32 [B * next_n, H].
        context_lens: int32 [B, next_n].
        block_table: int32 [B, table].
        page_size: 64.

    Returns:
        "logits": fp32 [B * next_n, table * 64], garbage past each length.

    Raises:
        UsageError: the kernel is not here, or it does not take these tensors.

    Source: DeepGEMM 54e2261 attention.hpp:198-402; deep_gemm/__init__.py:206 of sgl-deep-gemm 0.1.4
    and :157 of 0.2.5.
    """
    kernel = _kernel("paged_mqa_logits")
    if page_size != _PAGE:
        raise UsageError(f"page_size is {page_size}; {kernel.name} has pages of {_PAGE}")
    tensors = {
        "q": q,
        "kv_cache": kv_cache,
        "weights": weights,
        "context_lens": context_lens,
        "block_table": block_table,
    }
    wanted = _plain("paged_mqa_logits", tensors)
    known = {"page_bytes": _PAGE * (q.shape[-1] + SCALE_BYTES)}
    sizes = inputs.expect(
        kernel.name, wanted, tensors, sizes=known, strided=("block_table",), aligned=_COPIED
    )
    _expect_heads(kernel.name, sizes)
    if sizes["n"] not in _NEXT_N:
        raise UsageError(f"{kernel.name}.q has next_n {sizes['n']}; the kernel has 1 and 2")
    width = block_table.shape[1] * _PAGE
    if not len(weights) or not width or not len(kv_cache):
        return {"logits": _nothing(q, len(weights), width)}
    deep_gemm = found.module("deep_gemm", how=_HOW)
    plan = deep_gemm.get_paged_mqa_logits_metadata(context_lens, _PAGE, deep_gemm.get_num_sms())
    pages = kv_cache.view(len(kv_cache), _PAGE, 1, -1)
    flags = {"clean_logits": False} if kernel.absolute else {}
    values = kernel.call(
        kernel.query(q), pages, weights, context_lens, block_table, plan, width, **flags
    )
    _leave(kernel, q, rows=len(weights), next_n=q.shape[1])
    return {"logits": values}


def _kernel(name: str) -> _Kernel:
    """The kernel of the installed module, of the older generation where it has both."""
    deep_gemm = found.module("deep_gemm", how=_HOW)
    for prefix, absolute in (("fp8", True), ("fp8_fp4", False)):
        call = getattr(deep_gemm, f"{prefix}_{name}", None)
        if callable(call):
            return _Kernel(name=f"deep_gemm.{prefix}_{name}", call=call, absolute=absolute)
    raise UsageError(f"deep_gemm has neither fp8_{name} nor fp8_fp4_{name}; {_HOW}")


def _leave(kernel: _Kernel, q: Tensor, *, rows: int, **arguments: receipt.Argument) -> None:
    version, arch = found.version("deep_gemm"), found.arch(q)
    receipt.leave(kernel.name, rows=rows, version=version, arch=arch, **arguments)


def _expect_heads(kernel: str, sizes: Mapping[str, int]) -> None:
    if sizes["H"] not in _HEADS:
        raise UsageError(f"{kernel}.q has {sizes['H']} heads; the kernel has 32 and 64")
    if sizes["D"] not in _HEAD_DIMS:
        raise UsageError(f"{kernel}.q has D {sizes['D']}; the kernel has 32, 64 and 128")


def _nothing(q: Tensor, rows: int, width: int) -> Tensor:
    return q.new_full((rows, width), -torch.inf, dtype=torch.float32)


def _plain(op: str, names: Iterable[str]) -> dict[str, TensorSpec]:
    """The tensors of an op as SM90 takes them: e4m3 with one fp32 scale a key, fp32 weights."""
    known = specs.OPS[op].inputs
    return {name: TensorSpec(known[name].dtypes[:1], known[name].dims) for name in names}


def _cells(row_start: Tensor, row_end: Tensor, asked: int | None) -> int:
    """Cells of a row-relative row; the kernel writes past one that is too short."""
    longest = max(1, int((row_end - row_start).max())) if len(row_start) else 1
    if asked is not None and asked < longest:
        raise UsageError(f"max_seqlen_k is {asked}; the longest window wants {longest}")
    return longest if asked is None else asked


def _moved(values: Tensor, shift: Tensor, width: int) -> Tensor:
    """Cell j of a row becomes cell j + shift; cells that none moves to are not meaningful."""
    out = values.new_empty((len(values), width))
    cell = torch.arange(width, device=values.device)
    step = max(1, _CELLS // max(1, width))
    for first in range(0, len(values), step):
        rows = slice(first, first + step)
        source = (cell - shift[rows, None]).clamp(0, values.shape[1] - 1)
        out[rows] = values[rows].gather(1, source)
    return out
