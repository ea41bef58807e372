"""Memory of a call: what is alive at once, what stays, what the outputs hold."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equivalence import generate, memory, replay
from equivalence.case import Case
from equivalence.errors import NotEquivalent, UsageError
from equivalence.judge import assert_equivalent, check
from equivalence.verdict import Memory, Status
from refimpl.topk import ragged_topk

CPU = torch.device("cpu")
KIB = 1024


def measure(call: Callable[[], object]) -> tuple[int, int]:
    """Peak and remaining bytes of a call whose result is kept."""
    with memory.measured(CPU) as meter:
        kept = call()
    del kept
    return meter.peak, meter.live


def test_views_share_their_storage() -> None:
    """A slice and a transposed view hold nothing of their own."""
    assert measure(lambda: torch.empty(KIB)[10:].view(2, -1).t()) == (4 * KIB, 4 * KIB)


def test_a_temporary_counts_at_its_peak_and_not_at_the_end() -> None:
    """(a + 1) * 2 holds a sum that is gone when the product remains."""
    a = torch.zeros(KIB)
    assert measure(lambda: (a + 1) * 2) == (8 * KIB, 4 * KIB)


def test_buffers_one_after_the_other_count_once() -> None:
    """Chunks that are freed before the next one are never alive together."""

    def chunks() -> None:
        for _ in range(10):
            torch.empty(KIB)

    assert measure(chunks) == (4 * KIB, 0)


def test_arguments_are_not_the_calls_own() -> None:
    """Writing into a tensor that was there before allocates nothing."""
    a = torch.zeros(KIB)
    assert measure(lambda: a.add_(1)[5:]) == (0, 0)


def test_a_buffer_that_grows_in_place_counts_with_its_new_size() -> None:
    """resize_ moves a storage to a larger one under the same name."""
    assert measure(lambda: torch.empty(KIB).resize_(3 * KIB)) == (12 * KIB, 12 * KIB)


def scoring(keep: list[Tensor]) -> Callable[..., Tensor]:
    """A top-k that keeps a copy of all scores, in `keep` where that is a list to fill."""

    def candidate(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
        copy = scores.clone()
        keep.append(copy)
        return ragged_topk(scores=copy, row_start=row_start, row_end=row_end, k=k)

    return candidate


@pytest.fixture
def case() -> Case:
    """Nine rows of 512 columns."""
    return generate.ragged_topk(0, k=16, columns=512)


def test_what_a_candidate_keeps_is_retained_and_its_outputs_are_not(case: Case) -> None:
    """A copy that outlives the call is retained, and the picks are the output."""
    outcome = replay.run(scoring([]), case)
    assert outcome.memory is not None
    scores, picks = 9 * 512 * 4, 9 * 16 * 4
    assert outcome.memory == Memory(
        transient=outcome.memory.transient,
        retained=scores,
        outputs=picks,
        reserved=None,
        how="tracked tensors",
    )
    assert outcome.memory.transient > scores


def test_an_output_that_was_there_before_is_not_taken_off_the_peak(case: Case) -> None:
    """A candidate with a buffer of its own still shows what it allocates beside it."""
    picks = torch.empty(9, 16, dtype=torch.int32)

    def candidate(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
        del row_start, row_end, k
        scores.clone()
        return picks

    outcome = replay.run(candidate, case)
    assert outcome.memory == Memory(
        transient=9 * 512 * 4,
        retained=0,
        outputs=9 * 16 * 4,
        reserved=None,
        how="tracked tensors",
    )


def test_what_is_kept_beside_an_output_from_before_is_retained(case: Case) -> None:
    """A buffer that was there before hides nothing that the call keeps."""
    picks, kept = torch.empty(9, 16, dtype=torch.int32), []

    def candidate(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
        del scores, row_start, row_end, k
        kept.append(torch.zeros(144))
        return picks

    outcome = replay.run(candidate, case)
    assert outcome.memory == Memory(
        transient=9 * 16 * 4,
        retained=9 * 16 * 4,
        outputs=9 * 16 * 4,
        reserved=None,
        how="tracked tensors",
    )


def test_a_buffer_from_before_that_grows_counts_by_how_much() -> None:
    """A workspace made larger in place costs what it did not hold before."""
    workspace = torch.empty(KIB)
    assert measure(lambda: workspace.resize_(3 * KIB).fill_(0)) == (8 * KIB, 8 * KIB)
    assert measure(lambda: workspace.resize_(2 * KIB).fill_(0)) == (0, 0)


def test_a_small_view_of_a_large_workspace_is_a_small_output(case: Case) -> None:
    """What the picks do not reach of their storage is retained."""

    def candidate(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
        workspace = torch.empty(1 << 18, dtype=torch.int32)
        picks = workspace[: 9 * k].view(9, k)
        return picks.copy_(ragged_topk(scores=scores, row_start=row_start, row_end=row_end, k=k))

    held = replay.run(candidate, case).memory
    assert held is not None
    assert (held.outputs, held.retained) == (9 * 16 * 4, (1 << 20) - 9 * 16 * 4)
    assert check(case, candidate, max_transient=1 << 19).status is Status.DIFFERENT


def test_a_call_within_its_budget_is_equal_and_one_byte_less_is_not(case: Case) -> None:
    """max_transient allows exactly what the call holds."""
    held = check(case, scoring([])).runs[0].memory
    assert held is not None
    assert check(case, scoring([]), max_transient=held.transient).status is Status.EQUAL
    with pytest.raises(NotEquivalent) as caught:
        assert_equivalent(case, scoring([]), max_transient=held.transient - 1)
    most = held.transient
    assert str(caught.value).splitlines()[:6] == [
        "ragged_topk seed 0 ragged_topk: it differs (over-budget)",
        "",
        "  memory   counted by tracked tensors   over-budget",
        f"    want      transient  at most {most / KIB:,.0f} KiB",
        f"    got       transient          {most / KIB:,.0f} KiB",
        f"    reading   1 byte more than max_transient={most - 1} allows",
    ]


@pytest.mark.parametrize("budget", [-1, 1.5, True])
def test_a_budget_is_a_count_of_bytes(case: Case, budget: float) -> None:
    """Anything else is refused before the candidate is called."""
    with pytest.raises(UsageError) as caught:
        check(case, scoring([]), max_transient=budget)  # type: ignore[arg-type]  # on purpose
    assert str(caught.value) == f"max_transient is {budget!r}; it is bytes, 0 or more"


def test_recorded_runs_have_no_memory_to_bound(case: Case) -> None:
    """A demand without a candidate is refused."""
    with pytest.raises(UsageError) as caught:
        check(case, max_transient=1)
    sentence = "max_transient and require_path ask something of a candidate: give one"
    assert str(caught.value) == sentence
