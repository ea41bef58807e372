"""How often whole numbers were seen, in bounded memory; no torch."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

EXACT = 1024
"""Values up to here are counted as they are, others at the next power of two."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Values and how often each was seen.

    Attributes:
        counts: value, exact up to EXACT -> how often.
        least: the smallest value seen, exactly; None where there was none.
        most: the largest.
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    least: int | None = None
    most: int | None = None

    @property
    def median(self) -> int | None:
        """The lower median, as counted but never above `most`."""
        half, seen = (sum(self.counts.values()) + 1) // 2, 0
        for value, count in sorted(self.counts.items()):
            seen += count
            if seen >= half:
                return min(value, self.most or 0)
        return None

    def __add__(self, other: "Spread") -> "Spread":
        """Both together."""
        ends = [each for each in (self.least, other.least) if each is not None]
        tops = [each for each in (self.most, other.most) if each is not None]
        return Spread(
            counts=dict(Counter(self.counts) + Counter(other.counts)),
            least=min(ends, default=None),
            most=max(tops, default=None),
        )


def spread(values: Iterable[int]) -> Spread:
    """The spread of values, 0 or more each."""
    seen = list(values)
    counts = Counter(v if v <= EXACT else 1 << (v - 1).bit_length() for v in seen)
    return Spread(counts=dict(counts), least=min(seen, default=None), most=max(seen, default=None))
