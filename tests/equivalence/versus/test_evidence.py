"""The exact one-sided McNemar test against binomial sums done by hand."""

import sys
from math import comb

import pytest

from equivalence.versus import evidence
from equivalence.versus.evidence import McNemar, mcnemar


def mcnemar_of(only_new: int, only_control: int, *, pairs: int = 100) -> McNemar:
    """A test of so many discordant pairs."""
    return mcnemar(
        view="sets",
        stage="raw_indices",
        pairs=pairs,
        only_new=only_new,
        only_control=only_control,
    )


@pytest.mark.parametrize(
    ("only_new", "only_control", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1 / 2),
        (0, 1, 1.0),
        (5, 0, 1 / 32),
        (4, 1, (5 + 1) / 32),
        (1, 4, (32 - 1) / 32),
        (7, 3, (120 + 45 + 10 + 1) / 1024),
        (14, 14, (2**28 + 40_116_600) / 2**29),
        (40, 0, 2.0**-40),
    ],
)
def test_p_is_the_tail_of_a_fair_coin(only_new: int, only_control: int, p: float) -> None:
    """It is the chance of so many heads or more among the discordant pairs."""
    got = mcnemar_of(only_new, only_control)
    assert got.p == pytest.approx(p, rel=1e-12)
    assert got == McNemar(
        view="sets",
        stage="raw_indices",
        pairs=100,
        only_new=only_new,
        only_control=only_control,
        p=got.p,
    )


def test_pairs_that_agree_say_nothing() -> None:
    """More concordant pairs leave p as it is."""
    assert mcnemar_of(7, 3, pairs=10).p == mcnemar_of(7, 3, pairs=10_000).p


def test_like_and_like_are_seldom_told_apart() -> None:
    """Of all ways 30 fair coins fall, no more than one in twenty has p below 0.05."""
    low = [n for n in range(31) if (mcnemar_of(n, 30 - n).p or 1.0) < 0.05]
    assert low == list(range(20, 31))
    assert 0.04 < sum(comb(30, n) for n in low) / 2**30 <= 0.05


def test_without_a_pair_there_is_no_p() -> None:
    """A control that never ran gives no p-value, in a sentence."""
    got = mcnemar_of(0, 0, pairs=0)
    assert (got.p, got.note) == (None, "no pair: the original was never run again")


def test_without_scipy_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra is not installed the test says what installs it."""
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    got = mcnemar_of(7, 3)
    assert (got.p, got.note) == (None, evidence.ABSENT)
    assert mcnemar_of(0, 0).p == 1.0
