"""Row chunks in a pipeline: chunk N is picked on a side stream while chunk N + 1 is scored."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from equivalence.paths.chunked import Observe, row_chunks
from equivalence.paths.layer import allocate, keep, layer_of, score, select
from equivalence.paths.parts import Logits, Scorer, Selector

Name: TypeAlias = Literal["main", "side"]
Event: TypeAlias = Any
ALIVE = 2


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The caller's stream "main", a stream "side", and events between them.

    Attributes:
        record: an event at the end of what was given to a stream so far.
        wait: what a stream is given from now on runs after an event.
        on: inside, work is given to a stream.
    """

    record: Callable[[Name], Event]
    wait: Callable[[Name, Event], None]
    on: Callable[[Name], AbstractContextManager[Any]]


ONE_AFTER_ANOTHER = Streams(
    record=lambda _: None, wait=lambda _name, _event: None, on=lambda _: nullcontext()
)
"""A device that runs everything in the order it is given."""


def pipelined(
    *,
    style: str = "v4.1",
    budget_bytes: int | None = None,
    scorer: str | Scorer = "reference",
    selector: str | Selector = "reference",
    keep_logits: bool = False,
    observe: Observe | None = None,
    streams: Streams | None = None,
    **call: Any,  # noqa: ANN401 - the inputs and parameters of prefill_indexer
) -> dict[str, Tensor]:
    """`chunked` with two chunks alive, each of half the budget.

    Four rules order the streams:
    a chunk is picked after its scores are there; a chunk is scored after the last but one before
    it was picked, since it may get that one's memory; scores are dropped only after "main" waits
    for their selection; and "main" waits for the last selection before this returns or raises.

    Args:
        style: as in `chunked`.
        budget_bytes: as in `chunked`, of both chunks together.
        scorer: as in `original`.
        selector: as in `original`.
        keep_logits: as in `original`.
        observe: told the scores of each chunk, on "main".
        streams: those of the inputs' device where None.
        call: the fields of `layer.Layer`.

    Returns:
        As `original`.

    Raises:
        UsageError: as `chunked`.
    """
    layer = layer_of(call, pipelined)
    cut = row_chunks(
        rows=len(layer.q),
        columns=len(layer.k),
        heads=layer.q.shape[1],
        style=style,
        budget_bytes=budget_bytes,
        alive=ALIVE,
    )
    lanes = _of_device(layer.q.device) if streams is None else streams
    outputs = allocate(layer, keep_logits=keep_logits)
    alive: list[tuple[Logits, Event]] = []
    try:
        for rows in cut:
            if len(alive) == ALIVE:
                # The memory of these scores belongs to "main": after the wait it may reuse it.
                lanes.wait("main", alive[0][1])
                del alive[0]
            logits = score(layer, rows, scorer)
            keep(layer, rows, logits, outputs)
            if observe is not None:
                observe(rows, logits)
            scored = lanes.record("main")
            lanes.wait("side", scored)
            with lanes.on("side"):
                select(layer, rows, logits, selector, outputs)
            alive.append((logits, lanes.record("side")))
    finally:
        if cut:
            lanes.wait("main", lanes.record("side"))
    return outputs


def _of_device(device: torch.device) -> Streams:
    if device.type != "cuda":
        return ONE_AFTER_ANOTHER
    lanes = {"main": torch.cuda.current_stream(device), "side": _side(device)}
    return Streams(
        record=lambda name: lanes[name].record_event(),
        wait=lambda name, event: lanes[name].wait_event(event),
        on=lambda name: torch.cuda.stream(lanes[name]),
    )


@cache
def _side(device: torch.device) -> "torch.cuda.Stream":
    # One for all calls: the allocator keeps memory by stream.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
