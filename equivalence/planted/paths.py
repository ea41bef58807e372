"""Faulty dense paths: candidates of prefill_indexer, wrong in one way each, and a deaf pipeline."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from equivalence.paths import parts
from equivalence.paths.chunked import chunked, original
from equivalence.paths.layer import Layer, allocate, keep, layer_of, score, select
from equivalence.paths.parts import Logits, Scorer, Selector
from equivalence.paths.pipelined import Event, Name, Streams

CHUNK_ROWS = 3
SWITCH_ROW = 64


@dataclass(frozen=True, kw_only=True)
class PathFault:
    """One faulty path.

    Attributes:
        candidate: called like `chunked.chunked`, without style and budget_bytes.
        shows: what it does to the outputs, in one sentence.
        rows: the fewest rows of a call that can show it.
    """

    candidate: Callable[..., dict[str, Tensor]]
    shows: str
    rows: int


def forgets_row_offset(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as `chunked` takes it
    """Score and rank every chunk with the windows of rows 0 .. n-1."""
    rows, start, end = len(call["q"]), call["row_start"], call["row_end"]
    first = torch.arange(rows, device=start.device) % CHUNK_ROWS
    return _cut(**{**call, "row_start": start[first], "row_end": end[first]})


def last_chunk_short(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as `chunked` takes it
    """Leave the last row of the last chunk out."""
    whole = _rows_of(call, slice(0, -1))
    outputs = {}
    for name, short in _cut(**whole).items():
        outputs[name] = short.new_empty((len(call["q"]), short.shape[1]))
        outputs[name][:-1] = short
    return outputs


def view_outlives_chunk(
    *,
    scorer: str | Scorer = "reference",
    selector: str | Selector = "reference",
    keep_logits: bool = False,
    **call: Any,  # noqa: ANN401 - as `chunked` takes it
) -> dict[str, Tensor]:
    """Reuse one buffer, and pick from a chunk's view once the next chunk is already in it."""
    layer = layer_of(call, view_outlives_chunk)
    outputs = allocate(layer, keep_logits=keep_logits)
    buffer = layer.weights.new_empty(CHUNK_ROWS * len(layer.k))
    late: tuple[slice, Logits] | None = None
    for first in range(0, len(layer.q), CHUNK_ROWS):
        rows = slice(first, min(first + CHUNK_ROWS, len(layer.q)))
        logits = score(layer, rows, scorer)
        keep(layer, rows, logits, outputs)
        view = buffer[: logits.values.numel()].view(logits.values.shape)
        view.copy_(logits.values)
        _pick(layer, late, selector, outputs)
        late = rows, replace(logits, values=view)
    _pick(layer, late, selector, outputs)
    return outputs


def lost_from_row_64(*, scores: Tensor, column: Tensor, visible: Tensor, out: Tensor) -> None:
    """A selector that takes another way from row 64 of a call on, and there loses the best pick."""
    parts.reference_topk(scores=scores, column=column, visible=visible, out=out)
    late = slice(SWITCH_ROW, None)
    wide = out.new_empty((len(out[late]), out.shape[1] + 1))
    parts.reference_topk(scores=scores[late], column=column[late], visible=visible[late], out=wide)
    ranked = visible[late, None] > wide.shape[1]
    out[late] = torch.where(ranked, wide[:, 1:], out[late])


FAULTS: Mapping[str, PathFault] = MappingProxyType(
    {
        "chunk-forgets-row-offset": PathFault(
            candidate=forgets_row_offset,
            shows="from the second chunk on, rows have the windows of the first chunk's rows",
            rows=CHUNK_ROWS + 1,
        ),
        "last-chunk-short": PathFault(
            candidate=last_chunk_short,
            shows="the last row of the call is never written",
            rows=1,
        ),
        "view-outlives-chunk": PathFault(
            candidate=view_outlives_chunk,
            shows="every chunk but the last is picked from the scores of the one after it",
            rows=CHUNK_ROWS + 1,
        ),
        "row-64-loses-winner": PathFault(
            candidate=partial(original, selector=lost_from_row_64),
            shows="rows from 64 of a call on miss their best column; in smaller calls none does",
            rows=SWITCH_ROW + 1,
        ),
    }
)


def deaf(streams: Streams, *, to: int) -> Streams:
    """Streams that leave out the wait of this number, counted from 0."""
    calls: list[Name] = []

    def wait(name: Name, event: Event) -> None:
        calls.append(name)
        if len(calls) != to + 1:
            streams.wait(name, event)

    return replace(streams, wait=wait)


def _rows_of(call: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    """The call with these of its rows."""
    mine = {"q", "weights", "row_start", "row_end", "row_to_request", "topk_indices_offset"}
    if call.get("row_to_request") is None:
        mine |= {"block_table"}
    return {
        name: value[rows] if name in mine and isinstance(value, Tensor) else value
        for name, value in call.items()
    }


def _cut(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as `chunked` takes it
    """`chunked` in chunks of CHUNK_ROWS rows."""
    budget = 4 * CHUNK_ROWS * max(1, len(call["k"]))
    return chunked(**call, style="vllm", budget_bytes=budget)


def _pick(
    layer: Layer,
    chunk: tuple[slice, Logits] | None,
    selector: str | Selector,
    outputs: dict[str, Tensor],
) -> None:
    if chunk is not None:
        select(layer, *chunk, selector, outputs)
