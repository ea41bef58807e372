"""Eight processes, every way, eight layers, both kinds, every scenario: the reference's bytes.

And every fault on demand between processes: found by its rule, or nobody waits for long.
"""

from time import monotonic

import pytest

from equivalence.compose import requests, running, steps
from equivalence.compose.matrix import Cell
from equivalence.paths.ipc.faulty import FAULTS, Fault
from equivalence.paths.ipc.ways import WAYS
from equivalence.ranks import Pool
from equivalence.verdict import PAGES, Status

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.ranks(8)]

SHORT, PATIENT = 2.0, 30.0
"""Seconds that a rank may be silent: where one is made to fail, and elsewhere."""
LONG = 15.0
"""Seconds in which all has ended after that: ending the ranks, on a slow machine."""
ENDS = {"crash", "timeout"}


@pytest.mark.parametrize("scenario", requests.NAMES)
def test_every_way_gives_every_rank_the_references_bytes(ranks: Pool, scenario: str) -> None:
    """No byte of any page of any rank differs, and each way is the one that ran."""
    cells = list(running.over(ranks, scenarios=[scenario]))
    assert [cell.way for cell in cells] == list(WAYS)
    planned = len(requests.plan(scenario))
    for cell in cells:
        assert cell.status is Status.EQUAL, (cell.way, [s.verdict for s in cell.steps])
        assert (len(cell.steps), cell.ran) == (planned, (cell.way,))
        assert set(PAGES) <= set(cell.steps[-1].verdict.stages)


def injected(pool: Pool, fault: Fault, way: str) -> Cell:
    """A way with a fault, over steps of the same shapes and other contents."""
    told = FAULTS[fault.name]
    kinds = ("token",) if "one kind" in told.needs else ("token", "index")
    return running.played(
        pool,
        way,
        [steps.sequence("mixed", layers=4, kinds=kinds, seed=s, scale=2)[0] for s in range(3)],
        scenario="mixed",
        fault=fault,
        timeout=SHORT if ENDS & set(told.rules) else PATIENT,
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_between_processes_is_found_by_its_rule(ranks: Pool, name: str) -> None:
    """Or nothing may be concluded, within a bounded time; delays alone change nothing."""
    told = FAULTS[name]
    start = monotonic()
    cell = injected(ranks, Fault(name=name), "direct" if "direct" in told.ways else told.ways[0])
    took = monotonic() - start
    found = [each.rule for step in cell.steps for each in step.verdict.findings]
    if not told.rules:
        assert (cell.status, found) == (Status.EQUAL, [])
    else:
        assert found[0] in told.rules, cell
        assert (cell.status is Status.UNDECIDED) == (found[0] in ENDS)
        assert took < SHORT + LONG or found[0] not in ENDS


@pytest.mark.parametrize("name", ["killed-before", "killed-inside", "killed-after"])
@pytest.mark.parametrize("way", ["legacy", "fused", "staging"])
def test_a_killed_rank_is_named_and_ends_all(ranks: Pool, name: str, way: str) -> None:
    """One sentence names it; the next composition has ranks again and is right."""
    cell = injected(ranks, Fault(name=name, rank=5, turn=3), way)
    (step,) = cell.steps
    (found,) = step.verdict.findings
    assert (cell.status, step.pages) == (Status.UNDECIDED, 0)
    assert (found.rule, found.place) == ("crash", "rank 5")
    assert "rank 5 was killed by SIGKILL" in found.reading
    right = steps.sequence("chunk", layers=2, scale=4)[:1]
    assert running.played(ranks, way, right, scenario="chunk").status is Status.EQUAL


@pytest.mark.parametrize("way", ["dense", "staging", "direct", "prefetch"])
def test_200_adversarial_rounds_have_no_wrong_byte(ranks: Pool, way: str) -> None:
    """In each of them another rank is 10 ms late with what it writes."""
    cases = steps.sequence("bs-1-4", layers=25, scale=4)
    assert sum(25 * 2 for _ in cases) == 200
    fault = Fault(name="producer-delay", delay=0.01)
    cell = running.played(ranks, way, cases, scenario="bs-1-4", fault=fault)
    assert (cell.status, len(cell.steps)) == (Status.EQUAL, 4)
