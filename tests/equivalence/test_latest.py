"""The latest results of a function, found by a key."""

from operator import itemgetter

import pytest

from equivalence.latest import latest


def test_what_was_used_last_is_kept() -> None:
    """By the key alone; of three and two places, the one not used for longest is made again."""
    asked: list[str] = []

    def make(word: str) -> str:
        asked.append(word)
        return word.upper()

    kept = latest(make, key=itemgetter(0), most=2)
    words = ["a1", "b", "a2", "c", "a3", "b"]
    assert [kept(word) for word in words] == ["A1", "B", "A1", "C", "A1", "B"]
    assert asked == ["a1", "b", "c", "b"]


def test_a_function_that_raises_leaves_nothing() -> None:
    """It is called again."""
    divisors = iter([0, 2])

    def make() -> float:
        return 14 / next(divisors)

    kept = latest(make, key=tuple, most=1)
    with pytest.raises(ZeroDivisionError):
        kept()
    assert (kept(), kept()) == (7, 7)
