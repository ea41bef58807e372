"""Ways over scenarios: what is run, what is judged, and what a failing rank makes of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from equivalence.compose import running, steps
from equivalence.compose.matrix import Cell, Matrix
from equivalence.errors import UsageError
from equivalence.paths.ipc.faulty import Fault
from equivalence.paths.ipc.ways import WAYS
from equivalence.replay import Outcome
from equivalence.report import as_compose
from equivalence.verdict import Status
from equivalence.world.threads import Threads

TINY = {"layers": 2, "scale": 16}


@pytest.fixture
def pool() -> Threads:
    """Two ranks in this process."""
    return Threads(2, timeout=2.0)


def tiny(name: str = "chunk") -> list[Any]:
    """Steps of two ranks and two layers."""
    return steps.sequence(name, cp=2, **TINY)  # type: ignore[arg-type] # layers, scale


def test_every_way_is_run_over_every_scenario(pool: Threads) -> None:
    """Scenario by scenario, all steps, all pages of all ranks."""
    told: list[tuple[str, int, int]] = []
    cells = list(
        running.over(
            pool,
            scenarios=["cold", "bs-1-4"],
            progress=lambda *done: told.append(done),
            **TINY,  # type: ignore[arg-type] # layers, scale
        )
    )
    assert [(cell.scenario, cell.way) for cell in cells] == [
        (name, way) for name in ("cold", "bs-1-4") for way in WAYS
    ]
    for cell in cells:
        assert (cell.status, len(cell.steps), cell.ran) == (Status.EQUAL, cell.planned, (cell.way,))
        slots = sum(len(case.inputs["slot_pages"]) for case in tiny(cell.scenario))
        assert cell.pages == 2 * 2 * 2 * slots
        assert cell.bytes == cell.pages // 2 * 64 * (656 + 132)
        assert all(step.seconds > 0 for step in cell.steps)
    assert told[:2] == [("cold legacy", 0, 7 * (3 + 4)), ("cold fused", 3, 7 * (3 + 4))]
    assert Matrix(ranks=2, transport="threads", cells=tuple(cells)).status is Status.EQUAL


def test_one_kind_alone_is_composed(pool: Threads) -> None:
    """The other has no pages."""
    (cell,) = running.over(pool, ["direct"], ["cold"], kinds=("index",), **TINY)  # type: ignore[arg-type] # likewise
    assert cell.status is Status.EQUAL
    assert "token_pages" not in cell.steps[0].verdict.stages
    assert cell.bytes == cell.pages * 64 * 132


def test_a_wrong_page_is_different_and_later_steps_still_run(pool: Threads) -> None:
    """Each step is judged by itself."""
    fault = Fault(name="wrong-owner")
    cell = running.played(pool, "direct", tiny(), scenario="chunk", fault=fault)
    assert cell.status is Status.DIFFERENT
    assert [step.verdict.status for step in cell.steps] == [Status.DIFFERENT] * 3


def test_a_fault_that_shows_in_one_cell_is_seen(pool: Threads) -> None:
    """Where none is different, nothing may be concluded; a fault that may happen need not show."""
    fault = Fault(name="wrong-owner")
    right = running.played(pool, "direct", tiny()[:1], scenario="chunk")
    wrong = running.played(pool, "direct", tiny()[:1], scenario="chunk", fault=fault)
    assert running.unseen(fault, [right, wrong]) == running.unseen(fault, [wrong]) == ""
    assert running.unseen(None, [right]) == ""
    assert running.unseen(Fault(name="producer-delay"), [right]) == ""
    assert running.unseen(fault, [right]).startswith("wrong-owner changed nothing in these steps: ")


@pytest.mark.parametrize(
    ("fault", "timeout", "rules"),
    [
        (Fault(name="own-capability", rank=1), 0.5, {"crash", "timeout"}),
        (Fault(name="another-size"), 10.0, {"crash"}),
    ],
)
def test_a_rank_that_fails_is_undecided_and_ends_the_scenario(
    pool: Threads, fault: Fault, timeout: float, rules: set[str]
) -> None:
    """The step names the rule; none follows it, and the next scenario runs."""
    cell = running.played(pool, "direct", tiny(), scenario="chunk", fault=fault, timeout=timeout)
    (step,) = cell.steps
    (found,) = step.verdict.findings
    assert (cell.status, cell.pages, cell.planned) == (Status.UNDECIDED, 0, 3)
    assert found.rule in rules
    assert found.place.startswith("rank ")
    assert running.played(pool, "direct", tiny(), scenario="chunk").status is Status.EQUAL


def test_a_batch_that_may_not_run_reaches_no_rank() -> None:
    """Two writers are told before any byte moves; a contradiction is an invalid record."""

    class Unused:
        """Ranks that must not be asked."""

        ranks = 2

        def run(self, function: object, **given: object) -> list[Outcome]:
            """Fail."""
            raise AssertionError(function, given)

    case = tiny()[0]
    writer = case.inputs["writer"].clone()
    writer[0] = 1 - writer[0]
    twice = replace(case, inputs={**case.inputs, "writer": writer})
    short = replace(case, inputs={**case.inputs, "writer": writer[1:]})
    for wrong, status, rule in (
        (twice, Status.DIFFERENT, "two-writers"),
        (short, Status.UNDECIDED, "invalid-record"),
    ):
        cell = running.played(Unused(), "direct", [wrong], scenario="chunk")
        assert (cell.status, cell.pages) == (status, 0)
        assert cell.steps[0].verdict.findings[0].rule == rule


def test_ranks_that_hold_old_pages_are_caught() -> None:
    """What the step before left is recognised as that."""

    class Stale(Threads):
        """Ranks that hand out what they held one step earlier in slots of new pages."""

        last: Mapping[str, Tensor] | None = None

        def run(self, function: Any, **given: Any) -> list[Outcome]:  # noqa: ANN401 - any function
            """As the ranks, but for rank 1."""
            outcomes = super().run(function, **given)
            held, self.last = self.last, outcomes[1].outputs
            if held is not None:
                pages = outcomes[1].outputs["token_pages"].clone()
                old = held["token_pages"]
                count = min(pages.shape[1], old.shape[1])
                pages[:, :count] = old[:, :count]
                outcomes[1] = replace(
                    outcomes[1], outputs={**outcomes[1].outputs, "token_pages": pages}
                )
            return outcomes

    cell = running.played(Stale(2), "direct", tiny("cold"), scenario="cold")
    assert [step.verdict.status is Status.EQUAL for step in cell.steps] == [True, False, False]
    # A full page of the step before stands in a pool now: there it is another page.
    rules = {found.rule for step in cell.steps[1:] for found in step.verdict.findings}
    assert {"stale-round", "page-mismatch", "diverged"} <= rules


def test_steps_are_run_and_not_judged_where_another_rank_does(pool: Threads) -> None:
    """Nothing is concluded here; the same steps ran."""
    judged, alone = (
        running.played(pool, "fused", tiny(), scenario="chunk", judged=judged)
        for judged in (True, False)
    )
    assert (judged.status, alone.status) == (Status.EQUAL, Status.UNDECIDED)
    assert (judged.pages, judged.bytes) == (alone.pages, alone.bytes)


@pytest.mark.parametrize(
    ("ways", "scenarios", "sentence"),
    [
        (["legcy"], None, "no way is named 'legcy': there are legacy, fused, fallback, dense, "),
        ([], None, "no way is named at all: there are legacy, "),
        (None, ["warm"], "no scenario is named 'warm': there are cold, chunk, "),
    ],
)
def test_a_name_that_does_not_exist_is_refused(
    pool: Threads, ways: list[str] | None, scenarios: list[str] | None, sentence: str
) -> None:
    """Before anything runs, with what exists."""
    with pytest.raises(UsageError) as refused:
        next(running.over(pool, ways, scenarios))
    assert str(refused.value).startswith(sentence)


def test_nothing_composed_is_undecided() -> None:
    """Neither a cell without steps nor a run without cells is equal."""
    cell = Cell(way="direct", scenario="cold", steps=(), planned=3)
    assert (cell.status, cell.ran) == (Status.UNDECIDED, ())
    assert Matrix(ranks=2, transport="shm").status is Status.UNDECIDED
    assert Matrix(ranks=2, transport="shm", cells=(cell,)).status is Status.UNDECIDED


def test_a_way_that_ran_as_another_says_so(pool: Threads) -> None:
    """Without peer memory a way is the fallback: equal, and the line tells."""
    (cell,) = running.over(pool, ["direct"], ["cold"], **TINY)  # type: ignore[arg-type] # likewise
    steps_ = []
    for step in cell.steps:
        (run,) = step.verdict.runs
        (path,) = run.paths
        other = replace(path, kernel="equivalence.paths.ipc.ways.fallback")
        verdict = replace(step.verdict, runs=(replace(run, paths=(other,)),))
        steps_.append(replace(step, verdict=verdict))
    fell = replace(cell, steps=tuple(steps_))
    assert fell.ran == ("fallback",)
    assert as_compose.line(fell).endswith("pages; it ran as fallback")
    assert as_compose.line(cell).endswith("pages")


def test_reports_of_nothing_say_so() -> None:
    """No step, no cell."""
    cell = Cell(way="direct", scenario="cold", steps=(), planned=3)
    assert as_compose.line(cell).endswith("UNDECIDED  none of 3 steps ran")
    assert as_compose.failure(cell) == "cold direct: no step ran"
    assert "nothing was composed; 0 undecided" in as_compose.summary(
        Matrix(ranks=2, transport="shm")
    )


_MARKED = """
import pytest

@pytest.mark.ranks(2, 3)
def test_two_numbers(ranks):
    pass

@pytest.mark.ranks(2, n=3)
def test_a_number_and_a_name(ranks):
    pass

@pytest.mark.ranks([2])
def test_a_list(ranks):
    pass
"""


def test_a_marker_of_more_than_a_number_is_refused(pytester: pytest.Pytester) -> None:
    """By the sentence that says what it takes."""
    pytester.makepyfile(_MARKED)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(errors=3)
    sentence = "*UsageError: the marker ranks takes one number, and timeout=, transport= and device"
    result.stdout.fnmatch_lines([f"{sentence}=: it has (2, 3) and {{}}"])
    result.stdout.fnmatch_lines([f"{sentence}=: it has (2,) and {{'n': 3}}"])
    result.stdout.no_fnmatch_line("*TypeError*")
