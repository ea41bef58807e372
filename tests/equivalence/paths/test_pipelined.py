"""The pipeline's streams are in an order in which no chunk is read too early or reused too soon."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import batches
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence.case import Case, held
from equivalence.judge import check
from equivalence.paths import parts
from equivalence.paths.chunked import original
from equivalence.paths.parts import Logits
from equivalence.paths.pipelined import ONE_AFTER_ANOTHER, Name, Streams, pipelined
from equivalence.planted.paths import deaf
from equivalence.verdict import Status
from refimpl import fast

Work = tuple[str, int]


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls this small are over before anything is compiled for them."""
    monkeypatch.setattr(fast, "_LEAST_CELLS", 1 << 30)


@dataclass(kw_only=True)
class Device:
    """A device that runs nothing, and knows of each work what surely ran before it.

    Attributes:
        now: the stream that work is given to.
        done: what has surely ended before anything new starts on a stream.
        before: of each work, what has surely ended before it starts.
        log: every call, in order.
    """

    now: Name = "main"
    done: dict[Name, frozenset[Work]] = field(
        default_factory=lambda: {"main": frozenset(), "side": frozenset()}
    )
    before: dict[Work, frozenset[Work]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def streams(self) -> Streams:
        """Its streams; an event is what had been given to its stream."""

        def record(name: Name) -> frozenset[Work]:
            self.log.append(f"record {name}")
            return self.done[name]

        def wait(name: Name, event: frozenset[Work]) -> None:
            self.log.append(f"{name} waits")
            self.done[name] |= event

        @contextmanager
        def on(name: Name) -> Iterator[None]:
            outer, self.now = self.now, name
            yield
            self.now = outer

        return Streams(record=record, wait=wait, on=on)

    def run(self, kind: str) -> Work:
        """Work of a kind on the present stream: the next of its kind."""
        work = (kind, sum(other == kind for other, _ in self.before))
        self.log.append(f"{kind} {work[1]} on {self.now}")
        self.before[work] = self.done[self.now]
        self.done[self.now] |= {work}
        return work

    def score(self, **rows: Tensor) -> Logits:
        """The torch scorer as work of this device."""
        self.run("score")
        return parts.torch_logits(**rows)

    def select(self, **rows: Tensor) -> None:
        """The torch selector as work of this device."""
        self.run("select")
        parts.torch_topk(**rows)


def faults(device: Device) -> list[str]:
    """Where the order of a finished call lets a chunk be read too early or reused too soon."""
    chunks = sum(kind == "score" for kind, _ in device.before)
    found = []
    for i in range(chunks):
        if ("score", i) not in device.before["select", i]:
            found.append(f"chunk {i} may be picked before it is scored")
        if i > 1 and ("select", i - 2) not in device.before["score", i]:
            found.append(f"chunk {i} may overwrite chunk {i - 2} before it is picked")
        if ("select", i) not in device.done["main"]:
            found.append(f"the caller may read chunk {i} before it is picked")
    return found


def run(case: Case, device: Device, streams: Streams, rows: int) -> dict[str, Tensor]:
    """A pipelined call in chunks of so many rows."""
    return batches.call(
        case,
        pipelined,
        style="vllm",
        budget_bytes=2 * 4 * rows * len(case.inputs["k"]),
        scorer=device.score,
        selector=device.select,
        observe=lambda rows, _: device.log.append(f"observe {rows.start}-{rows.stop}"),
        streams=streams,
    )


def cold() -> Case:
    """Nine rows of one request."""
    return batches.case(batches.BATCHES["cold"])


def test_a_chunk_is_picked_under_the_scoring_of_the_next() -> None:
    """Three chunks: what is given to which stream, and who waits for whom.

    The observer is told before the selector may spoil the scores.
    """
    device = Device()
    run(cold(), device, device.streams(), 3)
    assert device.log == [
        "score 0 on main",
        "observe 0-3",
        "record main",
        "side waits",
        "select 0 on side",
        "record side",
        "score 1 on main",
        "observe 3-6",
        "record main",
        "side waits",
        "select 1 on side",
        "record side",
        "main waits",
        "score 2 on main",
        "observe 6-9",
        "record main",
        "side waits",
        "select 2 on side",
        "record side",
        "record side",
        "main waits",
    ]
    assert faults(device) == []
    # Scoring does not wait for the chunk right before it: else nothing would overlap.
    assert ("select", 0) not in device.before["score", 1]
    assert ("select", 1) not in device.before["score", 2]


@given(rows=st.integers(1, 9))
def test_the_order_holds_for_every_cut(rows: int) -> None:
    """From nine chunks to one."""
    device = Device()
    got = run(cold(), device, device.streams(), rows)
    assert sum(kind == "score" for kind, _ in device.before) == -(-9 // rows)
    assert faults(device) == []
    want = batches.call(cold(), original, scorer="torch", selector="torch")
    assert all(torch.equal(got[name], want[name]) for name in want)


LOST = {
    0: ["chunk 0 may be picked before it is scored"],
    1: ["chunk 1 may be picked before it is scored"],
    2: ["chunk 2 may overwrite chunk 0 before it is picked"],
    3: ["chunk 2 may be picked before it is scored"],
    4: ["chunk 3 may overwrite chunk 1 before it is picked"],
    5: ["chunk 3 may be picked before it is scored"],
    6: [
        "the caller may read chunk 2 before it is picked",
        "the caller may read chunk 3 before it is picked",
    ],
}


@pytest.mark.parametrize("to", LOST)
def test_every_wait_is_needed(to: int) -> None:
    """Four chunks make seven waits; a pipeline that leaves any one out breaks one rule."""
    device = Device()
    run(batches.case([(8, 9)]), device, deaf(device.streams(), to=to), 2)
    assert faults(device) == LOST[to]


def test_the_caller_waits_though_a_part_fails() -> None:
    """A selector that raises at chunk 1: chunk 0 is still waited for."""
    device = Device()
    calls: list[int] = []

    def fails(**rows: Tensor) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("no memory")
        device.select(**rows)

    case = cold()
    with pytest.raises(RuntimeError, match="no memory"):
        batches.call(
            case,
            pipelined,
            style="vllm",
            budget_bytes=8 * 9,
            scorer=device.score,
            selector=fails,
            streams=device.streams(),
        )
    assert ("select", 0) in device.done["main"]


def test_no_rows_touch_no_stream() -> None:
    """An empty call records and waits for nothing."""
    device = Device()
    case = batches.case([(0, 5)])
    batches.call(case, pipelined, streams=device.streams())
    assert device.log == []


def test_each_chunk_has_half_the_budget() -> None:
    """Two chunks of two rows are alive where `chunked` has one of four."""
    seen: list[slice] = []
    case = cold()
    batches.call(
        case,
        pipelined,
        style="vllm",
        budget_bytes=4 * 4 * 9,
        observe=lambda rows, _: seen.append(rows),
    )
    assert [(rows.start, rows.stop) for rows in seen] == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9)]


def test_a_cpu_runs_one_after_another_and_is_the_reference() -> None:
    """Without streams the order is the same, and the verdict EQUAL."""
    for streams in (None, ONE_AFTER_ANOTHER):
        way = partial(pipelined, style="vllm", budget_bytes=150, keep_logits=True)
        verdict = check(cold(), partial(way, streams=streams))
        assert (verdict.status, verdict.findings) == (Status.EQUAL, ())


@pytest.mark.gpu
def test_real_streams_give_the_picks_of_one_call() -> None:
    """On a device, many small chunks with a slow selector equal one call, ten times over."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    case = batches.case([(200, 900), (300, 700)], tie_rich=False, topk=64)
    case = held(case, device="cuda")

    def slow(**rows: Tensor) -> None:
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # torch has no types here
        parts.torch_topk(**rows)

    want = batches.call(case, original, scorer="torch", selector="torch")
    for _ in range(10):
        got = batches.call(
            case,
            pipelined,
            style="vllm",
            budget_bytes=2 * 4 * 16 * 1600,
            scorer="torch",
            selector=slow,
        )
        assert all(torch.equal(got[name], want[name]) for name in want)
