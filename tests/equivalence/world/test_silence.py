"""The sentence about whoever keeps ranks waiting, from the cells alone."""

import time

import pytest

from equivalence.world import control as cells
from equivalence.world import silence
from equivalence.world.control import Control
from equivalence.world.transport import Gone, Released, Silent


@pytest.fixture
def control() -> Control:
    """Three ranks that have begun, after two barriers of an earlier run."""
    made = cells.over(memoryview(bytearray(cells.size(3))), 3)
    for _ in range(2):
        for rank in range(3):
            cells.arrive(made, rank, cells.BARRIER)
    for rank in range(3):
        cells.begin(made, rank)
        cells.running(made, rank)
    return made


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let time pass."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + seconds)


def test_ranks_that_work_are_not_accused(control: Control) -> None:
    """Neither running, nor waiting for a short while, nor having ended is wrong."""
    assert silence.found(control, timeout=5) is None
    cells.arrive(control, 0, cells.BARRIER)
    assert silence.found(control, timeout=5) is None
    for rank in (1, 2):
        cells.arrive(control, rank, cells.BARRIER)
    for rank in range(3):
        cells.finished(control, rank)
    assert silence.found(control, timeout=5) is None


def test_ranks_that_do_not_come_are_named(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barrier is counted in this run; who waits elsewhere is told."""
    cells.arrive(control, 0, cells.BARRIER)
    later(monkeypatch, 6)
    assert silence.found(control, timeout=5) == (
        1,
        "ranks 1 2 did not reach barrier 1 within 5 s: they have done 0 0",
    )
    cells.arrive(control, 1, cells.BARRIER)
    cells.arrive(control, 2, cells.COLLECTIVE)
    assert silence.found(control, timeout=5) == (
        2,
        "rank 2 did not reach barrier 1 within 5 s: it has done 0 and is in collective 1",
    )


def test_a_rank_that_runs_for_too_long_is_silent(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it: it is told where it was seen last."""
    for rank in range(3):
        cells.arrive(control, rank, cells.BARRIER)
    cells.running(control, 1)
    cells.finished(control, 0)
    cells.finished(control, 2)
    later(monkeypatch, 6)
    sentence = "rank 1 was silent for 5 s after barrier 1"
    assert silence.found(control, timeout=5) == (1, sentence)
    assert silence.where(control, 1) == "after barrier 1"


def test_a_place_that_nobody_gets_out_of_is_nobodys_fault(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All came, and what is under the collective hangs; who got out and works is another matter."""
    for rank in range(3):
        cells.arrive(control, rank, cells.COLLECTIVE)
    later(monkeypatch, 6)
    sentence = "no rank finished collective 1 within 5 s"
    assert silence.found(control, timeout=5) == (None, sentence)
    error = silence.accused(control, timeout=5)
    assert (str(error), error.rank) == (sentence, None)
    cells.finished(control, 1)
    sentence = "ranks 0 2 did not finish collective 1 within 5 s"
    assert silence.found(control, timeout=5) == (0, sentence)


def test_a_wait_that_is_in_vain_ends_before_its_time(control: Control) -> None:
    """Unless it is over by then, or the world is."""
    with pytest.raises(Gone, match="rank 1") as caught:
        cells.wait(control, timeout=60, ready=lambda: False, doubt=lambda: Gone("rank 1", rank=1))
    assert caught.value.rank == 1
    seen: list[int] = []

    def doubt() -> Gone:
        seen.append(1)
        return Gone("rank 1")

    cells.wait(control, timeout=60, ready=lambda: bool(seen), doubt=doubt)
    cells.end(control)
    with pytest.raises(Released):
        cells.wait(control, timeout=60, ready=lambda: False, doubt=doubt)


def test_a_rank_has_a_minute_to_start(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing a function is no silence; a minute of it is."""
    cells.begin(control, 1)
    for rank in (0, 2):
        cells.ready(control, rank)
    assert silence.where(control, 1) == "before barrier 1"
    later(monkeypatch, 50)
    assert silence.found(control, timeout=5) is None
    later(monkeypatch, 20)
    assert silence.found(control, timeout=5) == (1, "rank 1 did not start within 60 s")


def test_a_rank_that_ended_is_accused_at_once(control: Control) -> None:
    """It comes to no barrier any more; after a failure it is no silence."""
    cells.arrive(control, 0, cells.BARRIER)
    cells.finished(control, 2)
    assert silence.found(control, timeout=5, ended=False) is None
    assert silence.found(control, timeout=5) == (
        2,
        "rank 2 ended without barrier 1, where rank 0 waits: it has done 0",
    )
    cells.end(control)
    assert silence.found(control, timeout=5) is None


def test_a_wait_ends_by_time_or_with_the_world(control: Control) -> None:
    """Each has its own error, with the sentence asked for."""
    with pytest.raises(Silent, match="who"):
        cells.wait(control, timeout=0.01, ready=lambda: False, accuse=lambda: Silent("who"))
    cells.end(control)
    with pytest.raises(Released):
        cells.wait(control, timeout=60, ready=lambda: False)
    cells.wait(control, timeout=0, ready=lambda: True)


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-9, "was killed by SIGKILL"),
        (-99, "was killed by signal 99"),
    ],
)
def test_how_a_process_ended_has_a_name(status: int, told: str) -> None:
    """Signals by name where they have one."""
    assert silence.died(status) == told
