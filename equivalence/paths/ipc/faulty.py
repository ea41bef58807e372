"""Faults on demand, as data: what an engine gets wrong, put in where the ways meet the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from equivalence.errors import UsageError
from equivalence.paths.ipc import known
from equivalence.paths.ipc.plan import PLANS
from refimpl import batch as batches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Seams:
    """Where a step may be changed.

    Attributes:
        inputs: what a rank is given -> what it takes.
        plan: as `Plans.of`.
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
        return Seams(inputs=dict, plan=PLANS.of, peers=lambda peers, _: peers)
    fault = read(given, way=way)
    told = FAULTS[fault.name]
    at: dict[str, Fault] = {"fault": fault}

    def inputs(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if told.inputs is None:
            return tensors
        return told.inputs(_placed(fault, link.ranks, None), link, tensors)

    def plan(batch: Batch, **call: Any) -> Plan:  # noqa: ANN401 - as `Plans.of`
        right = PLANS.of(batch, **call)
        at["fault"] = _placed(fault, link.ranks, batch)
        return right if told.plan is None else told.plan(at["fault"], link, batch, right, call)

    def peers(side: Peers, plan: Plan) -> Peers:
        return side if told.peers is None else told.peers(at["fault"], link, side, plan)

    return Seams(inputs=inputs, plan=plan, peers=peers)


def parse(text: str) -> Fault:
    """A fault from NAME,KEY=VALUE,...: the keys are the fields of `Fault`.

    Raises:
        UsageError: there is none of that name, no such key, or a value is no number.
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
        try:
            values[key] = kinds[key](value)
        except ValueError:
            raise UsageError(f"fault {text}: {key} is {value!r}, no number") from None
    return Fault(name=name, **values)


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
    places = FAULTS[fault.name].ways
    if way not in places:
        raise UsageError(f"{fault.name} has no place in {way}: it is one of {', '.join(places)}")
    return fault


def lacking(fault: Fault, *, batch: Batch, kinds: int, layers: int) -> list[str]:
    """What a step lacks for a fault to show, of `NEEDS`; two turns and values are not looked at."""
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
    }
    return [need for need in FAULTS[fault.name].needs if not has.get(need, True)]


def _placed(fault: Fault, ranks: int, batch: Batch | None) -> Fault:
    """The fault with a rank, so that every rank knows which it is."""
    rank = fault.rank
    if rank is None:
        writers = [0] if batch is None else [*batches.page_writers(batch).tolist(), 0]
        rank = (writers[0] + 1) % ranks if FAULTS[fault.name].reads else writers[0]
    if not 0 <= rank < ranks:
        raise UsageError(f"fault {fault.name} is that of rank {rank}: there are {ranks}")
    return Fault(**{**asdict(fault), "rank": rank})
