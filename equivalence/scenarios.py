"""Scenarios: the prefills of a serving engine, made from a seed, one layer-forward at a time.

The shapes are those of `workloads`, windows those of `refimpl.geometry.ragged_windows`.
Invented are the values, which no model made: `texts` says how. Real keys hold their position, so
that repeated text was seen to tie on ratio 2 alone; here it ties exactly on every ratio.

In two-level the layers of a ratio share a mask, as those of DeepSeek-V4.1 do on ratio 1 or 2: the
first is a source, and the others pick inside what the reference publishes of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor

from equivalence import texts, workloads
from equivalence.case import JSON, Case
from equivalence.errors import UsageError
from equivalence.texts import Device
from equivalence.workloads import SCENARIOS, Request, Scenario
from refimpl import fast, forms, masks, scoring
from refimpl.geometry import ragged_windows

__all__ = ["SCENARIOS", "Forward", "Request", "Scenario", "count", "forwards"]

_RATIOS = (1, 2, 4)
_LEAST_TOPK = 4
_CELLS = 1 << 24
"""Scores of a source layer that are held at once."""

Role = Literal["", "source", "consumer"]
Mask = Callable[[int], Tensor]
"""The mask that the source of a ratio publishes in this forward."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """One layer of one forward.

    Attributes:
        scenario: its name.
        chunk: number of the forward in the scenario, from 0.
        layer: number of the layer, from 0.
        ratio: tokens a key column stands for.
        case: a `prefill_indexer` with `k_slots`, int64 [L]; of a source with `topk_blocks`, of a
            consumer with `mask`, bool [T, lc].
        role: "source", "consumer", or "" where no mask is published.
    """

    scenario: str
    chunk: int
    layer: int
    ratio: int
    case: Case
    role: Role = ""


def forwards(
    scenario: str | Scenario,
    *,
    seed: int,
    scale: int = 1,
    layers: int = 1,
    ratios: Sequence[int] = _RATIOS,
    heads: int = 64,
    head_dim: int = 128,
    topk: int = 2048,
    device: Device = None,
) -> Iterator[Forward]:
    """The layer-forwards of a scenario, made as they are asked for: chunk by chunk, all layers.

    Layer i has ratio `ratios[i % len(ratios)]`. Making one takes about twice the bytes of its q;
    before the first consumer of a forward the reference scores all rows of its source.
    A short prompt selects nothing at a high ratio: 8,192 tokens are 2,048 columns of ratio 4,
    of which engines pick 512.

    Args:
        scenario: a name in `SCENARIOS`, or one of your own.
        seed: of everything.
        scale: divides tokens, chunk, page, periods of the text, topk and blocks, of which one
            stays; decode rows stay.
        layers: of each ratio.
        ratios: 1, 2 or 4 each.
        heads: a multiple of 8, at least 16.
        head_dim: a multiple of 32.
        topk: picks a row, before scaling; the same for every ratio.
        device: where the tensors are.

    Raises:
        UsageError: no scenario has that name, or a number is none of those.
    """
    found = workloads.scaled(scenario, scale)
    _check(layers, ratios)
    if topk // scale < _LEAST_TOPK:
        raise UsageError(f"topk {topk} at scale {scale} is {topk // scale}; it stays 4 or more")
    if heads < 16 or heads % 8 or head_dim < 32 or head_dim % 32:  # noqa: PLR2004 - the kernel's
        raise UsageError(
            f"heads is {heads} and head_dim {head_dim}; multiples of 8, from 16 on, and of 32"
        )

    def make(chunk: int, batch: Sequence[Request], layer: int, mask: Mask) -> Forward:
        ratio = ratios[layer % len(ratios)]
        text = [
            texts.tokens(
                request.text,
                end=request.end,
                seed=seed,
                stream=request.stream,
                shared=request.shared,
                scale=scale,
                device=device,
            )
            for request in batch
        ]
        new = torch.cat([t[request.prefix :] for t, request in zip(text, batch, strict=True)])
        salted = texts.salt(seed, layer, ratio)
        q, weights = texts.queries(new, salted=salted, heads=heads, head_dim=head_dim)
        columns = [texts.keys(t, ratio=ratio, salted=salted, head_dim=head_dim) for t in text]
        inputs = {
            "q": q,
            # fp8 is not concatenated on every device: its bytes are.
            "k": torch.cat([k.view(torch.uint8) for k, _ in columns]).view(q.dtype),
            "k_scale": torch.cat([k_scale for _, k_scale in columns]),
            "weights": weights,
            **_windows(batch, ratio=ratio, device=device),
            "k_slots": _slots(found, batch, seed=seed, ratio=ratio, device=device),
        }
        params: dict[str, JSON] = {"topk": topk // scale}
        role: Role = ""
        if found.topk_blocks:
            role = "source" if layer == ratios.index(ratio) else "consumer"
        if role == "source":
            params["topk_blocks"] = found.topk_blocks
        if role == "consumer":
            inputs["mask"] = mask(ratio)
        case = Case(
            op="prefill_indexer",
            inputs=inputs,
            params=params,
            arithmetic="deep_gemm.sm90",
            name=f"{found.name} chunk {chunk} layer {layer} ratio {ratio} {role}".rstrip(),
            provenance={"scenario": found.name, "seed": str(seed), "scale": str(scale)},
        )
        return Forward(
            scenario=found.name, chunk=chunk, layer=layer, ratio=ratio, case=case, role=role
        )

    return (
        forward
        for chunk, batch in enumerate(workloads.chunks(found))
        for forward in _layers(partial(make, chunk, batch), layers * len(ratios))
    )


def count(
    scenario: str | Scenario, *, scale: int = 1, layers: int = 1, ratios: Sequence[int] = _RATIOS
) -> int:
    """How many layer-forwards `forwards` gives.

    Raises:
        UsageError: as `forwards`.
    """
    _check(layers, ratios)
    return len(workloads.chunks(workloads.scaled(scenario, scale))) * layers * len(ratios)


def _layers(make: Callable[[int, Mask], Forward], many: int) -> Iterator[Forward]:
    """The layers of one forward, whose sources publish for its consumers."""
    sources: dict[int, Case] = {}
    mask = cache(lambda ratio: _published(sources[ratio]))
    for layer in range(many):
        forward = make(layer, mask)
        if forward.role == "source":
            sources[forward.ratio] = forward.case
        yield forward


def _published(source: Case) -> Tensor:
    """The reference's mask of a source layer, bool [T, lc]."""
    start, end = source.inputs["row_start"], source.inputs["row_end"]
    columns, blocks = forms.aligned(visible=end - start), source.params["topk_blocks"]
    assert isinstance(blocks, int)  # noqa: S101 - it was put there above
    mask = torch.zeros(len(start), columns, dtype=torch.bool, device=start.device)
    step = max(1, _CELLS // max(1, len(source.inputs["k"])))
    for first in range(0, len(start), step):
        some = slice(first, first + step)
        scores = scoring.mqa_logits(
            q=source.inputs["q"][some],
            k=source.inputs["k"],
            k_scale=source.inputs["k_scale"],
            weights=source.inputs["weights"][some],
            row_start=start[some],
            row_end=end[some],
            accumulate=fast.accumulate,
        )
        part = masks.publish(
            scores=scores, row_start=start[some], row_end=end[some], topk_blocks=blocks
        )
        mask[some, : part.shape[1]] = part
    return mask


def _check(layers: int, ratios: Sequence[int]) -> None:
    if not ratios:
        raise UsageError("no ratio is given")
    for ratio in set(ratios) - set(_RATIOS):
        raise UsageError(f"ratio {ratio!r}: it is 1, 2 or 4")
    if layers < 1:
        raise UsageError(f"layers is {layers}; each ratio has 1 or more")


def _windows(batch: Sequence[Request], *, ratio: int, device: Device) -> dict[str, Tensor]:
    """The windows of every row, and its request."""
    lengths = [[request.prompt, request.end] for request in batch]
    extend, total = torch.tensor(lengths, device=device).unbind(1)
    start, end, request = ragged_windows(extend_lens=extend, seq_lens=total, ratio=ratio)
    return {"row_start": start, "row_end": end, "row_to_request": request}


def _slots(
    scenario: Scenario, batch: Sequence[Request], *, seed: int, ratio: int, device: Device
) -> Tensor:
    """The slot of every column, int64 [L]: whole pages of a stream, the same in every layer."""
    requests = [request for step in scenario.steps for request in step]
    streams = 1 + max(request.stream for request in requests)
    pages = -(-max(request.end for request in requests) // scenario.page)
    salted = texts.salt(seed, ratio)
    pool = texts.slots(pages=streams * pages, page_size=scenario.page, salted=salted, device=device)
    pool = pool.view(streams, -1)
    held = []
    for request in batch:
        # A column that reaches into the request's own text is its own.
        shared = request.shared // ratio
        held += [pool[0, :shared], pool[request.stream, shared : request.end // ratio]]
    return torch.cat(held)
