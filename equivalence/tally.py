"""Counting: what blocks of rows add up to, stage by stage, and the first few findings of each."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from torch import Tensor

from equivalence.checks.rows import UNDECIDED, Decided, failing, name, tally
from equivalence.receipt import Receipt
from equivalence.verdict import RULES, Finding, Memory, Run, Stage, Status

KEPT = 8
"""Findings kept of each rule and stage; all are counted."""


@dataclass(kw_only=True)
class StageTally:
    """One output, so far."""

    counts: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    failing: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    power: bool = False

    def add(self, decided: Decided, ids: Tensor, *, run: str) -> None:
        """Add a block of rows."""
        cells = "compared" in decided.counts
        classes = tally(decided.codes)
        wrong = failing(decided.codes)
        self.power |= decided.power
        self.counts.update(decided.counts)
        self.rules.update({rule: n for rule, n in classes.items() if rule in RULES})
        if not cells:
            self.counts["rows"] += len(ids)
            for kind in ("identical", "reordered", "tied", "open", "undecided"):
                self.counts[kind] += classes.get(kind, 0)
            self.counts["different"] += int(wrong.sum())
        self.failing += ids[wrong].tolist()
        told = Counter(finding.rule for finding in self.findings)
        for i in (wrong | (decided.codes == UNDECIDED)).nonzero()[:, 0].tolist():
            rule = name(int(decided.codes[i]))
            if told[rule] < KEPT:
                told[rule] += 1
                self.findings.append(replace(decided.explain(i), run=run))

    def stage(self) -> Stage:
        """What it came to."""
        if self.rules:
            status = Status.DIFFERENT
        elif self.counts["undecided"] or not (self.counts["rows"] + self.counts["compared"]):
            status = Status.UNDECIDED
        else:
            status = Status.EQUAL
        return Stage(
            status=status,
            counts=dict(self.counts),
            power=self.power,
            rules=dict(self.rules),
            failing=tuple(self.failing),
        )


@dataclass(kw_only=True)
class RunTally:
    """One launch chain, so far."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    stages: defaultdict[str, StageTally] = field(default_factory=lambda: defaultdict(StageTally))
    blame: Counter[str] = field(default_factory=Counter)
    memory: Memory | None = None
    paths: tuple[Receipt, ...] = ()

    def run(self) -> Run:
        """What it came to."""
        told = [*self.findings, *(f for tally in self.stages.values() for f in tally.findings)]
        return Run(
            name=self.name,
            stages={stage: tally.stage() for stage, tally in self.stages.items()},
            findings=tuple(told),
            blame=dict(self.blame),
            memory=self.memory,
            paths=self.paths,
        )
