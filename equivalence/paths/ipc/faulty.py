"""Faults on demand, as data: what an engine gets wrong, put in where the ways meet the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from equivalence.errors import UsageError
from equivalence.paths.ipc import known
from equivalence.paths.ipc import plan as plans
from refimpl import batch as batches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from equivalence.paths.ipc.peers import Peers
    from equivalence.paths.ipc.plan import Plan
    from equivalence.world.link import Link
    from refimpl.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        name: in FAULTS.
        rank: the rank that has it; None for one that it shows on, see `chosen`. Some faults are
            in every rank's code: these ignore it.
        turn: the round of the step that it strikes in, where it strikes once. A round is a barrier
            or a collective.
        delay: seconds, of delays.
        wrap_bits: width of the offset that wraps; 0 for one that the batch needs more than.
    """

    name: str
    rank: int | None = None
    turn: int = 0
    delay: float = 0.01
    wrap_bits: int = 0

    def as_json(self) -> dict[str, Any]:
        """As a setting of `step.compose`."""
        return asdict(self)


FAULTS = known.FAULTS
"""Every fault by name."""

_MOST_BITS = 63
_MOST_DELAY_S = 86400


@dataclass(frozen=True, kw_only=True, eq=False)
class Seams:
    """Where a step may be changed.

    Attributes:
        inputs: what a rank is given -> what it takes.
        plan: as `plan.of`.
        peers: (peers, plan) -> peers.
    """

    inputs: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    plan: Callable[..., Plan]
    peers: Callable[[Peers, Plan], Peers]


def seams(given: Mapping[str, Any] | None, *, link: Link, way: str) -> Seams:
    """The seams of a step, with a fault in them or without.

    Raises:
        UsageError: there is no such fault, or the way does not have its place.
    """
    if given is None:
        return Seams(inputs=dict, plan=plans.of, peers=lambda peers, _: peers)
    fault = read(given, way=way)
    told = FAULTS[fault.name]
    at: dict[str, Fault] = {"fault": fault}

    def inputs(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if told.inputs is None:
            return tensors
        return told.inputs(_placed(fault, link.ranks, None), link, tensors)

    def plan(batch: Batch, **call: Any) -> Plan:  # noqa: ANN401 - as `plan.of`
        right = plans.of(batch, **call)
        at["fault"] = _placed(fault, link.ranks, batch)
        return right if told.plan is None else told.plan(at["fault"], link, batch, right, call)

    def peers(side: Peers, plan: Plan) -> Peers:
        return side if told.peers is None else told.peers(at["fault"], link, side, plan)

    return Seams(inputs=inputs, plan=plan, peers=peers)


def parse(text: str) -> Fault:
    """A fault from NAME,KEY=VALUE,...: the keys are the fields of `Fault`.

    Raises:
        UsageError: there is none of that name, no such key, a key is named twice, or a value is
            no number or one that nothing has.
    """
    name, *settings = text.split(",")
    if name not in FAULTS:
        raise UsageError(f"no fault is named {name!r}: there are {', '.join(FAULTS)}")
    hints = get_type_hints(Fault)
    kinds = {key: float if hint is float else int for key, hint in hints.items() if key != "name"}
    values: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in kinds:
            raise UsageError(f"fault {text}: {key!r} is none of {', '.join(kinds)}")
        if key in values:
            raise UsageError(f"fault {text}: {key} is named twice")
        try:
            values[key] = kinds[key](value)
        except ValueError:
            raise UsageError(f"fault {text}: {key} is {value!r}, no number") from None
    fault = Fault(name=name, **values)
    check(fault)
    return fault


def check(
    fault: Fault,
    *,
    ways: Sequence[str] = (),
    ranks: int | None = None,
    timeout: float = _MOST_DELAY_S,
) -> None:
    """Refuse ways that do not have a fault's place, and numbers that no fault has.

    Args:
        fault: one of FAULTS.
        ways: that it is put into.
        ranks: how many there are, where that is known.
        timeout: seconds of silence after which a rank is given up.

    Raises:
        UsageError: a way does not have its place, or a number is out of its range.
    """
    places = FAULTS[fault.name].ways
    for way in ways:
        if way not in places:
            raise UsageError(
                f"{fault.name} has no place in {way}: it is one of {', '.join(places)}"
            )
    last = "the last rank" if ranks is None else str(ranks - 1)
    rank = 0 if fault.rank is None else fault.rank
    inside = {
        "rank": rank >= 0 and (ranks is None or rank < ranks),
        "turn": fault.turn >= 0,
        "delay": 0 <= fault.delay <= timeout,
        "wrap_bits": 0 <= fault.wrap_bits <= _MOST_BITS,
    }
    wrong = [f"{name} is {getattr(fault, name)}" for name, fits in inside.items() if not fits]
    if wrong:
        raise UsageError(
            f"fault {fault.name}: {', '.join(wrong)}; rank is 0 to {last}, turn 0 or more, "
            f"delay 0 to {timeout:g} seconds, wrap_bits 0 to {_MOST_BITS}"
        )


def read(given: Mapping[str, Any], *, way: str) -> Fault:
    """A fault from its data.

    Raises:
        UsageError: there is none like it, or the way does not have its place.
    """
    try:
        fault = Fault(**given)
    except TypeError as error:
        raise UsageError(f"fault {dict(given)}: {error}") from error
    if fault.name not in FAULTS:
        raise UsageError(f"no fault named {fault.name!r}: one of {', '.join(FAULTS)}")
    check(fault, ways=[way])
    return fault


def lacking(
    fault: Fault, *, batch: Batch, kinds: int, layers: int, earlier: Sequence[Batch] = ()
) -> list[str]:
    """What a step lacks for a fault to show, of `NEEDS`; values are not looked at.

    Args:
        fault: any.
        batch: of the step.
        kinds: how many.
        layers: of every kind.
        earlier: batches of the steps before it.
    """
    now = batches.current_slots(batch)
    writers = batches.page_writers(batch)
    slots = batches.row_locations(batch).long() // batch.page_size
    has = {
        "two ranks": batch.cp > 1,
        "prefix": bool((batches.slot_counts(batch)[0] > 0).any()),
        "current": len(now) > 0,
        "remote current": batch.cp > 1 and len(now) > 0,
        "two current": len(now) > 0 and int(writers.bincount().max()) > 1,
        "shared page": len(slots) > 0 and int(slots.bincount().max()) > 1,
        "one kind": kinds == 1,
        "two rounds": layers > 1,
        "two turns": any(_alike(other, batch) for other in earlier),
    }
    return [need for need in FAULTS[fault.name].needs if not has.get(need, True)]


def unmet(fault: Fault, lacks: Sequence[Sequence[str]]) -> str:
    """Why a fault changed nothing, in words.

    Args:
        fault: that was injected.
        lacks: what each step lacked, as `lacking` tells.
    """
    needs = min(map(list, lacks), key=len, default=[])
    told = [known.NEEDS[need] for need in needs]
    if not needs and fault.turn:
        told = [f"a step that comes to round {fault.turn}"]
    elif not needs and fault.wrap_bits:
        told = [f"a prefix page at byte 2**{fault.wrap_bits - 1} of its pool or after it"]
    elif not needs and "values" in FAULTS[fault.name].needs:
        told = [known.NEEDS["values"]]
    return f"it needs {'; '.join(told)}" if told else "the bytes of these steps hide it"


def _alike(one: Batch, other: Batch) -> bool:
    """Whether two batches have the same shapes and another plan."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in batches.TENSORS]
    if any(a.shape != b.shape for a, b in pairs):
        return False
    return not all(a.equal(b) for a, b in zip(_planned(one), _planned(other), strict=True))


def _planned(batch: Batch) -> list[Tensor]:
    """What shows of a plan: lengths, and where prefix pages are. Any writer may write a page."""
    pages = batch.slot_pages.long().clamp(min=0)
    pages[batches.current_slots(batch)] = 0
    return [
        batch.prefix_lens,
        batch.extend_lens,
        batch.owner[pages],
        batch.local_page[pages],
    ]


def _placed(fault: Fault, ranks: int, batch: Batch | None) -> Fault:
    """The fault with a rank, so that every rank knows which it is."""
    rank = fault.rank
    if rank is None:
        writers = [0] if batch is None else [*batches.page_writers(batch).tolist(), 0]
        rank = (writers[0] + 1) % ranks if FAULTS[fault.name].reads else writers[0]
    if not 0 <= rank < ranks:
        raise UsageError(f"fault {fault.name} is that of rank {rank}: there are {ranks}")
    return replace(fault, rank=rank)
