"""A matrix of ways by scenarios: what composing pages over ranks came to, as data. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from equivalence.verdict import Status, Verdict, worst

_WAYS = "equivalence.paths.ipc.ways"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One batch composed by every rank, and judged.

    Attributes:
        verdict: of the case; UNDECIDED where a rank gave nothing.
        pages: that were compared: of every rank, layer, kind and slot.
        bytes: of those.
        seconds: until every rank had answered, its judgement left out.
        lacks: what it lacked for the fault that was injected to show, see `faulty.lacking`.
    """

    verdict: Verdict
    pages: int
    bytes: int
    seconds: float
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way over the steps of one scenario, on the same ranks.

    Attributes:
        way: a name of `paths.ipc.ways.WAYS`.
        scenario: a name of `requests.NAMES`, or of a case.
        steps: those that ran; none follows one in which a rank failed.
        planned: how many there are.
        path: the case file, or "".
    """

    way: str
    scenario: str
    steps: tuple[Step, ...]
    planned: int
    path: str = ""

    @property
    def status(self) -> Status:
        """The worst of its steps; nothing run is UNDECIDED."""
        return worst(step.verdict.status for step in self.steps)

    @property
    def ran(self) -> tuple[str, ...]:
        """The ways that said they ran: another one where there is no peer memory."""
        paths = [path for step in self.steps for run in step.verdict.runs for path in run.paths]
        kernels = [path.kernel for path in paths if path.of(_WAYS)]
        return tuple(dict.fromkeys(kernel.removeprefix(f"{_WAYS}.") for kernel in kernels))

    @property
    def pages(self) -> int:
        """That were compared."""
        return sum(step.pages for step in self.steps)

    @property
    def bytes(self) -> int:
        """That were compared."""
        return sum(step.bytes for step in self.steps)

    @property
    def different(self) -> int:
        """Pages that differ."""
        return sum(
            stage.counts.get("different", 0)
            for step in self.steps
            for stage in step.verdict.stages.values()
            if stage.unit == "page"
        )


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A whole run.

    Attributes:
        ranks: how many.
        transport: between them.
        settings: what the scenarios were made from, by option.
        fault: what was injected on purpose, or "".
        cells: in order.
        note: why nothing may be concluded though all are equal, or "".
    """

    ranks: int
    transport: str
    settings: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""
    cells: tuple[Cell, ...] = ()
    note: str = ""

    @property
    def status(self) -> Status:
        """The worst; nothing composed is UNDECIDED, and so is what could not have been wrong."""
        status = worst(cell.status for cell in self.cells)
        return Status.UNDECIDED if self.note and status is Status.EQUAL else status
