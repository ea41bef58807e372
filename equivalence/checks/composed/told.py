"""What was found of an output that every rank owes, rule by rule, and which ranks hold the same."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from equivalence import wording
from equivalence.tally import KEPT
from equivalence.verdict import Finding, Stage, Status

SHOWN = 3
"""Places that a finding shows."""
_ALL = (-1, -1)


@dataclass(kw_only=True)
class Told:
    """What was found so far.

    Attributes:
        rules: findings, each counted.
        failing: slots.
        findings: the first of each rule.
        places: the rank and layer of each of them.
        current: how many current pages are wrong, by rank and layer.
    """

    rules: Counter[str] = field(default_factory=Counter)
    failing: set[int] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    current: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, rule: str, found: Callable[[], Finding], *, at: tuple[int, int] = _ALL) -> None:
        """Count a finding, and make and keep it if it is one of the first of its rule."""
        self.rules[rule] += 1
        if self.rules[rule] <= KEPT:
            self.findings.append(found())
            self.places.append(at)

    def stage(self, count: int, *, power: bool, unit: str = "row") -> Stage:
        """What came of so many rows or pages; ranks that hold others are no further wrong one."""
        different = sum(n for rule, n in self.rules.items() if rule != "diverged")
        status = Status.DIFFERENT if different else Status.EQUAL if count else Status.UNDECIDED
        return Stage(
            status=status,
            counts={"rows": count, "identical": count - different, "different": different},
            power=power,
            rules=dict(self.rules),
            failing=tuple(sorted(self.failing)),
            unit=unit,
        )


def groups(holders: Mapping[bytes, list[int]], what: str) -> str:
    """Which ranks hold what, in one sentence.

    Args:
        holders: ranks by the digest of what they hold; b"" is the reference's.
        what: it is called.
    """
    right, others = holders.get(b""), [ranks for key, ranks in holders.items() if key]
    if right is not None:
        first, rest = f"{_ranks(right)} the reference's {what}", others
    else:
        first, rest = f"{_ranks(others[0])} one {what}", others[1:]
    told = ", ".join([first, *(f"{_ranks(ranks, verb=False)} another" for ranks in rest)])
    none = "neither" if len(others) == 2 else "none of them"  # noqa: PLR2004 - two groups
    return told if right is not None else f"{told}, {none} the reference's"


def _ranks(ranks: list[int], *, verb: bool = True) -> str:
    name = wording.ranks(ranks, most=8)
    return f"{name} {'holds' if len(ranks) == 1 else 'hold'}" if verb else name
