"""Pages composed by ranks on GPUs, every way timed, with one rank a GPU."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import finish
from equivalence import ranks
from equivalence.case import Case
from equivalence.compose import steps
from equivalence.engines import pointer_gather
from equivalence.paths.ipc import step
from equivalence.paths.ipc.candidate import Pool
from equivalence.paths.ipc.peers import Peers
from equivalence.paths.ipc.ways import WAYS
from equivalence.replay import Outcome
from equivalence.world.link import Link

KERNEL = "direct, one kernel"
"""The direct way with the gather of `engines.pointer_gather`."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the part `exchange` runs with; the defaults are the claims', a test takes small ones.

    Attributes:
        device: as `ranks.start` takes it; None for a GPU a rank.
        transports: between ranks.
        ranks: processes; None for one a GPU.
        ways: names of `paths.ipc.ways.WAYS`, legacy first.
        batches: a scenario and which of its steps.
        layers: of each kind.
        scale: divides the scenarios.
        rounds: of which the best counts.
        timeout: seconds that a rank may be silent.
    """

    device: str | None = None
    transports: tuple[str, ...] = ("cuda", "symmetric")
    ranks: int | None = None
    ways: tuple[str, ...] = tuple(WAYS)
    batches: tuple[tuple[str, int], ...] = (
        ("chunk", 0),
        ("cache-hits", 2),
        *((name, number) for name in ("bs-1-4", "bs-5-8", "bs-9-12") for number in range(4)),
    )
    layers: int = 8
    scale: int = 1
    rounds: int = 10
    timeout: float = 60.0


def kernels() -> str:
    """What the part `exchange` calls beside torch's own kernels."""
    told = []
    if torch.cuda.is_available():
        nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        told.append("NCCL " + ".".join(map(str, nccl)))
    with suppress(PackageNotFoundError):
        told.append(f"triton {version('triton')}")
    return "; ".join(told) or "none"


def exchange(setup: Setup) -> Iterator[dict[str, Any]]:
    """Time and bytes of every way on one batch after another, with one rank a GPU."""
    count = setup.ranks or torch.cuda.device_count()
    for transport in setup.transports:
        with ranks.start(
            count, transport=transport, timeout=setup.timeout, device=setup.device
        ) as pool:
            silent: set[str] = set()
            for (scenario, number), waits in product(setup.batches, ("host", "stream")):
                if waits in silent:
                    continue
                case = _case(scenario, number, count, setup)
                about = {
                    "batch": case.name,
                    "requests": len(case.inputs["prefix_lens"]),
                    "slots": len(case.inputs["slot_pages"]),
                    "ranks": count,
                    "transport": transport,
                    "waits": waits,
                }
                rows = list(_rows(setup, pool, case, about))
                yield from rows
                if any(row["way"] is None for row in rows):
                    silent.add(waits)  # each further try would take its whole time limit


@lru_cache(maxsize=1)
def _case(scenario: str, number: int, count: int, setup: Setup) -> Case:
    """One step of a scenario."""
    return steps.sequence(scenario, cp=count, layers=setup.layers, scale=setup.scale)[number]


def _rows(
    setup: Setup, pool: Pool, case: Case, about: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """One batch: a row a way, and a row that says why where there is none."""
    names = [*setup.ways, KERNEL]
    settings: dict[str, Any] = {"names": names, "rounds": setup.rounds, "waits": about["waits"]}
    settings |= case.params
    outcomes = pool.run(time_ways, inputs=dict(case.inputs), **settings)
    if failed := [outcome for outcome in outcomes if outcome.rule]:
        yield {**about, "way": None, "why": f"{failed[0].rule}: {failed[0].message}"}
        return
    base: dict[str, float] = {}
    for index, name in enumerate(names):
        row = _measured(outcomes, index)
        if row is None:
            continue
        base = base or row
        ratios = {f"{key}_to_legacy": row[key] / base[key] for key in ("seconds", "wall")}
        yield {**about, "way": name, **row, **ratios}


def _measured(outcomes: Sequence[Outcome], index: int) -> dict[str, Any] | None:
    """The figures of a way: of a round its slowest rank's, and of rounds the best."""
    parts = [outcome.outputs for outcome in outcomes]
    if not all(bool(part["ran"][index]) for part in parts):
        return None
    figures = {
        key: float(torch.stack([part[key][index] for part in parts]).amax(0).min())
        for key in ("seconds", "wall")
    }
    summed, read = (
        max(int(part[key][index]) for part in parts) for key in ("summed_bytes", "read_bytes")
    )
    same = all(bool(part["same"][index]) for part in parts)
    return {**figures, "summed_bytes": summed, "read_bytes": read, "same": same}


@dataclass(kw_only=True)
class Moved:
    """Bytes of one batch on one rank.

    Attributes:
        summed: of the tensors that were added up over ranks.
        read: of pages in other ranks' memory.
    """

    summed: int = 0
    read: int = 0


def time_ways(
    link: Link,
    *,
    names: list[str],
    rounds: int,
    waits: str,
    **call: Any,  # noqa: ANN401 - inputs and parameters of the op
) -> dict[str, Tensor]:
    """Time every way on this rank, in turn, and compare its pages with the first one's.

    Args:
        link: of this rank.
        names: ways; a transport or device that cannot go one leaves its `ran` false.
        rounds: of each.
        waits: "host" for the link's barrier, "stream" for one that only streams wait in.
        call: inputs and parameters of compose_pages.

    Returns:
        seconds and wall [names, rounds]: until the stream had composed all layers, and until every
        rank had; ran, same, summed_bytes and read_bytes [names].
    """
    barrier = getattr(link.barrier, "on_stream", None) if waits == "stream" else link.barrier
    kernel = pointer_gather.available(link.device)
    seconds = torch.zeros(len(names), rounds, dtype=torch.float64)
    wall, figures = torch.zeros_like(seconds), torch.zeros(4, len(names), dtype=torch.int64)
    ran, same, summed, read = figures
    want: list[Tensor] = []
    turn = 0
    for index, name in enumerate(names):
        if barrier is None or (name == KERNEL and not kernel):
            continue
        ready = step.prepare(link, way="direct" if name == KERNEL else name, turn=turn, **call)
        peers = replace(ready.peers, barrier=barrier)
        if name == KERNEL:
            peers = replace(peers, gather=pointer_gather.Gather())
        layers = ready.given.layers
        link.barrier()
        moved = Moved()
        pages = [dense.clone() for *_, dense in _run(ready, counting(peers, moved), turn)]
        want = want or pages
        ran[index], summed[index], read[index] = 1, moved.summed, moved.read
        same[index] = all(map(torch.equal, pages, want))
        for each in range(rounds):
            turn += layers
            took = _timed(link, lambda: _drain(ready, peers, turn))  # noqa: B023 - called at once
            seconds[index, each], wall[index, each] = took
        turn += layers
    return {
        "seconds": seconds,
        "wall": wall,
        "ran": ran,
        "same": same,
        "summed_bytes": summed,
        "read_bytes": read,
    }


def counting(peers: Peers, moved: Moved) -> Peers:
    """The same side of the world, its bytes counted."""

    def gather(table: Sequence[Tensor], reads: Sequence[Any], out: Tensor) -> None:
        for each in reads:
            if each.source % peers.ranks != peers.rank:
                moved.read += len(each.rows) * out.shape[-1]
        peers.gather(table, reads, out)

    def all_reduce(tensor: Tensor) -> None:
        moved.summed += tensor.nbytes
        peers.all_reduce(tensor)

    return replace(peers, gather=gather, all_reduce=all_reduce)


def _run(ready: step.Prepared, peers: Peers, turn: int) -> Iterator[tuple[int, str, Tensor]]:
    return WAYS[ready.way].run(peers, ready.plan, ready.rows, turn=turn)


def _drain(ready: step.Prepared, peers: Peers, turn: int) -> None:
    """Compose all layers."""
    for _ in _run(ready, peers, turn):
        pass


def _timed(link: Link, call: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a call on the stream, and by the clock until every rank is done."""
    link.barrier()
    finish(link.device)
    events = []
    if link.device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    start = perf_counter()
    for event in events[:1]:
        event.record()
    call()
    for event in events[1:]:
        event.record()
    finish(link.device)
    own = perf_counter() - start
    link.barrier()
    whole = perf_counter() - start
    return (float(events[0].elapsed_time(events[1])) / 1e3 if events else own), whole
