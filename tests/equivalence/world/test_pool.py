"""A pool of ranks: what runs on it, how ranks end, and that nothing is left."""

import functools
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import rank_calls
import torch

from equivalence import assert_ranks_identical, ranks
from equivalence.errors import NotEquivalent, UsageError
from equivalence.ranks import Pool
from equivalence.replay import Outcome
from equivalence.world import launch, parcel, reports, segment, silence, wire

Start = Callable[[int], Pool]


@pytest.fixture(scope="module")
def pools() -> Iterator[Start]:
    """Pools of this module by their number of ranks."""
    with ranks.kept() as made:
        yield functools.cache(made)


@pytest.fixture
def four(pools: Start) -> Pool:
    """Four ranks."""
    return pools(4)


def launcher(pool: Pool) -> launch.Launcher:
    """What is behind a pool."""
    found = pool.carry.args[0]  # type: ignore[attr-defined]
    assert isinstance(found, launch.Launcher)
    return found


def gone(pid: int, *, within: float = 3.0) -> bool:
    """Whether a process has ended, if only nobody asked for its status."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def outputs(outcomes: list[Outcome], name: str = "result") -> list[object]:
    """One output of every rank, all of which succeeded."""
    assert [outcome.message for outcome in outcomes] == [""] * len(outcomes)
    return [outcome.outputs[name].tolist() for outcome in outcomes]


@pytest.mark.parametrize("number", [1, 4])
def test_every_rank_runs_the_function(pools: Start, number: int) -> None:
    """Each rank is a process with one thread, gets inputs of its own and settings."""
    given = torch.tensor([5, 6])
    outcomes = pools(number).run(rank_calls.numbers, inputs={"x": given}, add=100)
    assert outputs(outcomes, "rank") == list(range(number))
    assert outputs(outcomes, "x") == [[105 + 1 * r, 106 + r] for r in range(number)]
    assert outputs(outcomes, "threads") == [1] * number
    assert given.tolist() == [5, 6]
    pids = set(map(str, outputs(outcomes, "pid")))
    assert len(pids) == number
    assert str(os.getpid()) not in pids


def test_ranks_last_from_run_to_run(four: Pool) -> None:
    """Runs that succeed have the same processes."""
    first, second = (outputs(four.run(rank_calls.pids)) for _ in range(2))
    assert first == second


def test_two_hundred_rounds_with_late_ranks_have_no_wrong_byte(pools: Start) -> None:
    """Eight ranks of which another comes 10 ms late in each of 200 rounds read what was written."""
    outcomes = pools(8).run(rank_calls.rounds, count=200, delay=0.01)
    assert outputs(outcomes, "wrong") == [[0] * 8] * 8


@pytest.mark.parametrize("number", [1, 4])
def test_collectives_add_bytes(pools: Start, number: int) -> None:
    """u8 wraps, e4m3 adds as bytes, strided memory is written in place, and the least is found."""
    total = number * (number + 1) // 2
    for outcome in pools(number).run(rank_calls.collectives):
        assert outcome.message == ""
        assert outcome.outputs["u8"].tolist() == [100 * number % 256] * 5
        assert outcome.outputs["e4m3"].tolist() == [total] * 2
        assert outcome.outputs["strided"].tolist() == [[total, 0, 0, 0]] * 3
        assert outcome.outputs["least"].item() == 10 - (number - 1)


def test_a_link_says_what_it_is(four: Pool) -> None:
    """It is memory of the CPU that all ranks can read."""
    assert outputs(four.run(rank_calls.device_of)) == [True] * 4


def test_exported_memory_lasts_with_its_shape(four: Pool) -> None:
    """The same name and shape keep what they hold from run to run; another shape is zeros."""
    assert outputs(four.run(rank_calls.exports, shape=[3], write=10)) == [[0] * 4] * 4
    assert outputs(four.run(rank_calls.exports, shape=[3])) == [[30, 33, 36, 39]] * 4
    assert outputs(four.run(rank_calls.exports, shape=[2, 2])) == [[0] * 4] * 4
    assert outputs(four.run(rank_calls.exports, shape=[0])) == [[0] * 4] * 4


def test_exported_memory_is_the_users_alone(four: Pool) -> None:
    """It has mode 0600, and never a name: none is left, however ranks end."""
    assert outputs(four.run(rank_calls.mode)) == [[[0o600, 0]]] * 4


def test_ranks_must_export_alike(four: Pool) -> None:
    """Another shape or another name is refused on every rank, with both."""
    for outcome in four.run(rank_calls.exports_otherwise):
        assert outcome.rule == "crash"
        assert "exports 'pool' as [4, " in outcome.message
        assert "every rank gives the same shape" in outcome.message
    says = "ranks exchange different things: rank 0 'export pool 0', rank 1 'export "
    for rank, outcome in enumerate(four.run(rank_calls.exports_apart)):
        assert outcome.message.startswith(f"rank {rank} raised UsageError: {says}")


def test_memory_that_nobody_has_is_told(four: Pool) -> None:
    """Every rank says that there is no room, and which rank had none."""
    says = "rank 0 cannot export 'all': /dev/shm has "
    for rank, outcome in enumerate(four.run(rank_calls.exports_too_much)):
        assert outcome.rule == "out-of-memory"
        assert outcome.message.startswith(f"rank {rank} failed: {says}")


_ENDED = "; ranks 0 1 3 were ended"


@pytest.mark.parametrize(
    ("how", "rule", "message"),
    [
        ("killed", "crash", f"rank 2 was killed by SIGKILL after barrier 1{_ENDED}"),
        ("killed inside", "crash", f"rank 2 was killed by SIGKILL in barrier 2{_ENDED}"),
        ("dies after", "crash", f"rank 2 was killed by SIGKILL after barrier 2{_ENDED}"),
        ("segfault", "crash", f"rank 2 was killed by SIGSEGV after barrier 1{_ENDED}"),
        ("exits", "crash", f"rank 2 exited with status 3 after barrier 1{_ENDED}"),
        (
            "skips",
            "timeout",
            "rank 2 ended without barrier 2, where rank 0 waits: it has done 1",
        ),
        ("once more", "timeout", None),
        ("sleeps", "timeout", "rank 2 did not reach barrier 2 within 1 s: it has done 1"),
        ("stopped", "timeout", "rank 2 did not reach barrier 2 within 1 s: it has done 1"),
        (
            "elsewhere",
            "timeout",
            "rank 2 did not reach barrier 2 within 1 s: it has done 1 and is in collective 1",
        ),
        (
            "exports",
            "timeout",
            "rank 2 did not reach barrier 2 within 1 s: it has done 1 and is in exchange 1",
        ),
        (
            "kills host",
            "crash",
            "the process that started the ranks has died, and all of them with it",
        ),
    ],
)
def test_one_rank_ends_all_and_is_named(
    four: Pool, how: str, rule: str, message: str | None
) -> None:
    """A rank that dies or stays away ends all within its time limit, and each outcome names it."""
    before = [int(str(pid[0])) for pid in outputs(four.run(rank_calls.pids))]  # type: ignore[index]
    began = time.monotonic()
    outcomes = four.run(rank_calls.stumbles, rank=2, how=how, timeout=1)
    assert time.monotonic() - began < 2 + 1
    assert len({outcome.message for outcome in outcomes}) == 1
    assert {outcome.rule for outcome in outcomes} == {rule}
    assert message in {None, outcomes[0].message}
    blamed = {outcome.rank for outcome in outcomes}
    assert len(blamed) == 1
    assert how == "once more" or blamed == {None if how == "kills host" else 2}
    assert all(gone(pid) for pid in before)
    assert outputs(four.run(rank_calls.exports, shape=[1])) == [[0] * 4] * 4


@pytest.mark.parametrize(
    ("how", "rule", "says"),
    [
        ("raises", "crash", "rank 2 raised ValueError: no such page (rank_calls.py:"),
        ("leaves", "crash", "rank 2 raised SystemExit: 0 (rank"),
        ("memory", "out-of-memory", "rank 2 failed: no room"),
    ],
)
def test_what_a_rank_raises_releases_the_others(four: Pool, how: str, rule: str, says: str) -> None:
    """Long before the time limit the others say who raised what and where they waited."""
    began = time.monotonic()
    outcomes = four.run(rank_calls.stumbles, rank=2, how=how)
    assert time.monotonic() - began < 5
    assert outcomes[2].rule == rule
    assert outcomes[2].message.startswith(says)
    assert [outcome.rank for outcome in outcomes] == [2] * 4
    for rank in (0, 1, 3):
        assert outcomes[rank].rule == "crash"
        assert outcomes[rank].message == f"{outcomes[2].message}; this rank waited in barrier 2"


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (3, "rank 0 adds up 8 bytes and rank 1 adds up 3 bytes: all ranks bring the same size"),
        (0, "rank 0 adds up 8 bytes and rank 1 agrees on a number: all ranks bring the same size"),
    ],
)
def test_a_sum_of_two_sizes_is_refused_on_every_rank(four: Pool, size: int, says: str) -> None:
    """By what rank 0 and the first other one bring, before any process ends for it."""
    for rank, outcome in enumerate(four.run(rank_calls.unequal, rank=1, size=size)):
        assert outcome.message.startswith(f"rank {rank} raised ValueError: {says} (rank_calls.py:")


def test_ranks_that_catch_a_refused_sum_go_on(four: Pool) -> None:
    """Whoever is fast leaves the sizes that a slow one still reads."""
    assert outputs(four.run(rank_calls.goes_on, rounds=41)) == [[20, 4]] * 4


@pytest.mark.parametrize(
    ("statuses", "message", "rank"),
    [
        ({1: -9}, "rank 1 was killed by SIGKILL after barrier 1; rank 0 was ended", 1),
        ({}, "rank 1 ended after barrier 1; rank 0 was ended", 1),
        (None, "the process that started the ranks has died, and all of them with it", None),
    ],
)
def test_a_dead_rank_is_named_however_much_is_known_of_it(
    statuses: dict[int, int] | None, message: str, rank: int | None
) -> None:
    """Its host may not answer in time, which is no death of the host."""
    found = reports.Found(dead={1: "after barrier 1"})
    lost = Outcome(rule="crash", message=message, rank=rank)
    assert reports.outcomes(found, statuses, 2) == [lost] * 2


def test_the_first_that_waited_in_vain_speaks_for_all() -> None:
    """Every rank has the same outcomes, whoever told its own first."""
    away = {
        rank: {"rule": "timeout", "message": f"rank {1 - rank} was silent", "rank": 1 - rank}
        for rank in (0, 1)
    }
    lost = Outcome(rule="timeout", message="rank 1 was silent", rank=1)
    assert reports.told(away, 3, made=lambda _: Outcome()) == [lost] * 3


def test_bools_are_handed_over_byte_for_byte(four: Pool) -> None:
    """To ranks and from them: one that differs in a byte that is true either way is found."""
    given = torch.tensor([0, 1, 2, 255], dtype=torch.uint8)
    outcomes = four.run(rank_calls.odd_bools, inputs={"x": given.view(torch.bool)})
    assert outputs(outcomes, "bytes") == [given.tolist()] * 4
    assert [int(each.outputs["made"].view(torch.uint8)) for each in outcomes] == [1, 2, 3, 4]
    with pytest.raises(NotEquivalent):
        assert_ranks_identical(outcomes)


def test_threads_take_turns_on_a_pool(four: Pool) -> None:
    """Each has its own result."""

    def add(number: int) -> list[Outcome]:
        return four.run(rank_calls.numbers, inputs={"x": torch.tensor(0)}, add=number)

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(add, range(8)))
    assert [outputs(each, "x") for each in made] == [[n, n + 1, n + 2, n + 3] for n in range(8)]


def test_ranks_that_all_refuse_say_so_themselves(four: Pool) -> None:
    """Each outcome is the rank's own."""
    for rank, outcome in enumerate(four.run(rank_calls.refuses)):
        assert outcome.message.startswith(
            f"rank {rank} raised UsageError: rank {rank} has no room (rank_calls"
        )


def test_what_is_raised_after_a_release_is_a_release(four: Pool) -> None:
    """The first failure is told, not what followed from it."""
    outcomes = four.run(rank_calls.wraps)
    assert outcomes[0].message.startswith("rank 0 raised ValueError: first")
    assert outcomes[1].message.startswith("rank 0 raised ValueError: first")


def test_a_rank_that_raises_releases_those_that_exchange_names(four: Pool) -> None:
    """Who waits for names is released as who waits in a barrier."""
    outcomes = four.run(rank_calls.raises_while_others_wait)
    assert outcomes[0].message.startswith("rank 0 raised ValueError: no")
    assert outcomes[3].message.endswith("; this rank waited in exchange 1")


def test_a_rank_killed_before_its_memory_is_opened_is_named(four: Pool) -> None:
    """As at any other time."""
    outcomes = four.run(rank_calls.dies_with_memory, rank=1)
    assert outcomes[0].message.startswith("rank 1 was killed by SIGKILL before barrier 1")


def memories() -> list[str]:
    """Segments of which this process holds a descriptor, or a mapping that has one."""
    gc.collect()
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sorted(link for path in paths if f"{segment.FOLDER}/" in (link := str(path.readlink())))


def test_runs_that_are_broken_off_leave_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of outputs that nobody reads any more, nor of ranks that could not be forked."""

    def unread(_: object, handle: int) -> None:
        os.close(handle)
        raise KeyboardInterrupt

    def unanswered(_: object, __: object, found: reports.Found) -> None:
        if found.memory:
            raise KeyboardInterrupt

    def nowhere(*_: object) -> None:
        raise OSError(24, "Too many open files")

    before = memories()
    with ranks.start(2) as pool:
        for home, name, broken, error in (
            (parcel, "unpack", unread, KeyboardInterrupt),
            (reports, "_answer", unanswered, KeyboardInterrupt),
            (socket, "socketpair", nowhere, UsageError),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(home, name, broken)
                with pytest.raises(error):
                    pool.run(rank_calls.pids)
            launch.end(launcher(pool))
            assert memories() == before, name


def test_ranks_that_died_between_runs_are_replaced(four: Pool) -> None:
    """A rank or the host killed while idle costs no run."""
    before = outputs(four.run(rank_calls.pids))
    os.kill(int(str(before[1][0])), signal.SIGKILL)  # type: ignore[index]
    time.sleep(0.05)
    after = outputs(four.run(rank_calls.pids))
    assert not {str(pid) for pid in before} & {str(pid) for pid in after}
    host = launcher(four).host
    assert host is not None
    host.process.kill()
    host.process.wait()
    assert len(outputs(four.run(rank_calls.pids))) == 4


def test_the_default_time_limit_is_thirty_seconds() -> None:
    """A silent rank ends all after 30 s where nobody said otherwise, and no later than a second."""
    assert ranks.TIMEOUT == 30.0
    with ranks.start(2) as pool:
        assert pool.timeout == 30.0
        pool.run(rank_calls.nothing)
        began = time.monotonic()
        outcomes = pool.run(rank_calls.stumbles, rank=1, how="sleeps")
        assert 29.5 < time.monotonic() - began < 31.5
    sentence = "rank 1 did not reach barrier 2 within 30 s: it has done 1"
    assert [outcome.message for outcome in outcomes] == [sentence] * 2


def test_a_result_that_is_no_output_is_told(four: Pool) -> None:
    """None is no output; a list, a number by name and a sparse tensor are refused."""
    assert [outcome.outputs for outcome in four.run(rank_calls.nothing)] == [{}] * 4
    for what, message in {
        "list": "the function returned list: it returns tensors by name",
        "names": "the function returned 'a' (int): it returns tensors",
        "sparse": "the function's result cannot be read: a torch.sparse_coo tensor on cpu",
    }.items():
        outcome = four.run(rank_calls.returns, what=what)[3]
        assert outcome.rule == "not-compared"
        assert outcome.message.startswith(f"rank 3 failed: {message}")


def test_receipts_of_a_rank_come_with_its_outcome(four: Pool) -> None:
    """What ran on a rank is told."""
    (path,) = four.run(rank_calls.leaves_receipt)[3].paths
    assert (path.kernel, path.rows, path.arguments) == ("a.kernel", (3,), {"flag": True})


def test_a_function_within_a_class_is_found(four: Pool) -> None:
    """Its qualified name is enough."""
    assert outputs(four.run(rank_calls.Held.inside)) == [0, 1, 2, 3]


def test_a_function_must_have_a_name(four: Pool) -> None:
    """Lambdas, closures, partials and replaced functions are refused with what would be right."""

    def closure(_link: object) -> None: ...

    for function in (lambda _link: None, closure):
        with pytest.raises(UsageError, match="define it at the top level of a module"):
            four.run(function)
    with pytest.raises(UsageError, match="partial has no name by which ranks could import it"):
        four.run(functools.partial(rank_calls.nothing))

    @functools.wraps(rank_calls.nothing)
    def other(_link: object) -> None: ...

    with pytest.raises(UsageError, match=r"rank_calls.nothing is another object"):
        four.run(other)


def test_settings_and_inputs_are_checked_first(four: Pool) -> None:
    """Settings are JSON, inputs are tensors, and no name is given twice."""
    x = torch.zeros(1)
    for given, message in (
        ({"add": {1, 2}}, "setting add is {1, 2}, no JSON value"),
        ({"add": float("nan")}, "setting add is nan, no JSON value"),
        ({"inputs": {"x": x}, "x": 1}, "x is given twice"),
        ({"link": 1}, "link is given twice"),
        ({"inputs": {"link": x}}, "link is no input"),
        ({"inputs": {"x": 1}}, "input 'x' is int: inputs are tensors"),
        ({"timeout": 0}, "timeout is 0: it is a number of seconds above 0"),
        ({"timeout": True}, "timeout is True"),
    ):
        with pytest.raises(UsageError) as caught:
            four.run(rank_calls.numbers, **given)
        assert str(caught.value).startswith(message)


def test_inputs_that_find_no_room_are_every_ranks_outcome(
    four: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback: each rank is out of memory."""
    four.run(rank_calls.nothing)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    outcomes = four.run(rank_calls.numbers, inputs={"x": torch.zeros(9)})
    assert [outcome.rule for outcome in outcomes] == ["out-of-memory"] * 4


def test_a_closed_pool_runs_nothing(pools: Start) -> None:
    """After its block a pool says so, and its processes have ended."""
    del pools
    with ranks.start(2) as pool:
        pids = [int(str(pid[0])) for pid in outputs(pool.run(rank_calls.pids))]  # type: ignore[index]
        host = launcher(pool).host
        assert host is not None
    assert all(gone(pid, within=0.1) for pid in [*pids, host.process.pid])
    with pytest.raises(UsageError, match="this pool of ranks is closed"):
        pool.run(rank_calls.pids)


@pytest.mark.parametrize(
    ("number", "given", "message"),
    [
        (0, {}, "0 ranks: it is a number from 1 to 64"),
        (65, {}, "65 ranks"),
        (True, {}, "True ranks"),
        ("8", {}, "'8' ranks"),
        (2, {"transport": "tcp"}, "transport is 'tcp': it is shm, cuda or symmetric"),
        (2, {"timeout": float("inf")}, "timeout is inf"),
    ],
)
def test_what_cannot_be_started_is_refused(
    number: int, given: dict[str, object], message: str
) -> None:
    """A sentence says what would be right, before any process is started."""
    with (
        pytest.raises(UsageError, match=message.replace("(", r"\(")),
        ranks.start(number, **given),  # type: ignore[arg-type]
    ):
        pass


def test_a_device_that_a_transport_has_not_is_refused() -> None:
    """Transport shm is the CPU's memory."""
    with ranks.start(1, device="cuda:0") as pool:
        (outcome,) = pool.run(rank_calls.nothing)
    says = "rank 0 raised UsageError: transport shm is memory of the CPU"
    assert outcome.message.startswith(says)


def test_a_host_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence."""
    monkeypatch.setattr(launch, "_PROGRAM", "raise SystemExit(3)")
    with (
        ranks.start(2) as pool,
        pytest.raises(UsageError, match="the process that starts ranks did not answer"),
    ):
        pool.run(rank_calls.nothing)


def test_a_host_whose_launcher_goes_while_it_forks_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It cannot answer, and ends by itself."""

    def leaves(asker: launch.Launcher, message: dict[str, object], handles: list[int]) -> None:
        assert asker.host is not None
        wire.send(asker.host.link, message, handles)
        raise KeyboardInterrupt

    with ranks.start(2) as pool:
        host = launcher(pool).host
        assert host is not None
        monkeypatch.setattr(launch, "_ask", leaves)
        with pytest.raises(KeyboardInterrupt):
            pool.run(rank_calls.nothing)
    assert host.process.returncode == 0
    assert capfd.readouterr() == ("", "")


def test_a_host_that_is_stopped_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a pool takes no longer than its limits, and ends all processes."""
    with ranks.start(2) as pool:
        pids = [int(str(pid[0])) for pid in outputs(pool.run(rank_calls.pids))]  # type: ignore[index]
        host = launcher(pool).host
        assert host is not None
        os.kill(host.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(launch, "_ENDING", 0.2)
    assert all(gone(pid) for pid in [*pids, host.process.pid])


def test_a_rank_that_stops_between_two_runs_is_named_in_time() -> None:
    """What ranks ran before needs no start: the limit is the one that was asked for."""
    with ranks.start(2, timeout=1) as pool:
        pids = [int(str(pid[0])) for pid in outputs(pool.run(rank_calls.pids))]  # type: ignore[index]
        os.kill(pids[1], signal.SIGSTOP)
        begun = time.monotonic()
        told = {outcome.message for outcome in pool.run(rank_calls.pids)}
        assert time.monotonic() - begun < silence.START / 2
    assert all("rank 1 did not start within 1 s" in message for message in told)
    assert all(gone(pid) for pid in pids)


def test_a_function_may_have_its_own_groups(four: Pool, tmp_path: Path) -> None:
    """A default group of torch.distributed that a function made does not disturb a link's."""
    store = str(tmp_path / "store")
    assert outputs(four.run(rank_calls.own_group, store=store)) == [[4, 8, 4]] * 4


def test_an_error_without_words_is_told(four: Pool) -> None:
    """Neither a broken str nor odd characters reach the user."""
    messages = [outcome.message for outcome in four.run(rank_calls.speechless)]
    assert messages[0].startswith("rank 0 raised SpeechlessError: no message (rank_calls.py:")
    assert messages[1].startswith("rank 1 raised ValueError: \\x1b[31mred (rank_calls.py:")
