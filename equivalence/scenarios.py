"""Scenarios: the prefills of a serving engine, made from a seed, one layer-forward at a time.

Real are the shapes: the prompts of 8K, 60K and 200K tokens, the batch of four, the prefix hit and
the chunk of 16,384 on which SGLang compared the bounded dense prefill indexer of DeepSeek-V4.1
with the one before it, a K being 1,024. Windows are `refimpl.geometry.ragged_windows`.

Assumed is how a batch is cut: a forward takes requests in order until the chunk is full.
Invented are the values, which no model made: `texts` says how. Real keys hold their position, so
that repeated text was seen to tie on ratio 2 alone; here it ties exactly on every ratio.
Invented too are the lengths of prefix-hit, repeated-text, tool-calls and mixed-decode.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equivalence import texts
from equivalence.case import Case
from equivalence.errors import UsageError
from equivalence.texts import Device
from refimpl.geometry import ragged_windows

__all__ = ["SCENARIOS", "Forward", "Request", "Scenario", "count", "forwards"]

_RATIOS = (1, 2, 4)
_LEAST_TOPK = 4


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a batch, in tokens.

    Attributes:
        prompt: tokens that this batch computes; 1 is a decode row.
        prefix: tokens before them whose keys are there already.
        text: "cold", "repeated" (1,024 tokens again and again) or "tools" (turns of 2,048 tokens,
            of which the first 1,536 are the same in each).
        stream: requests of one stream and text are the same text, in the same slots.
        shared: its first tokens are those of stream 0.
    """

    prompt: int
    prefix: int = 0
    text: str = "cold"
    stream: int = 0
    shared: int = 0

    @property
    def end(self) -> int:
        """Tokens of the request once this batch is done."""
        return self.prefix + self.prompt

    def __post_init__(self) -> None:
        """Refuse what no text could be."""
        if self.text not in texts.TEXTS:
            raise UsageError(f"no text is named {self.text!r}: one of {', '.join(texts.TEXTS)}")
        if self.prompt < 1 or self.stream < 0 or not 0 <= self.shared <= self.prefix:
            raise UsageError(
                f"a request has prompt {self.prompt}, prefix {self.prefix}, shared {self.shared},"
                f" stream {self.stream}: prompt >= 1, stream >= 0, 0 <= shared <= prefix"
            )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Batches that an engine prefills one after another.

    Attributes:
        name: how cases call it.
        steps: one tuple of requests a batch.
        chunk: tokens that one forward computes at most.
        page: columns of a stream that stand together in the cache.
    """

    name: str
    steps: tuple[tuple[Request, ...], ...]
    chunk: int = 16_384
    page: int = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """One layer of one forward.

    Attributes:
        scenario: its name.
        chunk: number of the forward in the scenario, from 0.
        layer: number of the layer, from 0.
        ratio: tokens a key column stands for.
        case: a `prefill_indexer` with `k_slots`, int64 [L].
    """

    scenario: str
    chunk: int
    layer: int
    ratio: int
    case: Case


SCENARIOS: Mapping[str, Scenario] = {
    name: Scenario(name=name, steps=steps)
    for name, steps in {
        "cold-8k": ((Request(prompt=8_192),),),
        "cold-60k": ((Request(prompt=61_440),),),
        "cold-200k": ((Request(prompt=204_800),),),
        "batch-4x7k": (tuple(Request(prompt=7_168, stream=i) for i in range(4)),),
        "prefix-hit": (
            (Request(prompt=28_672),),
            (
                Request(prefix=28_672, prompt=1_024),
                Request(prefix=28_672, prompt=2_048, stream=1, shared=28_672),
            ),
        ),
        "repeated-text": ((Request(prompt=32_768, text="repeated"),),),
        "tool-calls": (
            (Request(prompt=8_192, text="tools"),),
            *((Request(prefix=2_048 * i, prompt=2_048, text="tools"),) for i in range(4, 10)),
        ),
        "mixed-decode": (
            (
                Request(prefix=8_192, prompt=4_096),
                *(Request(prefix=4_096 * i, prompt=1, stream=i) for i in range(1, 9)),
            ),
        ),
    }.items()
}


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

    Layer i has ratio `ratios[i % len(ratios)]`. Making one takes about twice the bytes of its q.
    A short prompt selects nothing at a high ratio: 8,192 tokens are 2,048 columns of ratio 4,
    of which engines pick 512.

    Args:
        scenario: a name in `SCENARIOS`, or one of your own.
        seed: of everything.
        scale: divides tokens, chunk, page, periods of the text and topk; decode rows stay.
        layers: of each ratio.
        ratios: 1, 2 or 4 each.
        heads: a multiple of 8, at least 16.
        head_dim: a multiple of 32.
        topk: picks a row, before scaling; the same for every ratio.
        device: where the tensors are.

    Raises:
        UsageError: no scenario has that name, or a number is none of those.
    """
    found = _scaled(scenario, scale)
    _check(layers, ratios)
    if topk // scale < _LEAST_TOPK:
        raise UsageError(f"topk {topk} at scale {scale} is {topk // scale}; it stays 4 or more")
    if heads < 16 or heads % 8 or head_dim < 32 or head_dim % 32:  # noqa: PLR2004 - the kernel's
        raise UsageError(
            f"heads is {heads} and head_dim {head_dim}; multiples of 8, from 16 on, and of 32"
        )

    def make(chunk: int, batch: Sequence[Request], layer: int) -> Forward:
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
        case = Case(
            op="prefill_indexer",
            inputs=inputs,
            params={"topk": topk // scale},
            arithmetic="deep_gemm.sm90",
            name=f"{found.name} chunk {chunk} layer {layer} ratio {ratio}",
            provenance={"scenario": found.name, "seed": str(seed), "scale": str(scale)},
        )
        return Forward(scenario=found.name, chunk=chunk, layer=layer, ratio=ratio, case=case)

    return (
        make(chunk, batch, layer)
        for chunk, batch in enumerate(_chunks(found))
        for layer in range(layers * len(ratios))
    )


def count(
    scenario: str | Scenario, *, scale: int = 1, layers: int = 1, ratios: Sequence[int] = _RATIOS
) -> int:
    """How many layer-forwards `forwards` gives.

    Raises:
        UsageError: as `forwards`.
    """
    _check(layers, ratios)
    return len(_chunks(_scaled(scenario, scale))) * layers * len(ratios)


def _scaled(scenario: str | Scenario, scale: int) -> Scenario:
    """The scenario with every length divided by `scale`, prompts never below one token."""
    found = scenario if isinstance(scenario, Scenario) else SCENARIOS.get(scenario)
    if found is None:
        raise UsageError(f"no scenario is named {scenario!r}: one of {', '.join(SCENARIOS)}")
    if not 1 <= scale <= found.chunk:
        raise UsageError(f"scale is {scale}; it is 1 to the chunk, {found.chunk:,}")
    steps = tuple(
        tuple(
            replace(
                request,
                prompt=max(1, request.prompt // scale),
                prefix=request.prefix // scale,
                shared=request.shared // scale,
            )
            for request in step
        )
        for step in found.steps
    )
    page = max(1, found.page // scale)
    return replace(found, steps=steps, chunk=found.chunk // scale, page=page)


def _check(layers: int, ratios: Sequence[int]) -> None:
    if not ratios:
        raise UsageError("no ratio is given")
    for ratio in set(ratios) - set(_RATIOS):
        raise UsageError(f"ratio {ratio!r}: it is 1, 2 or 4")
    if layers < 1:
        raise UsageError(f"layers is {layers}; each ratio has 1 or more")


def _chunks(scenario: Scenario) -> list[list[Request]]:
    """What each forward computes, in order: requests, or parts of them."""
    plan: list[list[Request]] = []
    for step in scenario.steps:
        room = 0
        for request in step:
            start = request.prefix
            while start < request.end:
                if not room:
                    plan.append([])
                    room = scenario.chunk
                part = min(room, request.end - start)
                plan[-1].append(replace(request, prefix=start, prompt=part))
                start, room = start + part, room - part
    return plan


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
