"""What an A/B comparison knows: one record a layer-forward, groups, and the whole. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NoReturn, TypeAlias

from equivalence.receipt import Receipt
from equivalence.verdict import Memory, Status, Verdict
from equivalence.versus.evidence import McNemar
from equivalence.versus.spread import Spread

ORIGINAL, AGAIN, CANDIDATE = ARMS = ("original", "original again", "candidate")
VIEWS = ("slots", "sets")
ALL = "all"
"""All outputs of a forward together, beside each of them."""

Label: TypeAlias = int | str


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One output of an arm beside the original's.

    Attributes:
        rows: rows compared; of a mask those that are published.
        slots: rows that differ in any bit; of logits and masks inside the windows.
        sets: rows that hold another set; of logits and masks the same rows.
    """

    rows: int
    slots: int
    sets: int


@dataclass(frozen=True, kw_only=True)
class Census:
    """How tied the scores at the cutoff are, over rows that really select.

    Attributes:
        rows: rows of all forwards.
        selecting: of these, the rows whose window holds more than k columns.
        looked_at: selecting rows whose scores were looked at.
        cut: of these, rows whose cutoff is shared by columns that are picked and that are not.
        cut_at_zero: of these, rows whose cutoff is exactly 0, of either sign.
        multiplicity: columns at the cutoff, a value a row.
        margin: ulp from the cutoff down to the best score below it, a value a row that has one.
        scores: whose: "original", "input" or "reference".
    """

    rows: int = 0
    selecting: int = 0
    looked_at: int = 0
    cut: int = 0
    cut_at_zero: int = 0
    multiplicity: Spread = field(default_factory=Spread)
    margin: Spread = field(default_factory=Spread)
    scores: str = ""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm of one layer-forward, judged.

    Attributes:
        status: by legality alone.
        power: whether anything in it could have been wrong differently.
        wrong: how many of the rows judged fail.
        failing: the first few of them.
        memory: what the call held, where it was measured.
        paths: the kernels that said they ran.
    """

    status: Status
    power: bool = False
    wrong: int = 0
    failing: tuple[int, ...] = ()
    memory: Memory | None = None
    paths: tuple[Receipt, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One layer-forward.

    Attributes:
        name: how reports call it.
        op: its op.
        place: layer, ratio and rank, where known.
        rows: T.
        columns: of its score rows.
        new: the candidate beside the original, by output; empty where it gave nothing.
        control: the original run again beside the original; None where it was not.
        arms: by name.
        sampled: rows judged because they are in the sample.
        further: rows judged because arms differ there.
        unclassified: rows where arms differ and that nothing could judge.
        census: of the scores at the cutoff.
        note: why nothing may be concluded.
        masks: the outputs compared that are published masks.
        verdicts: of the sample and of the further rows, where something is not equal.
    """

    name: str
    op: str
    rows: int
    columns: int
    place: Mapping[str, Label] = field(default_factory=dict)
    new: Mapping[str, Difference] = field(default_factory=dict)
    control: Mapping[str, Difference] | None = None
    arms: Mapping[str, Arm] = field(default_factory=dict)
    sampled: int = 0
    further: int = 0
    unclassified: tuple[int, ...] = ()
    census: Census = field(default_factory=Census)
    note: str = ""
    masks: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()

    @property
    def masks_alone(self) -> "Forward":
        """The record with no other outputs than the masks that were published."""
        new = {name: self.new[name] for name in self.masks}
        if self.control is None:
            return replace(self, new=new)
        control = {name: self.control[name] for name in self.masks if name in self.control}
        return replace(self, new=new, control=control)

    @property
    def status(self) -> Status:
        """The worst arm; UNDECIDED where a row is unclassified or nothing was compared."""
        each = {arm.status for arm in self.arms.values()}
        if Status.DIFFERENT in each:
            return Status.DIFFERENT
        whole = self.new and not self.note and not self.unclassified
        return Status.EQUAL if whole and each == {Status.EQUAL} else Status.UNDECIDED


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Layer-forwards of one output counted.

    Attributes:
        forwards: in which the candidate was compared.
        new_equal: in which it gave what the original gave.
        controls: in which the original was run again.
        control_equal: in which it then gave the same.
        pairs: in which both happened.
        only_new: pairs in which the candidate alone differs.
        only_control: pairs in which the original run again alone differs.
        rows: rows compared with the candidate.
        new_rows: rows in which it differs.
        control_rows: rows in which the original run again differs.
    """

    forwards: int = 0
    new_equal: int = 0
    controls: int = 0
    control_equal: int = 0
    pairs: int = 0
    only_new: int = 0
    only_control: int = 0
    rows: int = 0
    new_rows: int = 0
    control_rows: int = 0

    def __add__(self, other: "Agreement") -> "Agreement":
        """Both together."""
        names = [each.name for each in fields(Agreement)]
        return Agreement(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layer-forwards of one layer, ratio, rank and shape.

    Attributes:
        place: layer, ratio and rank, where known.
        rows: a power of two that T does not pass; 0 for forwards of any shape.
        columns: likewise of columns.
        forwards: how many.
        undecided: of which nothing may be concluded.
        different: in which an arm is wrong.
        agreement: by view, then by output; "all" is all outputs together.
        masks: layer-forwards that publish, by output; "all" is every form together.
        census: over all of them.
        memory: the most each arm held.
        sampled, further, unclassified: rows, as in `Forward`.
    """

    place: Mapping[str, Label] = field(default_factory=dict)
    rows: int = 0
    columns: int = 0
    forwards: int = 0
    undecided: int = 0
    different: int = 0
    agreement: Mapping[str, Mapping[str, Agreement]] = field(default_factory=dict)
    masks: Mapping[str, Agreement] = field(default_factory=dict)
    census: Census = field(default_factory=Census)
    memory: Mapping[str, Memory] = field(default_factory=dict)
    sampled: int = 0
    further: int = 0
    unclassified: int = 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A candidate beside an original, and the original beside itself.

    Attributes:
        op: of all forwards.
        original: its importable name, or "".
        candidate: likewise.
        contract: the freedoms every arm has, as text.
        status: by legality alone; a control that did not run leaves it undecided.
        why: sentences on the status.
        arms: each arm over all forwards.
        control: what the control arm showed, in one sentence.
        total: every forward.
        groups: by layer, ratio, rank and shape; the last may be of all others.
        evidence: a test an output and view.
        paths: of each arm, the kernels that said they ran.
        forwards: the first records, without verdicts.
        failing: the first forwards that are not equal, with verdicts.
        calls: calls seen, where a live callable was wrapped.
        left_out: calls that were not compared, by reason.
        failed: what failed, by sentence.
        sample: rows a forward that were judged at least.
        seed: of the sample and of the arms' order.
        seconds: spent on other things than the caller's own call.
    """

    op: str
    original: str
    candidate: str
    contract: str
    status: Status
    why: tuple[str, ...]
    arms: Mapping[str, Status]
    control: str
    total: Group
    groups: tuple[Group, ...]
    evidence: tuple[McNemar, ...]
    paths: Mapping[str, tuple[Receipt, ...]]
    forwards: tuple[Forward, ...]
    failing: tuple[Forward, ...]
    calls: int
    left_out: Mapping[str, int]
    failed: Mapping[str, int]
    sample: int
    seed: int
    seconds: float = 0.0

    def __bool__(self) -> NoReturn:
        """Three values have no truth."""
        raise TypeError("a Comparison has three values: compare comparison.status with `is`")
