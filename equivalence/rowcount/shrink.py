"""Shrinking: the fewest members of a failing call that still make one of them fail."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST = 100
"""Calls that shrinking may make."""

Fails = Callable[[Sequence[int], int], bool]
"""(members, place) -> whether the member at this place fails in a call of these members."""


@dataclass(frozen=True, kw_only=True)
class Fewest:
    """What is left of a failing call.

    Attributes:
        members: of a call in which the member at `place` was seen to fail.
        place: where that member stands.
        calls: how many calls that took.
        stopped: whether MOST was reached before it was certain that no member can be left out.
        counted: whether copies of the one member fail likewise, and one copy fewer does not:
            the number of members matters, and not which they are.
    """

    members: tuple[int, ...]
    place: int
    calls: int
    stopped: bool = False
    counted: bool = False


class _SpentError(Exception):
    """No call is left."""


@dataclass(kw_only=True)
class _Search:
    """A failing call, and the calls that may still be made."""

    members: list[int]
    place: int
    fails: Fails
    left: int

    def ask(self, members: Sequence[int], place: int) -> bool:
        """Whether this fails.

        Raises:
            _SpentError: no call is left.
        """
        if not self.left:
            raise _SpentError
        self.left -= 1
        return self.fails(members, place)

    def keep(self, first: int, last: int) -> bool:
        """Whether the members [first, last) fail too; then they are what is left."""
        if not self.ask(self.members[first:last], self.place - first):
            return False
        self.members, self.place = self.members[first:last], self.place - first
        return True


def fewest(
    members: Sequence[int], place: int, fails: Fails, *, copies: bool = True, most: int = MOST
) -> Fewest:
    """Leave members of a failing call out, in order, for as long as the one at `place` fails.

    It is tried alone, then without those behind it and those before it, both by halves; then as
    copies of itself; then parts of the rest are left out (Zeller and Hildebrandt 2002, ddmin).

    Args:
        members: of a call that was seen to fail.
        place: of the member that fails; it stays.
        fails: makes a call.
        copies: whether a call may hold a member more than once.
        most: calls that may be made.
    """
    search = _Search(members=list(members), place=place, fails=fails, left=most)
    stopped = counted = False
    try:
        if len(members) > 1 and not search.keep(place, place + 1):
            _ends(search)
            counted = copies and _is_count(search)
            if not counted:
                _parts(search)
    except _SpentError:
        stopped = True
    return Fewest(
        members=tuple(search.members),
        place=search.place,
        calls=most - search.left,
        stopped=stopped,
        counted=counted,
    )


def _ends(search: _Search) -> None:
    """Leave out as many of the last members, then of the first ones, as halving finds."""
    least, most = search.place + 1, len(search.members)
    while least < most:
        middle = (least + most) // 2
        if search.keep(0, middle):
            most = middle
        else:
            least = middle + 1
    least, most = 0, search.place
    while least < most:
        middle = (least + most + 1) // 2
        if search.keep(middle, len(search.members)):
            least, most = 0, most - middle
        else:
            most = middle - 1


def _is_count(search: _Search) -> bool:
    """Whether copies of the member fail in its place, and one copy fewer does not."""
    count, member = len(search.members), search.members[search.place]
    if not search.ask([member] * count, search.place):
        return False
    return not search.ask([member] * (count - 1), min(search.place, count - 2))


def _parts(search: _Search) -> None:
    """Leave out smaller and smaller parts, until no single member can be left out."""
    size, again = max(1, len(search.members) // 2), True
    while size > 1 or again:
        size, again = max(1, size // 2) if not again else size, False
        first = 0
        while first < len(search.members):
            part = set(range(first, first + size)) - {search.place}
            rest = [m for i, m in enumerate(search.members) if i not in part]
            place = search.place - sum(i < search.place for i in part)
            if 1 < len(rest) < len(search.members) and search.ask(rest, place):
                search.members, search.place, again = rest, place, True
            else:
                first += size
