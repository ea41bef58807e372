"""What growing contexts leave allocated: a fresh tensor for every chunk, or one workspace.

Only the allocations of a QSA layer are made: by default nothing is scored and no row picks.
The figures are those of vLLM "Reuse bounded prefill logits workspace", taken by this project.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from equivalence import memory
from equivalence.errors import UsageError
from equivalence.paths import qsa, workspace
from equivalence.paths.layer import check_whole
from equivalence.paths.parts import Selector
from equivalence.paths.qsa import Scorer
from refimpl.qsa import BLOCK_TOKENS

CONTEXTS = (3_200, 6_400, 12_800, 25_600, 51_200, 102_400, 204_800, 256_000)
"""Tokens of the longest request, call by call."""

_HEADS, _PAGE = 4, 64
_Layer: TypeAlias = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call, or what came before the first, which has 0 tokens.

    Attributes:
        context: tokens of the longest request.
        peak: most bytes alive during the call beyond those alive before the first step.
        live: bytes alive after it, beyond the same.
        reserved: bytes that the caching allocator took from the device up to now, beyond the same;
            None where there is no such allocator.
    """

    context: int
    peak: int
    live: int
    reserved: int | None


def probe(
    *,
    contexts: Sequence[int] = CONTEXTS,
    rows: int = 2_048,
    topk: int = 512,
    head_dim: int = 128,
    budget_bytes: int | None = None,
    device: torch.device | str = "cpu",
    scorer: Scorer | None = None,
    selector: Selector | None = None,
) -> dict[str, tuple[Step, ...]]:
    """Run a QSA layer over growing contexts in both ways, and measure after every call.

    Inputs are there before anything is counted, and the same for both ways; results of a call are
    dropped after it. On a CUDA device the allocator's cache is emptied before each way.

    Args:
        contexts: tokens of the longest request, call by call.
        rows: query rows of each call, the last ones of the context.
        topk: blocks a row picks.
        head_dim: of queries and keys.
        budget_bytes: of the scores of a chunk; 512 MiB where it is None.
        device: where.
        scorer: as in `qsa.layer`; None writes nothing.
        selector: as in `qsa.layer`; None writes pads.

    Returns:
        "per-call" and "workspace", each the state before the first call and after every call.

    Raises:
        UsageError: a number is no whole number above 0, or there is no context.
    """
    if not contexts:
        raise UsageError("contexts is empty: it takes the tokens of one call or more")
    numbers = {"rows": rows, "topk": topk, "head_dim": head_dim}
    numbers |= {f"contexts[{i}]": context for i, context in enumerate(contexts)}
    for name, value in numbers.items():
        check_whole(name, value)
    where = torch.device(device)
    pages = -(-max(contexts) // (BLOCK_TOKENS * _PAGE))
    zeros = partial(torch.zeros, dtype=torch.bfloat16, device=where)
    layer = partial(
        _call,
        q=zeros((rows, _HEADS, head_dim)),
        k_cache=zeros((pages, _PAGE, 1, head_dim)),
        page_table=torch.arange(pages, dtype=torch.int32, device=where)[None],
        topk=topk,
        budget_bytes=budget_bytes,
        scorer=_nothing if scorer is None else scorer,
        selector=_pads if selector is None else selector,
    )
    reserve = partial(
        workspace.reserve,
        rows=rows,
        widest=pages * _PAGE,
        topk=topk,
        budget_bytes=budget_bytes,
        device=where,
    )
    return {
        "per-call": _steps(layer, contexts, where, list),
        "workspace": _steps(layer, contexts, where, lambda: [reserve()]),
    }


def _steps(
    layer: _Layer,
    contexts: Sequence[int],
    device: torch.device,
    hold: Callable[[], list[workspace.Workspace]],
) -> tuple[Step, ...]:
    """The state after `hold`, and after each call over what it reserved."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    live = 0
    reserved: int | None = None
    steps = []
    held: list[workspace.Workspace] = []
    for context in (0, *contexts):
        with memory.measured(device) as meter:
            if context:
                layer(context=context, held=held)
            else:
                held = hold()
        peak, live = live + meter.peak, live + meter.live
        if meter.reserved is not None:
            reserved = (reserved or 0) + meter.reserved
        steps.append(Step(context=context, peak=peak, live=live, reserved=reserved))
    return tuple(steps)


def _call(
    *,
    context: int,
    held: list[workspace.Workspace],
    q: Tensor,
    **given: Any,  # noqa: ANN401 - what `qsa.layer` takes
) -> None:
    """One layer over the last rows of a context."""
    way = partial(qsa.reused, workspaces=held) if held else qsa.fresh
    positions = torch.arange(context - len(q), context, dtype=torch.int32, device=q.device)
    visible = ((positions + 1) // BLOCK_TOKENS).clamp(min=0)
    way(q=q, visible_blocks=visible, max_seq_len=context, **given)


def _nothing(*, out: Tensor, **_: object) -> None:
    """Score nothing: memory stays as it is."""
    del out


def _pads(*, out: Tensor, **_: Tensor) -> None:
    """Pick nothing."""
    out.fill_(-1)
