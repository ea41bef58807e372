"""What a caller demands of a call beyond its outputs: how much memory, and which kernels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from equivalence.errors import UsageError
from equivalence.receipt import Receipt
from equivalence.units import many, size
from equivalence.verdict import Evidence, Finding, Memory, Status


@dataclass(frozen=True, kw_only=True)
class Demands:
    """Demands on every call of a candidate.

    Attributes:
        max_transient: bytes a call may hold at once beyond inputs and outputs; None for any.
        require_path: kernels or modules of which each call must leave a receipt.

    Raises:
        UsageError: max_transient is no count of bytes.
    """

    max_transient: int | None = None
    require_path: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """A budget is a count of bytes; a path has a name."""
        most = self.max_transient
        if most is not None and (type(most) is not int or most < 0):
            raise UsageError(f"max_transient is {most!r}; it is bytes, 0 or more")
        if not all(self.require_path):
            raise UsageError("require_path names a kernel or a module, and one name is empty")


def findings(
    demands: Demands, run: str, *, memory: Memory | None, paths: Sequence[Receipt]
) -> Iterator[Finding]:
    """What one call that returned did not keep to."""
    most = demands.max_transient
    if most is not None and memory is not None and memory.transient > most:
        more = many(memory.transient - most, "byte")
        yield Finding(
            stage="memory",
            rule="over-budget",
            run=run,
            place=f"counted by {memory.how}",
            evidence=(
                Evidence(label="want", place="transient", value=f"at most {size(most)}"),
                Evidence(label="got", place="transient", value=size(memory.transient)),
            ),
            reading=f"{more} more than max_transient={most} allows",
        )
    for name in demands.require_path:
        if not any(receipt.of(name) for receipt in paths):
            left = ", ".join(dict.fromkeys(receipt.kernel for receipt in paths)) or "nothing"
            yield Finding(
                stage="path",
                rule="not-compared",
                status=Status.UNDECIDED,
                run=run,
                reading=f"no call of {name} was told of, and it is required; it was {left}",
            )
