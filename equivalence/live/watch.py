"""Watch: a live callable whose calls are made again, and a candidate's, on copied arguments."""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from equivalence import ops, plain
from equivalence.candidate import Candidate
from equivalence.case import Case
from equivalence.demands import Demands
from equivalence.errors import InvalidCase, UsageError
from equivalence.live import call, clones
from equivalence.live.call import Reading
from equivalence.live.recorder import Recorder
from equivalence.sides import Side
from equivalence.verdict import Status
from equivalence.versus import turns
from equivalence.versus.abreast import Rules, abreast, failed
from equivalence.versus.forwards import CANDIDATE, ORIGINAL, Comparison, Forward, Label
from equivalence.versus.ledger import About, Ledger

BASELINE = "baseline"
PLACE = ("layer", "ratio", "rank")
_BUSY: ContextVar[bool] = ContextVar("a watched call is under way", default=False)

Where: TypeAlias = Mapping[str, Label] | Callable[[Mapping[str, Any]], Mapping[str, Label]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How calls are watched.

    Attributes:
        reading: how a call is read as one of the op.
        about: what is compared.
        rules: how layer-forwards are judged.
        demands: what a call of the candidate must keep to.
        every: one call in so many is compared, the first one first.
        max_bytes: of the copies of a call.
        max_seconds: of our own work, after which nothing more is compared; None for ever.
        where: layer, ratio and rank of a call, or what tells them from its arguments by name.
        recorder: saves calls that differ.
    """

    reading: Reading
    about: About
    rules: Rules
    demands: Demands
    every: int
    max_bytes: int
    max_seconds: float | None
    where: Where
    recorder: Recorder | None


@dataclass(kw_only=True, eq=False)
class _Call:
    """One call under way.

    Attributes:
        number: of the call.
        args: clones from before anything ran, never handed out.
        kwargs: likewise.
        case: the call as a case of them.
        seat: what every arm of it needs.
        place: layer, ratio and rank.
        order: the arms in the order they run.
        clones: bytes of one copy of the arguments.
        sides: what arms gave so far.
        held: the caller's own tensors and what they held when the original had returned.
        left_out: why the call is not compared after all.
    """

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    case: Case
    seat: turns.Seat
    place: Mapping[str, Label]
    order: list[str]
    clones: int
    sides: dict[str, Side] = field(default_factory=dict)
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    left_out: str = ""


class Shadow:
    """A drop-in for the original whose calls are compared with a candidate's; see `shadow`."""

    def __init__(self, original: Candidate, arms: Mapping[str, Candidate], plan: Plan) -> None:
        """Look like the original."""
        functools.update_wrapper(self, original)
        vars(self).pop("result", None)  # it would stand before our own
        self.__wrapped__ = original
        self._arms = arms
        self._plan = plan
        self._lock = threading.Lock()
        self._ledger = Ledger(about=plan.about)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's own
        """Call the original; its result and its exceptions are the caller's, untouched."""
        if _BUSY.get() or torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        token = _BUSY.set(True)
        try:
            return self._watched(args, kwargs)
        finally:
            _BUSY.reset(token)

    def __get__(self, owner: object, kind: type | None = None) -> Self | MethodType:
        """Bind as a function does."""
        return self if owner is None else MethodType(self, owner)

    def result(self) -> Comparison:
        """What the calls so far came to."""
        with self._lock:
            return self._ledger.result()

    def _watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - the function's own
        one: _Call | None = None
        with self._ours():
            one = self._begin(args, kwargs)
        if one is None:
            return self.__wrapped__(*args, **kwargs)
        at = one.order.index(ORIGINAL)
        with self._ours(one):
            self._run(one, one.order[:at])
        try:
            result = self.__wrapped__(*args, **kwargs)
        except BaseException as error:
            with self._ours(one):
                self._add(
                    failed(one.case, f"the original raised {call.said(error)}", place=one.place)
                )
            raise
        try:
            with self._ours(one):
                self._take(one, args, kwargs, result)
                self._run(one, one.order[at + 1 :])
        finally:
            with self._ours(one):
                self._put_back(one)
        with self._ours(one):
            self._judge(one)
        return result

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Copy what the call is given, where it is to be compared."""
        plan, ledger = self._plan, self._ledger
        with self._lock:
            number = ledger.calls
            ledger.calls += 1
            spent = ledger.seconds
        reason = "every" if number % plan.every else ""
        if not reason and plan.max_seconds is not None and spent >= plan.max_seconds:
            reason = "max_seconds"
        if not reason and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            reason = "capturing"
        clones = 0 if reason else call.bytes_of(args, kwargs)
        if 2 * clones > plan.max_bytes:
            reason = "max_bytes"
        if reason:
            self._leave_out(reason)
            return None
        fresh, named = call.cloned(args, kwargs)
        inputs, params = call.inputs_of(plan.reading, self.__wrapped__, fresh, named)
        where = plan.where
        if callable(where):
            where = where(call.arguments_of(self.__wrapped__, fresh, named))
        place = {name: label(where[name]) for name in PLACE if where.get(name) is not None}
        case = call.case_of(plan.reading, inputs, params, name=f"call {number}")
        case = replace(case, contract=None)
        if not ops.validate(case)["rows"]:
            self._leave_out("no rows")
            return None
        return _Call(
            number=number,
            args=fresh,
            kwargs=named,
            case=case,
            seat=turns.Seat(
                case=case,
                reading=plan.reading,
                like=self.__wrapped__,
                contract=plan.rules.contract,
                seed=plan.rules.seed,
                number=number,
            ),
            place=place,
            order=turns.order((ORIGINAL, *self._arms), plan.rules.seed, number),
            clones=clones,
        )

    def _run(self, one: _Call, names: Sequence[str]) -> None:
        """Run arms, each on its own copies."""
        for name in names:
            if not one.left_out:
                args, kwargs = call.cloned(one.args, one.kwargs)
                one.sides[name] = turns.turn(
                    self._arms[name],
                    one.seat,
                    args,
                    kwargs,
                    name=name,
                    demands=self._plan.demands if name == CANDIDATE else Demands(),
                )
                self._check_size(one, [*one.sides[name].outputs.values()])

    def _take(
        self, one: _Call, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        """Keep what the original gave its caller, until the call is judged."""
        side = turns.side_of(one.seat, args, kwargs, result, name=ORIGINAL)
        if one.order[-1] == ORIGINAL:  # nothing runs that could change them
            one.sides[ORIGINAL] = side
            return
        own = [t for t in turns.tensors((result, side.outputs)) if t.layout is torch.strided]
        self._check_size(one, own)
        if one.left_out:
            return
        copies, _ = call.cloned(own, {})
        one.held = list(zip(own, copies, strict=True))
        known = {id(tensor): copy for tensor, copy in one.held}
        outputs = {stage: known[id(tensor)] for stage, tensor in side.outputs.items()}
        one.sides[ORIGINAL] = replace(side, outputs=outputs, scores=outputs.get("logits"))

    def _check_size(self, one: _Call, outputs: Sequence[Tensor]) -> None:
        """Leave the call out where the copies of it pass the bound, were all arms like this one."""
        held = 2 * one.clones + (len(self._arms) + 1) * call.bytes_of(outputs, {})
        one.left_out = "max_bytes" if held > self._plan.max_bytes else one.left_out

    def _put_back(self, one: _Call) -> None:
        """Give the caller's tensors their values where a later arm changed them."""
        # An inference tensor may be written in this mode alone.
        with torch.inference_mode():
            for tensor, values in one.held:
                if not turns.same(tensor, values):
                    clones.overwrite(tensor, values)

    def _judge(self, one: _Call) -> None:
        """Add the call to the ledger, and save it where it differs."""
        if one.left_out:
            self._leave_out(one.left_out)
            return
        plan = self._plan
        baseline = one.sides.pop(BASELINE, None)
        if ORIGINAL not in one.sides or CANDIDATE not in one.sides:
            return
        record = abreast(one.case, one.sides, rules=plan.rules, place=one.place, baseline=baseline)
        self._add(record)
        apart = any(each.slots for each in record.new.values())
        if plan.recorder is not None and (apart or record.status is Status.DIFFERENT):
            gave = {name: side.outputs for name, side in one.sides.items() if side.outputs}
            plan.recorder.save(
                one.case.inputs, one.case.params, list(gave.values()), arms=", ".join(gave)
            )

    def _add(self, record: Forward) -> None:
        with self._lock:
            self._ledger.add(record)

    def _leave_out(self, reason: str) -> None:
        with self._lock:
            self._ledger.left_out[reason] += 1

    @contextmanager
    def _ours(self, one: _Call | None = None) -> Iterator[None]:
        """Time our own work, and keep its failures from the caller; an interrupt passes."""
        began = time.perf_counter()
        try:
            with torch.no_grad():
                yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the engine's call goes on whatever we meet
            known = isinstance(error, UsageError | InvalidCase)
            with self._lock:
                self._ledger.fail(str(error) if known else f"internal: {call.said(error)}")
            if one is not None:
                one.sides.clear()
        finally:
            with self._lock:
                self._ledger.seconds += time.perf_counter() - began


def label(value: object) -> Label:
    """A layer, ratio or rank as a report can hold it."""
    return value if type(value) is int else plain.line(value, most=40)
