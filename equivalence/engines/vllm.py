"""QSA of vLLM: `score` is the scorer of a path, the others are candidates of their op.

The kernels are Triton's, in one file: models/qwen4_exp/nvidia/ops/qsa_indexer.py of the wheel.
EQUIVALENCE_VLLM_QSA names that file where vLLM itself is not installed; it is loaded with stand-ins
for the five modules of vLLM that it imports, which are gone again once it is loaded.
"""

import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from equivalence import plain, receipt, specs
from equivalence.engines import found, inputs
from equivalence.errors import UsageError
from equivalence.paths import parts
from equivalence.paths.layer import check_whole
from equivalence.paths.parts import Selector
from equivalence.schema import TensorSpec

FILE = "EQUIVALENCE_VLLM_QSA"
"""Environment variable: the file qsa_indexer.py of a vLLM wheel."""

_MODULE = "vllm.models.qwen4_exp.nvidia.ops.qsa_indexer"
_HOW = f"install vllm 0.33.0, or let {FILE} name the qsa_indexer.py of its wheel"
_LOGITS, _EXPAND = "vllm.qsa_indexer._prefill_logits", "vllm.qsa_indexer.expand_qsa_block_indices"
_PARTS = {
    "_prefill_logits": "q k_cache page_table query_start_loc visible_blocks logits_workspace"
    " max_query_len logits_width query_offset num_queries",
    "expand_qsa_block_indices": "block_indices query_positions visible_blocks compress_ratio"
    " token_topk out",
}
"""What is called of the file, and what it takes; later versions take something else."""
_MOST = 1 << 31
_STRIDED = ("q", "k_cache", "page_table")


def score(
    *,
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    query_start_loc: Tensor | None,
    page_size: int,
    out: Tensor,
) -> None:
    """Write `out[i, :visible_blocks[i]]` and nothing else: a scorer of `paths.qsa`.

    Args:
        q: bf16 or e4m3 [T, H, D].
        k_cache: the dtype of q, [pages, page_size, 1, D], pages at any stride.
        page_table: int32 [R, table_width]; no page of a visible block lies outside the cache.
        visible_blocks: int32 [T].
        query_start_loc: int32 [R + 1], first row of each request; None where R is 1.
        page_size: keys a page.
        out: fp32 [T, width], contiguous.

    Raises:
        UsageError: the kernel is not here, or does not take these tensors, or a row sees more
            blocks than `out` is wide: they would be written into the next row.
    """
    module = _module()
    tensors = _tensors(q, k_cache, page_table, visible_blocks, query_start_loc)
    _expect(tensors | {"out": out}, page_size)
    width, widest = out.shape[1], page_table.shape[1] * page_size
    most = int(visible_blocks.max()) if len(out) else 0
    if not most <= width <= widest:
        raise UsageError(
            f"{_LOGITS}.out is {width} wide; a row sees {most} of the page table's {widest} columns"
        )
    if out.numel():
        _launch(module, tensors, out.view(-1), width=width, rows=range(len(out)))


def qsa_logits(
    *,
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    query_start_loc: Tensor | None = None,
    page_size: int = 64,
    rows_per_call: int | None = None,
    workspace: Tensor | None = None,
) -> dict[str, Tensor]:
    """Candidate of `qsa_logits`, all rows of a step given to each call, as the engine does.

    Args:
        q: this and what follows as in `score`.
        k_cache: likewise.
        page_table: likewise.
        visible_blocks: likewise.
        query_start_loc: likewise.
        page_size: keys a page.
        rows_per_call: rows that a call scores; None scores all at once.
        workspace: fp32, flat; each call writes a view at its head, which is copied before the next.
            None lets calls write into the result.

    Returns:
        "logits": fp32 [T, table_width * page_size]; past `visible_blocks` whatever memory held.

    Raises:
        UsageError: as `score`, or rows_per_call is below 1, or the workspace is too small.

    Source: vLLM 0.33.0 qsa_indexer.py `qsa_select_paged_prefill`.
    """
    module = _module()
    if rows_per_call is not None:
        check_whole("rows_per_call", rows_per_call)
    tensors = _tensors(q, k_cache, page_table, visible_blocks, query_start_loc)
    flat = {} if workspace is None else {"workspace": workspace}
    _expect(tensors | flat, page_size)
    rows, width = len(q), page_table.shape[1] * page_size
    step = min(rows, rows_per_call or rows)
    if workspace is not None and len(workspace) < step * width:
        held = len(workspace)
        raise UsageError(f"{_LOGITS}.workspace holds {held:,} scores; {step} x {width} are more")
    out = torch.empty((rows, width), dtype=torch.float32, device=q.device)
    for first in range(0, rows if width else 0, max(1, step)):
        some = range(first, min(first + step, rows))
        mine = out[some.start : some.stop]
        target = mine.view(-1) if workspace is None else workspace[: mine.numel()]
        _launch(module, tensors, target, width=width, rows=some)
        if workspace is not None:
            mine.copy_(target.view_as(mine))
    return {"logits": out}


def expand_blocks(
    *, block_ids: Tensor, positions: Tensor, visible_blocks: Tensor, block_size: int = 4
) -> Tensor:
    """Candidate of `expand_blocks`; shapes are those of `refimpl.qsa.expand_blocks`.

    Raises:
        UsageError: the kernel is not here, or it does not take these tensors.
    """
    module = _module()
    tensors = {"block_ids": block_ids, "positions": positions, "visible_blocks": visible_blocks}
    inputs.expect(_EXPAND, specs.OPS["expand_blocks"].inputs, tensors, strided=("block_ids",))
    rows, n = block_ids.shape
    packed = block_ids.new_empty((rows, (n + 1) * block_size))
    if rows:
        kernel = module.expand_qsa_block_indices
        kernel(block_ids, positions, visible_blocks, block_size, n * block_size, packed)
        _leave(_EXPAND, block_ids, rows=rows)
    return packed


def qsa_indexer(
    *,
    positions: Tensor,
    visible_blocks: Tensor,
    topk: int,
    block_size: int = 4,
    selector: str | Selector = "reference",
    **scored: Any,  # noqa: ANN401 - what `qsa_logits` takes
) -> dict[str, Tensor]:
    """Candidate of `qsa_indexer`: the two Triton kernels, and a selector between them.

    The selector is a name in `parts.SELECTORS` or a function like them: vLLM's own is no Triton
    kernel and not in the file.

    Returns:
        logits, block_ids int32 [T, topk] and packed.

    Raises:
        UsageError: as `qsa_logits` and `expand_blocks`, or no selector has that name.
    """
    write = parts.selector(selector)
    logits = qsa_logits(visible_blocks=visible_blocks, **scored)
    blocks = visible_blocks.new_empty((len(visible_blocks), topk))
    first, visible = torch.zeros_like(visible_blocks), visible_blocks.clamp(min=0)
    write(scores=logits["logits"], column=first, visible=visible, out=blocks)
    packed = expand_blocks(
        block_ids=blocks, positions=positions, visible_blocks=visible_blocks, block_size=block_size
    )
    return logits | {"block_ids": blocks, "packed": packed}


def _tensors(
    q: Tensor, k_cache: Tensor, page_table: Tensor, visible: Tensor, edges: Tensor | None
) -> dict[str, Tensor]:
    """What the kernel takes of a step, in its order."""
    if edges is None:
        if len(page_table) != 1:
            raise UsageError(
                f"{_LOGITS}.page_table has {len(page_table)} requests; give query_start_loc"
            )
        edges = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    return {
        "q": q,
        "k_cache": k_cache,
        "page_table": page_table,
        "query_start_loc": edges,
        "visible_blocks": visible,
    }


def _expect(tensors: Mapping[str, Tensor], page_size: int) -> None:
    wanted = {
        **specs.OPS["qsa_logits"].inputs,
        "out": TensorSpec(("F32",), ("T", "width"), optional=True),
        "workspace": TensorSpec(("F32",), ("cells",), optional=True),
    }
    inputs.expect(_LOGITS, wanted, tensors, sizes={"page_size": page_size}, strided=_STRIDED)
    if tensors["q"].dtype is not tensors["k_cache"].dtype:
        q, k = (str(tensors[n].dtype).removeprefix("torch.") for n in ("q", "k_cache"))
        raise UsageError(f"{_LOGITS}.q is {q} and k_cache {k}; the kernel wants one dtype")


def _launch(
    module: ModuleType, tensors: Mapping[str, Tensor], flat: Tensor, *, width: int, rows: range
) -> None:
    """Score some rows of the step into the head of `flat`."""
    q = tensors["q"]
    if width * len(rows) > _MOST:
        raise UsageError(
            f"{_LOGITS} counts scores in 32 bits; {len(rows):,} x {width:,} are too many in a call"
        )
    # No request has more rows than the step; programs past its own return at once.
    module._prefill_logits(*tensors.values(), flat, len(q), width, rows.start, len(rows))  # noqa: SLF001 - the kernel has no public name
    _leave(_LOGITS, q, rows=len(rows), width=width, dtype=str(q.dtype).removeprefix("torch."))


def _leave(kernel: str, tensor: Tensor, *, rows: int, **arguments: receipt.Argument) -> None:
    path, arch = os.environ.get(FILE), found.arch(tensor)
    version = found.version_of_file(path) if path else found.version("vllm")
    arguments["triton"] = found.version("triton")
    receipt.leave(kernel, rows=rows, version=version, arch=arch, **arguments)


def _module() -> ModuleType:
    """The module of the kernels, looked at for what is called of it."""
    path = os.environ.get(FILE)
    if path:
        module, where = _of_file(path), f"{FILE} names {path!r}, which"
    else:
        found.module("vllm", how=_HOW)
        module, where = found.module(_MODULE, how=_HOW), _MODULE
    for name, takes in _PARTS.items():
        part = getattr(module, name, None)
        if not callable(part):
            raise UsageError(plain.line(f"{where} has no {name}; vLLM 0.33.0 has"))
        got = " ".join(inspect.signature(part).parameters)
        if got != takes:
            raise UsageError(plain.line(f"{where} has a {name} of another version, of {got}"))
    return module


@cache
def _of_file(path: str) -> ModuleType:
    """The file as a module, loaded once."""
    spec = spec_from_file_location("qsa_indexer", path) if Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise UsageError(plain.line(f"{FILE} names {path!r}, which is no Python file"))
    triton = found.module("triton", how=f"{FILE} names a file of Triton kernels")
    language = found.module("triton.language", how="triton is not whole")
    module = module_from_spec(spec)
    try:
        with _stand_ins(triton, language):
            spec.loader.exec_module(module)
    # A file runs whatever it likes.
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        sentence = f"{FILE} names {path!r}, which cannot be loaded: {said}"
        raise UsageError(plain.line(sentence)) from error
    return module


@contextmanager
def _stand_ins(triton: ModuleType, language: ModuleType) -> Iterator[None]:
    """Modules with what the file imports of vLLM, in place of any that are there."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {},
        "vllm.model_executor.warmup.jit_warmup_triton_helper": {"TritonWarmupTensor": object},
        "vllm.platforms": {"current_platform": SimpleNamespace()},
        "vllm.triton_utils": {"tl": language, "triton": triton},
        "vllm.utils.math_utils": {"round_up": lambda x, step: -(-x // step) * step},
    }
    before = {name: sys.modules[name] for name in contents if name in sys.modules}
    for name, content in contents.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    try:
        yield
    finally:
        for name in contents:
            sys.modules.pop(name, None)
        sys.modules.update(before)
