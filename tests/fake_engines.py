"""Modules with the functions of deep_gemm and sgl_kernel, strict about their calls, in refimpl."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence.engines import found
from refimpl import scoring, topk

VERSION = "9.9"
SMS = 132
GARBAGE = 777.0
K = 2048
Score = Callable[..., Tensor]


def one_ulp_off(**inputs: Any) -> Tensor:  # noqa: ANN401 - a score's own arguments
    """The logits, but for the last cell of the last window."""
    logits = scoring.mqa_logits(**inputs)
    rows = (inputs["row_end"] > inputs["row_start"]).nonzero().flatten()
    row = int(rows[-1])
    last = int(inputs["row_end"][row]) - 1
    logits[row, last] = torch.nextafter(logits[row, last], torch.tensor(torch.inf))
    return logits


def one_length_short(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
    """The paged logits, but for the last column of every request."""
    return scoring.paged_mqa_logits(**{**inputs, "context_lens": inputs["context_lens"] - 1})


def deep_gemm(
    *generations: str,
    score: Score = scoring.mqa_logits,
    paged: Score = scoring.paged_mqa_logits,
) -> ModuleType:
    """A module of the generations "fp8" and "fp8_fp4".

    Args:
        generations: which functions it has.
        score: what its dense functions compute.
        paged: what its paged functions compute.
    """
    module = ModuleType("deep_gemm")
    kernels: dict[str, dict[str, tuple[Callable[..., Tensor], Score]]] = {
        "fp8": {"fp8_mqa_logits": (_dense, score), "fp8_paged_mqa_logits": (_paged, paged)},
        "fp8_fp4": {
            "fp8_fp4_mqa_logits": (_dense_fp4, score),
            "fp8_fp4_paged_mqa_logits": (_paged_fp4, paged),
        },
    }
    for generation in generations:
        for name, (kernel, computes) in kernels[generation].items():
            setattr(module, name, partial(kernel, computes))
    vars(module).update(
        get_paged_mqa_logits_metadata=_plan, get_num_sms=lambda: SMS, __version__=VERSION
    )
    return module


def _dense(
    score: Score,
    *call: Any,  # noqa: ANN401 - tensors and a pair of them
    clean_logits: bool,
    max_seqlen_k: int = 0,
) -> Tensor:
    assert type(clean_logits) is bool
    logits, ks, ke = _logits(score, *call)
    if max_seqlen_k:
        assert not clean_logits
        return _compressed(logits, ks, ke, max_seqlen_k)
    rows, columns = logits.shape
    out = torch.full((rows, columns + 256), GARBAGE)[:, :columns]
    column = torch.arange(columns)
    inside = (column >= ks[:, None]) & (column < ke[:, None])
    return out.copy_(torch.where(inside | clean_logits, logits, GARBAGE))


def _dense_fp4(
    score: Score,
    q: tuple[Tensor, None],
    *call: Any,  # noqa: ANN401 - likewise
    max_seqlen_k: int,
) -> Tensor:
    query, scale = q
    assert scale is None
    return _compressed(*_logits(score, query, *call), max_seqlen_k)


def _logits(score: Score, *call: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401 - likewise
    q, (k, k_scale), weights, ks, ke = call
    _packed(q, torch.float8_e4m3fn, len(weights), None, None)
    _packed(k, torch.float8_e4m3fn, None, q.shape[2])
    _packed(k_scale, torch.float32, len(k))
    _packed(weights, torch.float32, *q.shape[:2])
    _packed(ks, torch.int32, len(q))
    _packed(ke, torch.int32, len(q))
    return score(q=q, k=k, k_scale=k_scale, weights=weights, row_start=ks, row_end=ke), ks, ke


def _compressed(logits: Tensor, ks: Tensor, ke: Tensor, width: int) -> Tensor:
    assert type(width) is int
    assert 0 < width >= int((ke - ks).max())
    out = torch.full((len(logits), -(-width // 256) * 256), GARBAGE)[:, :width]
    for row, (start, end) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
        out[row, : end - start] = logits[row, start:end]
    return out


def _plan(context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
    _packed(context_lens, torch.int32, None, None)
    assert (block_kv, num_sms) == (64, SMS)
    return torch.full((num_sms + 1, 2), int(context_lens.sum()), dtype=torch.int32)


def _paged(
    score: Score,
    *call: Any,  # noqa: ANN401 - tensors and a width
    clean_logits: bool,
) -> Tensor:
    assert clean_logits is False
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len = call
    _packed(q, torch.float8_e4m3fn, *context_lens.shape, None, None)
    _packed(kv_cache, torch.uint8, None, 64, 1, q.shape[3] + 4)
    _packed(weights, torch.float32, context_lens.numel(), q.shape[2])
    assert (block_table.dtype, block_table.stride(1)) == (torch.int32, 1)
    assert torch.equal(schedule_meta, _plan(context_lens, 64, SMS))
    assert max_context_len == block_table.shape[1] * 64
    logits = score(
        q=q,
        kv_cache=kv_cache,
        weights=weights,
        context_lens=context_lens,
        block_table=block_table,
    )
    beyond = torch.arange(max_context_len) >= context_lens.reshape(-1, 1)
    return torch.where(beyond, GARBAGE, logits)


def _paged_fp4(score: Score, q: tuple[Tensor, None], *call: Any) -> Tensor:  # noqa: ANN401 - likewise
    query, scale = q
    assert scale is None
    return _paged(score, query, *call, clean_logits=False)


def fast_topk(scores: Tensor, indices: Tensor, lengths: Tensor, row_starts: Tensor) -> None:
    """`torch.ops.sgl_kernel.fast_topk`: the right picks, worst first."""
    assert (scores.dtype, scores.stride(1)) == (torch.float32, 1)
    _packed(indices, torch.int32, len(scores), K)
    _packed(lengths, torch.int32, len(scores))
    _packed(row_starts, torch.int32, len(scores))
    picks = topk.ragged_topk(scores=scores, row_start=row_starts, row_end=row_starts + lengths, k=K)
    long = lengths[:, None] > K
    indices.copy_(torch.where(long, picks.flip(1), picks))


def without_gpu(patch: pytest.MonkeyPatch) -> None:
    """Make the machine one without a GPU and without the real distributions."""
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(found, "_distribution", lambda _: "")


def _packed(tensor: Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()
    assert tensor.dim() == len(shape)
    assert all(want in {None, size} for size, want in zip(tensor.shape, shape, strict=True))
