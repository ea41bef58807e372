"""Worlds whose ranks are threads of this process, for transports of device memory."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from equivalence.world.transport import Released, World

T = TypeVar("T")
TIMEOUT_S = 20.0


class Together:
    """What ranks say to each other, round by round."""

    def __init__(self, ranks: int) -> None:
        """Begin with no round."""
        self._ranks = ranks
        self._rounds = [0] * ranks
        self._told: dict[tuple[int, int], Any] = {}
        self.ended = threading.Event()
        self.store = HashStore()
        self.ends: list[Callable[[bool], None]] = []

    def exchange(self, rank: int, value: Any) -> list[Any]:  # noqa: ANN401 - what ranks say
        """Every rank's value of this round."""
        number = self._rounds[rank]
        self._rounds[rank] += 1
        self._told[number, rank] = value
        places = [(number, each) for each in range(self._ranks)]
        self.wait(lambda: all(place in self._told for place in places))
        return [self._told[place] for place in places]

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until it is ready, or the world has ended."""
        while not ready():
            if self.ended.is_set():
                raise Released
            time.sleep(1e-4)


def world(together: Together, rank: int, ranks: int, *, device: str | None = None) -> World:
    """One rank's side."""

    def share(name: str, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        said = together.exchange(rank, (name, dict(payload)))
        assert {each for each, _ in said} == {name}
        return [told for _, told in said]

    def all_reduce(tensor: Tensor) -> None:
        parts = together.exchange(rank, tensor.clone())
        tensor.copy_(torch.stack(parts).sum(0, dtype=tensor.dtype))

    return World(
        rank=rank,
        ranks=ranks,
        device=device,
        timeout=TIMEOUT_S,
        share=share,
        barrier=lambda ready: None if ready is None else together.wait(ready),
        all_reduce=all_reduce,
        agree=lambda number: min(together.exchange(rank, number)),
        store=lambda name: PrefixStore(name, together.store),
        at_end=together.ends.append,
    )


def run(ranks: int, function: Callable[[World], T], *, device: str | None = None) -> list[Any]:
    """What a function gives on every rank, or the error it raises there."""
    together = Together(ranks)
    found: list[Any] = [None] * ranks

    def one(rank: int) -> None:
        try:
            found[rank] = function(world(together, rank, ranks, device=device))
        except Exception as error:  # noqa: BLE001 - it is looked at
            found[rank] = error
            together.ended.set()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
