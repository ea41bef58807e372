"""Shrinking: what is left of a failing call, and when that is certain."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from equivalence.rowcount.shrink import Fewest, fewest


def test_a_count_is_told_from_its_members() -> None:
    """Copies of the member fail too, and one copy fewer does not."""
    assert fewest(range(128), 64, lambda _, place: place >= 64) == Fewest(
        members=tuple(range(65)), place=64, calls=15, counted=True
    )
    assert fewest(range(128), 3, lambda members, _: len(members) > 32) == Fewest(
        members=tuple(range(33)), place=3, calls=12, counted=True
    )


def test_a_companion_is_found() -> None:
    """The one member whose presence before it matters is all that is left beside it."""
    assert fewest(range(40), 20, lambda members, place: 7 in members[:place]) == Fewest(
        members=(7, 20), place=1, calls=19
    )
    found = fewest(range(40), 20, lambda members, _: {7, 9, 33} <= set(members))
    assert (found.members, found.place, found.counted) == ((7, 9, 20, 33), 2, False)


def test_a_member_that_fails_alone_needs_one_call() -> None:
    """Nothing is left out of one."""
    assert fewest(range(9), 4, lambda _, __: True) == Fewest(members=(4,), place=0, calls=1)
    assert fewest([4], 0, lambda _, __: False) == Fewest(members=(4,), place=0, calls=0)


def test_the_bound_is_kept_and_said() -> None:
    """At 10 calls what was last seen to fail stands."""
    calls: list[Sequence[int]] = []

    def fails(members: Sequence[int], _: int) -> bool:
        calls.append(members)
        return sum(member % 3 == 0 for member in members) >= 40

    found = fewest(range(400), 200, fails, most=10)
    assert (found.stopped, found.calls, len(calls)) == (True, 10, 10)
    assert fails(found.members, found.place)


def test_copies_are_not_asked_for_where_none_can_be() -> None:
    """A request cannot be in a call twice."""
    found = fewest(range(9), 8, lambda members, _: len(set(members)) > 4, copies=False)
    assert (len(found.members), found.counted, found.stopped) == (5, False, False)


@given(st.integers(2, 30), st.data())
def test_what_is_left_fails_and_none_of_it_can_be_spared(size: int, data: st.DataObject) -> None:
    """It is a part in the same order, and without any one member the fault is gone."""
    place = data.draw(st.integers(0, size - 1))
    needed = data.draw(st.sets(st.integers(0, size - 1), max_size=4)) - {place}

    def fails(members: Sequence[int], at: int) -> bool:
        return members[at] == place and needed <= set(members)

    found = fewest(range(size), place, fails, most=1000)
    assert set(found.members) == needed | {place}
    assert list(found.members) == sorted(found.members)
    assert found.members[found.place] == place
