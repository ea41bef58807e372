"""A verdict is data: a status, what was counted, and what was found. It imports no torch."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn

from equivalence.receipt import Receipt

RULES = (
    "invalid-record",
    "crash",
    "timeout",
    "out-of-memory",
    "not-compared",
    "shape",
    "dtype",
    "two-writers",
    "no-writer",
    "wrote-outside",
    "unwritten",
    "pad",
    "hole",
    "out-of-window",
    "duplicate",
    "mask-extra",
    "mask-missing",
    "lost-winner",
    "wrong-tie",
    "order",
    "page-mismatch",
    "page-zero",
    "stale-round",
    "bits",
    "sign-of-zero",
    "nan",
    "row-variance",
    "nondeterminism",
    "diverged",
    "reference-drift",
    "over-budget",
)


PAGES = ("token_pages", "index_pages")
"""Outputs of pages that every rank holds: what is counted are pages, failing ones by slot."""


class Status(Enum):
    """Equal under the contract, different, or nothing may be concluded."""

    EQUAL = "EQUAL"
    UNDECIDED = "UNDECIDED"
    DIFFERENT = "DIFFERENT"

    def __bool__(self) -> NoReturn:
        """Three values have no truth."""
        raise TypeError("a Status is EQUAL, DIFFERENT or UNDECIDED: compare it with `is`")


def worst(statuses: Iterable[Status]) -> Status:
    """DIFFERENT over UNDECIDED over EQUAL; nothing at all is UNDECIDED."""
    seen = set(statuses)
    for status in (Status.DIFFERENT, Status.UNDECIDED, Status.EQUAL):
        if status in seen:
            return status
    return Status.UNDECIDED


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One line under a finding: a place, the value there in decimal and bits, and a note."""

    label: str
    place: str
    value: str = ""
    bits: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One wrong or undecided thing.

    Attributes:
        stage: the output it is about, or "inputs".
        rule: one of RULES.
        status: DIFFERENT, or UNDECIDED where nothing may be concluded.
        run: which recorded run or candidate call.
        row: the row, where one row is meant.
        place: the row's window, the tensor, or what else locates it.
        evidence: the values.
        reading: one sentence naming the likely cause, where the evidence shows it.
    """

    stage: str
    rule: str
    status: Status = Status.DIFFERENT
    run: str = ""
    row: int | None = None
    place: str = ""
    evidence: tuple[Evidence, ...] = ()
    reading: str = ""

    def __post_init__(self) -> None:
        """The set of rules is closed."""
        if self.rule not in RULES:
            message = f"no rule named {self.rule!r}"
            raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What was counted of one output.

    Attributes:
        status: of this output alone.
        counts: rows or cells by class, and `selecting`, `tied`, `short`, `empty` for picks.
        power: False when nothing in it could have been wrong differently.
        rules: failing rows (for logits: rows, not cells) by rule.
        failing: their numbers.
        unit: what `counts` counts, row or page; the pages of a row are those of a slot.
    """

    status: Status
    counts: Mapping[str, int] = field(default_factory=dict)
    power: bool = True
    rules: Mapping[str, int] = field(default_factory=dict)
    failing: tuple[int, ...] = ()
    unit: str = "row"


def merge(stages: Iterable[Stage]) -> Stage:
    """Several looks at one output, as one: counts add up, the worst status stands."""
    looks = list(stages)
    counts: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    for look in looks:
        counts.update(look.counts)
        rules.update(look.rules)
    return Stage(
        status=worst(look.status for look in looks),
        counts=dict(counts),
        power=any(look.power for look in looks),
        rules=dict(rules),
        failing=tuple(sorted({row for look in looks for row in look.failing})),
        unit=next((look.unit for look in looks), "row"),
    )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that one call held beyond its inputs.

    Attributes:
        transient: most that was alive at once, beyond the outputs.
        retained: what stayed alive after the call, beyond the outputs.
        outputs: the storage of the outputs.
        reserved: most that the caching allocator took from the device for it; None without one.
        how: what counted.
    """

    transient: int
    retained: int
    outputs: int
    reserved: int | None
    how: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One launch chain judged: a recorded entry, or one call of the candidate.

    Attributes:
        name: "run 0", "candidate", ...
        stages: by output.
        findings: the first few of each rule and stage; `Stage.rules` counts all of them.
        blame: of the rows whose picks are wrong: where the fault began, by count.
        memory: what the call held; None for recorded runs.
        paths: the kernels that said they ran.
    """

    name: str
    stages: Mapping[str, Stage]
    findings: tuple[Finding, ...] = ()
    blame: Mapping[str, int] = field(default_factory=dict)
    memory: Memory | None = None
    paths: tuple[Receipt, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much was judged: all rows by structure, `scored_rows` by their scores."""

    rows: int = 0
    scored_rows: int = 0

    @property
    def sampled(self) -> bool:
        """Whether some rows were judged by structure alone."""
        return self.scored_rows < self.rows


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of one case.

    Attributes:
        case: its name.
        op: its op.
        path: its file, or "".
        status: the true one, whatever was expected.
        expected: whether expected.toml foresaw exactly this.
        note: why a status is undecided, or what an expectation says.
        contract: the freedoms in force, as text.
        contract_origin: argument, record or default.
        allowed_by: the documented contract among them, by name.
        scores: whose scores judged the picks: reference, recorded, baseline or none.
        coverage: rows and scored rows.
        runs: one entry a launch chain.
        control: recorded runs against each other, by output and class.
        candidate: the candidate's importable name, or "".
    """

    case: str
    op: str
    status: Status
    path: str = ""
    expected: bool = False
    note: str = ""
    contract: str = ""
    contract_origin: str = "default"
    allowed_by: str = ""
    scores: str = "none"
    coverage: Coverage = field(default_factory=Coverage)
    runs: tuple[Run, ...] = ()
    control: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    candidate: str = ""

    def __bool__(self) -> NoReturn:
        """Three values have no truth."""
        raise TypeError("a Verdict has three values: compare verdict.status with `is`")

    @property
    def stages(self) -> dict[str, Stage]:
        """Every output over all runs."""
        names = dict.fromkeys(name for run in self.runs for name in run.stages)
        return {
            name: merge(run.stages[name] for run in self.runs if name in run.stages)
            for name in names
        }

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All kept findings, run by run."""
        return tuple(finding for run in self.runs for finding in run.findings)

    @property
    def failing(self) -> list[int]:
        """Every row that fails in any output of any run."""
        return sorted({row for stage in self.stages.values() for row in stage.failing})

    @property
    def selecting(self) -> int | None:
        """Rows that really select; None where no output is a selection."""
        counts = [s.counts["selecting"] for s in self.stages.values() if "selecting" in s.counts]
        return sum(counts) if counts else None


def run_status(verdicts: Iterable[Verdict], *, allow_structural: bool = False) -> Status:
    """A whole run: the worst, expected differences aside; UNDECIDED where no row selects."""
    cases = list(verdicts)
    status = worst(Status.EQUAL if v.expected else v.status for v in cases)
    selecting = [v.selecting for v in cases if v.selecting is not None]
    structural = bool(selecting) and not sum(selecting)
    if status is Status.EQUAL and structural and not allow_structural:
        return Status.UNDECIDED
    return status
