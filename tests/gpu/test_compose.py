"""Ranks on GPUs compose the reference's pages; elsewhere each test skips."""

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gpu_ranks
import pytest
import torch

from benchmarks import hopper_exchange
from equivalence import judge, ranks
from equivalence.case import Case
from equivalence.compose import running as composing
from equivalence.compose import steps
from equivalence.engines import pointer_gather
from equivalence.paths.ipc import candidate
from equivalence.paths.ipc.faulty import Fault
from equivalence.paths.ipc.ways import WAYS
from equivalence.ranks import Pool
from equivalence.verdict import Status
from equivalence.world import segment

pytestmark = pytest.mark.gpu
RANKS, LAYERS, SCALE = 8, 3, 4
SCENARIOS = ("chunk", "cache-hits", "mixed", "page-tail", "bs-9-12")


@cache
def cases_of(scenario: str, cp: int) -> list[Case]:
    """The steps of a scenario, shorter than in production, their pages whole."""
    return steps.sequence(scenario, cp=cp, layers=LAYERS, scale=SCALE)


@pytest.fixture(scope="module")
def gpus() -> int:
    """How many there are; skip without one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.cuda.device_count()


@pytest.fixture(scope="module")
def shared(gpus: int) -> Iterator[Pool]:
    """Eight ranks on all GPUs in turn."""
    del gpus
    with ranks.start(RANKS, transport="cuda", timeout=90) as pool:
        yield pool


@pytest.fixture(scope="module", params=["cuda", "symmetric"])
def apart(gpus: int, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """One rank a GPU."""
    if gpus < 2:
        pytest.skip(f"one rank a GPU: {gpus} GPU is no world of ranks")
    with ranks.start(gpus, transport=request.param, timeout=90) as pool:
        yield pool


def all_equal(pool: Pool, way: str, scenario: str) -> None:
    """Every step of a scenario is the reference's, byte for byte, on every rank."""
    cell = composing.played(pool, way, cases_of(scenario, pool.ranks), scenario=scenario)
    for each in cell.steps:
        assert each.verdict.status is Status.EQUAL, each.verdict.findings
        assert each.pages > 0
    assert len(cell.steps) == cell.planned > 1


def test_ranks_take_the_gpus_in_turn(shared: Pool, gpus: int) -> None:
    """Each is a process of its own."""
    outcomes = shared.run(gpu_ranks.who)
    assert [outcome.message for outcome in outcomes] == [""] * RANKS
    assert [int(each.outputs["device"]) for each in outcomes] == [n % gpus for n in range(RANKS)]
    assert len({int(each.outputs["pid"]) for each in outcomes}) == RANKS


def test_no_round_reads_another_round(shared: Pool) -> None:
    """200 rounds, in each another rank is late with its work before it writes."""
    for outcome in shared.run(gpu_ranks.rounds, count=200):
        assert outcome.message == ""
        assert int(outcome.outputs["result"]) == 0


def bytes_add_up(pool: Pool) -> None:
    """u8 wraps, an fp8 tensor adds as bytes, NaN and -0.0 among them, and the least is agreed."""
    count = pool.ranks
    for outcome in pool.run(gpu_ranks.sums):
        assert outcome.message == ""
        total = sum(100 + rank for rank in range(count)) % 256
        assert set(outcome.outputs["plain"].tolist()) == {total}
        typed = outcome.outputs["typed"].tolist()
        assert typed == [0x80 + 0x7F * (cell % count % 2) for cell in range(len(typed))]
        assert int(outcome.outputs["least"]) == 5


def test_ranks_that_share_a_gpu_add_bytes(shared: Pool) -> None:
    """By gloo, through the host."""
    bytes_add_up(shared)


def test_ranks_with_a_gpu_each_add_bytes(apart: Pool) -> None:
    """By NCCL."""
    bytes_add_up(apart)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_on_shared_gpus_hold_the_reference_s_pages(
    shared: Pool, scenario: str, way: str
) -> None:
    """Eight ranks over CUDA IPC, step after step in the same memory, fp8 among the bytes."""
    all_equal(shared, way, scenario)


@pytest.mark.parametrize("way", ["fused", "dense", "direct", "prefetch"])
def test_a_rank_that_is_late_in_every_round_changes_no_byte(shared: Pool, way: str) -> None:
    """Rotating delays before the write."""
    fault = Fault(name="producer-delay", delay=0.01)
    case = cases_of("chunk", RANKS)[0]
    verdict = judge.check(case, candidate.over(shared, way, fault=fault))
    assert verdict.status is Status.EQUAL, verdict.findings


def test_outputs_are_fp8_where_pools_are(shared: Pool) -> None:
    """Moved as bytes, given back as what they were."""
    case = cases_of("chunk", RANKS)[0]
    outputs = candidate.over(shared, "direct")(**case.inputs, **case.params)
    assert outputs["token_pages"].dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("way", ["fused", "dense", "staging", "direct", "prefetch"])
def test_one_kernel_gathers_the_same_pages(shared: Pool, way: str) -> None:
    """However many pointers there are, own and other ranks'."""
    if not pointer_gather.available(torch.device("cuda", 0)):
        pytest.skip("triton is not installed")
    case = cases_of("cache-hits", RANKS)[1]
    settings: dict[str, Any] = {"way": way, **case.params}
    outcomes = shared.run(gpu_ranks.one_kernel, inputs=dict(case.inputs), **settings)
    for outcome in outcomes:
        assert outcome.message == ""
        assert int(outcome.outputs["result"]) == 0


def test_streams_wait_for_each_other_without_the_host(shared: Pool) -> None:
    """The same 200 rounds; waits are the stream's own, and no kernel spins."""
    for outcome in shared.run(gpu_ranks.rounds, count=200, streams=True, timeout=45):
        assert outcome.message == ""
        assert int(outcome.outputs["result"]) == 0


@pytest.mark.parametrize("way", list(WAYS))
def test_ranks_with_a_gpu_each_hold_the_reference_s_pages(apart: Pool, way: str) -> None:
    """Over CUDA IPC and symmetric memory, sums through NCCL."""
    for scenario in SCENARIOS:
        all_equal(apart, way, scenario)


@pytest.mark.parametrize("streams", [False, True])
def test_no_round_of_ranks_with_a_gpu_each_reads_another(apart: Pool, *, streams: bool) -> None:
    """Host or stream waits, 200 rounds."""
    for outcome in apart.run(gpu_ranks.rounds, count=200, streams=streams):
        assert outcome.message == ""
        assert int(outcome.outputs["result"]) == 0


def test_symmetric_memory_wants_a_gpu_a_rank(gpus: int) -> None:
    """One sentence, before anything is allocated."""
    with ranks.start(gpus + 1, transport="symmetric", timeout=60) as pool:
        for outcome in pool.run(gpu_ranks.who):
            assert "transport symmetric is one rank a GPU" in outcome.message


@pytest.mark.parametrize("fault", ["killed-before", "killed-inside", "killed-after"])
def test_a_killed_rank_ends_all_and_leaves_nothing(gpus: int, fault: str) -> None:
    """Within the time limit every rank has one error that names it, and the pool runs again."""
    del gpus
    case = cases_of("chunk", RANKS)[0]
    with ranks.start(RANKS, transport="cuda", timeout=60) as pool:
        before = pool.run(gpu_ranks.who)
        start = time.monotonic()
        killed = Fault(name=fault, rank=3)
        broken = candidate.over(pool, "direct", fault=killed, timeout=30)
        with pytest.raises(candidate.RanksFailed, match="rank 3"):
            broken(**case.inputs, **case.params)
        assert time.monotonic() - start < 40
        gone = [int(each.outputs["pid"]) for each in before]
        # The driver takes a killed process's memory back before the process is gone.
        until = time.monotonic() + 15
        while left := [pid for pid in gone if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < until, left
            time.sleep(0.1)
        verdict = judge.check(case, candidate.over(pool, "direct"))
        assert verdict.status is Status.EQUAL, verdict.findings
    assert [path.name for path in segment.FOLDER.glob("torch_*")] == []


def test_the_measurement_of_an_exchange_runs(apart: Pool) -> None:
    """Every way is timed, and its pages are legacy's."""
    case = cases_of("chunk", apart.ranks)[0]
    names = [*WAYS, hopper_exchange.KERNEL]
    settings: dict[str, Any] = {"names": names, "rounds": 2, "waits": "stream", **case.params}
    outcomes = apart.run(hopper_exchange.time_ways, inputs=dict(case.inputs), **settings)
    for outcome in outcomes:
        assert outcome.message == ""
        assert outcome.outputs["ran"].tolist() == [1] * len(names)
        assert outcome.outputs["same"].tolist() == [1] * len(names)
