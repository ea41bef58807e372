"""The marker and the fixture `ranks`, and whether ranks are identical."""

from collections.abc import Mapping

import pytest
import rank_calls
import torch
from torch import Tensor

import equivalence
from equivalence import assert_ranks_identical
from equivalence.errors import NotEquivalent, Undecided, UsageError
from equivalence.ranks import Pool
from equivalence.replay import Outcome
from equivalence.verdict import Status


def outcomes(*outputs: Mapping[str, Tensor]) -> list[Outcome]:
    """Ranks that gave these outputs."""
    return [Outcome(outputs=each) for each in outputs]


def test_equal_bits_of_all_ranks_pass() -> None:
    """Also NaN, which equals nothing."""
    x = torch.tensor([[1.0, float("nan")], [-0.0, 3.0]])
    assert_ranks_identical(outcomes({"x": x, "y": x.int()}, {"y": x.int(), "x": x.t().clone().t()}))


@pytest.mark.parametrize(
    ("want", "got", "told"),
    [
        (
            {"x": torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)},
            {"x": torch.tensor([[1, 2], [9, 0]], dtype=torch.uint8)},
            "x[1, 0]: rank 0 holds 3 (03) and rank 2 holds 9 (09); 2 of 4 cells differ",
        ),
        (
            {"x": torch.tensor([0.0])},
            {"x": torch.tensor([-0.0])},
            "x[0]: rank 0 holds 0.0 (00000000) and rank 2 holds -0.0 (80000000); 1 of 1 cells differ",  # noqa: E501
        ),
        (
            {"x": torch.tensor([56], dtype=torch.uint8).view(torch.float8_e4m3fn)},
            {"x": torch.tensor([64], dtype=torch.uint8).view(torch.float8_e4m3fn)},
            "x[0]: rank 0 holds 1.0 (38) and rank 2 holds 2.0 (40); 1 of 1 cells differ",
        ),
        (
            {"x": torch.ones((), dtype=torch.bool)},
            {"x": torch.zeros((), dtype=torch.bool)},
            "x[]: rank 0 holds True (01) and rank 2 holds False (00); 1 of 1 cells differ",
        ),
        (
            {"x": torch.tensor([0x12], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
            {"x": torch.tensor([0x21], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
            "x[0]: rank 0 holds 18 (12) and rank 2 holds 33 (21); 1 of 1 cells differ",
        ),
        (
            {"x": torch.tensor(-2, dtype=torch.int8)},
            {"x": torch.tensor(2, dtype=torch.int8)},
            "x[]: rank 0 holds -2 (FE) and rank 2 holds 2 (02); 1 of 1 cells differ",
        ),
        (
            {"x": torch.tensor(1j)},
            {"x": torch.tensor(-1j)},
            (
                "x[]: rank 0 holds 1j (3F80000000000000) and rank 2 holds (-0-1j) "
                "(BF80000080000000); 1 of 1 cells differ"
            ),
        ),
        (
            {"x": torch.zeros(2)},
            {"x": torch.zeros(2, dtype=torch.int32)},
            "x: rank 0 gives float32 [2] and rank 2 int32 [2]",
        ),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(1, 2)}, None),
        ({"x": torch.zeros(2)}, {}, "rank 0 gives x and rank 2 does not"),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(2), "y": torch.zeros(2)}, None),
    ],
)
def test_other_bits_of_a_rank_are_named(
    want: Mapping[str, Tensor], got: Mapping[str, Tensor], told: str | None
) -> None:
    """Ranks, output, place and both values, in decimal and bits, and as a verdict."""
    with pytest.raises(NotEquivalent) as caught:
        assert_ranks_identical(outcomes(want, want, got))
    assert not isinstance(caught.value, Undecided)
    message = str(caught.value)
    assert message.startswith("rank 2 of 3 diverged from rank 0: ")
    assert told is None or message.endswith(told)
    verdict = caught.value.verdict
    assert verdict.status is Status.DIFFERENT
    assert [finding.rule for finding in verdict.findings] == ["diverged"]


def test_all_ranks_that_differ_are_listed() -> None:
    """The first difference is shown."""
    x = torch.tensor([1])
    with pytest.raises(NotEquivalent, match=r"^ranks 1 3 of 4 diverged from rank 0: x\[0\]"):
        assert_ranks_identical(outcomes({"x": x}, {"x": x + 1}, {"x": x}, {"x": x + 2}))


def test_a_rank_that_failed_decides_nothing() -> None:
    """Its rule and message are told, and nothing is called equal."""
    silent = Outcome(rule="timeout", message="rank 1 was silent")
    with pytest.raises(Undecided, match=r"^ranks failed \(timeout\): rank 1 was silent$") as caught:
        assert_ranks_identical([*outcomes({"x": torch.zeros(1)}), silent])
    assert caught.value.verdict.status is Status.UNDECIDED
    waited = Outcome(rule="crash", message="rank 1 raised it; this rank waited", rank=1)
    raised = Outcome(rule="crash", message="rank 1 raised ValueError: bad", rank=1)
    with pytest.raises(Undecided, match=r"^ranks failed \(crash\): rank 1 raised ValueError: bad$"):
        assert_ranks_identical([waited, raised])
    with pytest.raises(UsageError, match=r"what Pool\.run returns, not Tensor"):
        assert_ranks_identical([torch.zeros(1)])  # type: ignore[list-item]


@pytest.mark.parametrize("output", [{}, {"x": torch.empty(0)}])
def test_nothing_compared_is_not_equal(output: Mapping[str, Tensor]) -> None:
    """Ranks that give no value, and no ranks."""
    with pytest.raises(Undecided, match="2 ranks gave no value: nothing was compared"):
        assert_ranks_identical(outcomes(output, output))
    with pytest.raises(UsageError, match="no outcome of any rank was given"):
        assert_ranks_identical([])


def test_one_rank_is_compared_with_nothing() -> None:
    """Whatever it holds."""
    says = "^1 rank gave values, and no other rank is there: nothing was compared$"
    with pytest.raises(Undecided, match=says):
        assert_ranks_identical(outcomes({"x": torch.ones(3)}))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (iter(()), "outcomes are a list of one a rank, as Pool.run returns it, not tuple_iterator"),
        (Outcome(), "outcomes are a list of one a rank, as Pool.run returns it, not Outcome"),
        (
            outcomes({"x": torch.eye(2).to_sparse()}, {"x": torch.eye(2)}),
            "x of rank 0 cannot be read: a torch.sparse_coo tensor on cpu holds no plain values",
        ),
        (
            outcomes({"x": torch.eye(2)}, {"x": torch.eye(2, device="meta")}),
            "x of rank 1 cannot be read: a torch.strided tensor on meta holds no plain values",
        ),
        (
            outcomes({"x": [1]}),  # type: ignore[dict-item]
            "x of rank 0 cannot be read: 'list' object has no attribute 'layout'",
        ),
    ],
)
def test_what_is_no_outcome_of_ranks_is_refused(given: list[Outcome], says: str) -> None:
    """In one sentence."""
    with pytest.raises(UsageError) as caught:
        assert_ranks_identical(given)
    assert str(caught.value) == says


def test_lazy_signs_are_values() -> None:
    """Conjugates and negatives are compared by what they say."""
    x = torch.tensor([1 + 2j])
    assert_ranks_identical(outcomes({"x": x.conj()}, {"x": torch.tensor([1 - 2j])}))
    negative = x.conj().imag
    assert_ranks_identical(outcomes({"x": negative}, {"x": torch.tensor([-2.0])}))


def test_the_function_is_public() -> None:
    """It is imported when it is asked for."""
    assert "assert_ranks_identical" in equivalence.__all__
    assert list(equivalence.__all__) == sorted(equivalence.__all__)


@pytest.mark.ranks(3, timeout=5)
def test_the_marker_says_how_many(ranks: Pool) -> None:
    """And how long a rank may be silent."""
    assert (ranks.ranks, ranks.timeout, ranks.transport) == (3, 5.0, "shm")
    found = ranks.run(rank_calls.collectives)
    assert_ranks_identical(found)
    assert len(found) == 3
    assert (ranks.rank, ranks.tell(7)) == (None, 7)


_TESTS = """
import pytest
import torch
from equivalence import assert_ranks_identical

def work(link, *, apart=False):
    link.barrier()
    return torch.tensor([link.rank if apart else 7])

def test_two(ranks, request):
    request.config.cache_of_ranks = ranks.carry
    assert (ranks.ranks, ranks.timeout) == (2, 30.0)
    assert_ranks_identical(ranks.run(work))

@pytest.mark.ranks(2, timeout=3)
def test_same_processes(ranks, request):
    assert ranks.carry is request.config.cache_of_ranks
    assert ranks.timeout == 3
    assert_ranks_identical(ranks.run(work, apart=True))

@pytest.mark.ranks(n=2)
def test_by_name(ranks):
    assert ranks.ranks == 2

@pytest.mark.ranks(of=2)
def test_wrong_marker(ranks):
    pass

def test_without_ranks():
    pass
"""


def test_a_suite_has_one_pool_of_a_size(pytester: pytest.Pytester) -> None:
    """Pools last a session; ranks that differ fail a test, and a wrong marker is an error."""
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_subprocess(
        "--strict-markers", "-W", "error", "-p", "no:cacheprovider"
    )
    result.assert_outcomes(passed=3, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*UsageError: ranks are asked for by n, *: {'of': 2}"])
    result.stdout.fnmatch_lines(["*rank 1 of 2 diverged from rank 0: result[[]0]: rank 0 holds 0*"])


def test_the_marker_is_listed(pytester: pytest.Pytester) -> None:
    """`--markers` says what it takes."""
    result = pytester.runpytest("--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.ranks(n=2, *, timeout=30*"])
