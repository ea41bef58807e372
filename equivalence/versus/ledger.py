"""The ledger of an A/B comparison: layer-forwards add up one by one, in bounded memory."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from equivalence import plain
from equivalence.receipt import Receipt
from equivalence.units import many
from equivalence.verdict import Memory, Status, worst
from equivalence.versus.census import added
from equivalence.versus.evidence import McNemar, mcnemar
from equivalence.versus.forwards import (
    AGAIN,
    ALL,
    ARMS,
    CANDIDATE,
    ORIGINAL,
    VIEWS,
    Agreement,
    Comparison,
    Difference,
    Forward,
    Group,
    Label,
)

MOST_GROUPS = 64
MOST_FORWARDS = 4096
MOST_FAILING = 3
_MOST_REASONS = 16
_MOST_PATHS = 64
_MOST_ROWS = 16

_Key = tuple[tuple[tuple[str, Label], ...], int, int]
_OTHER: _Key = ((("other", "layers and shapes"),), 0, 0)


@dataclass(frozen=True, kw_only=True)
class About:
    """What a comparison is of.

    Attributes:
        op: of all forwards.
        original: its importable name, or "".
        candidate: likewise.
        contract: the freedoms, as text.
        control: whether the original is to be run again.
        sample: rows a forward.
        seed: of everything random.
    """

    op: str
    original: str = ""
    candidate: str = ""
    contract: str = ""
    control: bool = True
    sample: int = 0
    seed: int = 0


@dataclass(kw_only=True)
class Ledger:
    """What was added so far; not safe in threads by itself.

    Attributes:
        about: what is compared.
        total: all forwards.
        groups: by place and shape.
        forwards: the first records, without their verdicts.
        failing: the first records that are not equal.
        arms: statuses of each arm, counted.
        power: arms that could have been wrong, counted by name.
        paths: receipts by arm and way.
        left_out: calls that were not compared, by reason.
        failed: what failed, by sentence.
        calls: calls seen.
        seconds: spent beside the caller's own calls.
    """

    about: About
    total: Group = field(default_factory=Group)
    groups: dict[_Key, Group] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    failing: list[Forward] = field(default_factory=list)
    arms: Counter[tuple[str, Status]] = field(default_factory=Counter)
    power: Counter[str] = field(default_factory=Counter)
    paths: dict[str, dict[object, Receipt]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    seconds: float = 0.0

    def add(self, one: Forward) -> None:
        """Add a layer-forward."""
        self.total = _plus(self.total, one)
        key = (tuple(one.place.items()), _bucket(one.rows), _bucket(one.columns))
        if key not in self.groups and len(self.groups) >= MOST_GROUPS:
            key = _OTHER
        new = Group(place=dict(key[0]), rows=key[1], columns=key[2])
        self.groups[key] = _plus(self.groups.get(key, new), one)
        if len(self.forwards) < MOST_FORWARDS:
            self.forwards.append(replace(one, verdicts=()))
        if one.status is not Status.EQUAL and len(self.failing) < MOST_FAILING:
            self.failing.append(one)
        if one.note:
            self.fail(one.note)
        for name, arm in one.arms.items():
            self.arms[name, arm.status] += 1
            self.power[name] += arm.power
            _keep(self.paths.setdefault(name, {}), arm.paths)

    def fail(self, sentence: str) -> None:
        """Count what failed."""
        line = plain.line(sentence)
        known = line in self.failed or len(self.failed) < _MOST_REASONS
        self.failed[line if known else "something else"] += 1

    def result(self) -> Comparison:
        """What it came to so far."""
        arms = {
            name: worst(status for status in Status if self.arms[name, status])
            for name in ARMS
            if any(self.arms[name, status] for status in Status)
        }
        undecided = list(self._undecided())
        wrong = list(self._wrong())
        status = Status.DIFFERENT if wrong else Status.UNDECIDED if undecided else Status.EQUAL
        about = self.about
        return Comparison(
            op=about.op,
            original=about.original,
            candidate=about.candidate,
            contract=about.contract,
            status=status,
            why=(*wrong, *undecided),
            arms=arms,
            control=self._control(),
            total=self.total,
            groups=tuple(self.groups[key] for key in sorted(self.groups, key=_order)),
            evidence=tuple(_evidence(self.total)),
            paths={name: tuple(held.values()) for name, held in self.paths.items() if held},
            forwards=tuple(self.forwards),
            failing=tuple(self.failing),
            calls=self.calls,
            left_out=dict(self.left_out),
            failed=dict(self.failed),
            sample=about.sample,
            seed=about.seed,
            seconds=self.seconds,
        )

    def _wrong(self) -> Iterator[str]:
        """Which arms are wrong."""
        for name in (CANDIDATE, ORIGINAL, AGAIN):
            count = self.arms[name, Status.DIFFERENT]
            own = "" if name == CANDIDATE else ", whatever the candidate does"
            if count:
                yield f"the {name} breaks the contract in {many(count, 'layer-forward')}{own}"

    def _undecided(self) -> Iterator[str]:
        """Why nothing may be concluded."""
        whole = self.total.agreement.get(VIEWS[0], {}).get(ALL, Agreement())
        if not whole.forwards:
            yield "no layer-forward was compared"
            return
        if not whole.controls:
            yield "the control arm was not run"
        judged = not any(self.arms[CANDIDATE, each] for each in Status if each is not Status.EQUAL)
        if judged and not self.power[CANDIDATE]:
            yield "no row selects: every window fits into k"
        if self.total.unclassified:
            rows = many(self.total.unclassified, "row")
            yield f"{rows} unclassified: arms differ there, and no logits or scores judge them"
        for name in ARMS:
            if self.arms[name, Status.UNDECIDED]:
                count = many(self.arms[name, Status.UNDECIDED], "layer-forward")
                yield f"the {name} is undecided in {count}"
        if self.failed:
            yield f"{many(sum(self.failed.values()), 'call')} could not be compared"

    def _control(self) -> str:
        """What the original did beside itself."""
        whole = self.total.agreement.get(VIEWS[0], {}).get(ALL, Agreement())
        if not whole.controls:
            return "the control arm was not run"
        apart = whole.controls - whole.control_equal
        if not apart:
            return f"deterministic original: {many(whole.controls, 'run')} again, no difference"
        return (
            f"the original differs from itself in {apart:,} of"
            f" {many(whole.controls, 'layer-forward')}"
        )


def _bucket(count: int) -> int:
    """The power of two that a count does not pass."""
    return 1 << max(0, count - 1).bit_length()


def _order(key: _Key) -> tuple[object, ...]:
    """Numbers by value, words after them, what is other last."""
    labels = [
        (name, isinstance(v, str), 0 if isinstance(v, str) else v, str(v)) for name, v in key[0]
    ]
    return (key == _OTHER, labels, *key[1:])


def _plus(group: Group, one: Forward) -> Group:
    """A group with one more layer-forward."""
    return replace(
        group,
        forwards=group.forwards + 1,
        undecided=group.undecided + (one.status is Status.UNDECIDED),
        different=group.different + (one.status is Status.DIFFERENT),
        agreement={view: _agreed(group.agreement.get(view, {}), one, view) for view in VIEWS},
        masks=_agreed(group.masks, one.masks_alone, VIEWS[0]),
        census=added(group.census, one.census),
        memory=_most(group.memory, {n: arm.memory for n, arm in one.arms.items() if arm.memory}),
        sampled=group.sampled + one.sampled,
        further=group.further + one.further,
        unclassified=group.unclassified + len(one.unclassified),
    )


def _agreed(known: Mapping[str, Agreement], one: Forward, view: str) -> dict[str, Agreement]:
    """The counts of every output with one more layer-forward."""
    stages = {ALL: _agreement(one.new.values(), _values(one.control), view)} if one.new else {}
    for stage, new in one.new.items():
        again = None if one.control is None else one.control.get(stage)
        stages[stage] = _agreement([new], None if again is None else [again], view)
    return {
        stage: known.get(stage, Agreement()) + stages.get(stage, Agreement())
        for stage in dict.fromkeys([*known, *stages])
    }


def _values(control: Mapping[str, Difference] | None) -> list[Difference] | None:
    return None if control is None else list(control.values())


def _agreement(
    new: Iterable[Difference], control: Iterable[Difference] | None, view: str
) -> Agreement:
    """One layer-forward counted; of several outputs the one with the most rows."""
    ours = list(new)
    apart = max(getattr(each, view) for each in ours)
    again = None if control is None else max((getattr(each, view) for each in control), default=0)
    return Agreement(
        forwards=1,
        new_equal=not apart,
        controls=again is not None,
        control_equal=again == 0,
        pairs=again is not None,
        only_new=bool(apart) and again == 0,
        only_control=not apart and bool(again),
        rows=max(each.rows for each in ours),
        new_rows=apart,
        control_rows=again or 0,
    )


def _most(known: Mapping[str, Memory], new: Mapping[str, Memory]) -> dict[str, Memory]:
    """The most of every figure of each arm."""
    merged = dict(known)
    for name, held in new.items():
        old = known.get(name, held)
        reserved = [r for r in (old.reserved, held.reserved) if r is not None]
        merged[name] = Memory(
            transient=max(old.transient, held.transient),
            retained=max(old.retained, held.retained),
            outputs=max(old.outputs, held.outputs),
            reserved=max(reserved, default=None),
            how=held.how,
        )
    return merged


def _keep(held: dict[object, Receipt], paths: Iterable[Receipt]) -> None:
    """Add receipts, one a way."""
    for one in paths:
        key = (one.kernel, one.version, one.arch, tuple(sorted(one.arguments.items())))
        old = held.get(key)
        if old is None and len(held) < _MOST_PATHS:
            held[key] = one
        elif old is not None:
            rows = tuple(dict.fromkeys([*old.rows, *one.rows]))[:_MOST_ROWS]
            held[key] = replace(old, rows=rows, calls=old.calls + one.calls)


def _evidence(total: Group) -> Iterator[McNemar]:
    for view, stages in total.agreement.items():
        for stage, each in stages.items():
            yield mcnemar(
                view=view,
                stage=stage,
                pairs=each.pairs,
                only_new=each.only_new,
                only_control=each.only_control,
            )
