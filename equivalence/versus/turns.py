"""Turns: arms called in random order, each on copies and with random numbers of its own."""

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equivalence import layout, memory, poisons, receipt, replay, sides, stages
from equivalence.candidate import Candidate
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.demands import Demands
from equivalence.demands import findings as demanded
from equivalence.errors import UsageError
from equivalence.live import call, clones
from equivalence.live.call import Reading
from equivalence.sides import Side
from equivalence.verdict import Finding, Status


@dataclass(frozen=True, kw_only=True, eq=False)
class Seat:
    """What every arm of one live call needs.

    Attributes:
        case: the call as a case.
        reading: how it is read as one.
        like: the function whose arguments name those of all arms.
        contract: what an arm may do to its inputs.
        seed: of random numbers.
        number: of the call.
    """

    case: Case
    reading: Reading
    like: Candidate
    contract: Contract
    seed: int
    number: int


def order(arms: Iterable[str], seed: int, number: int) -> list[str]:
    """The arms in the random order of one call."""
    names = list(arms)
    random.Random(f"order {seed} {number}").shuffle(names)  # noqa: S311 - no secret
    return names


@contextmanager
def own_random(inputs: Mapping[str, Tensor], seed: int, number: int, arm: str) -> Iterator[None]:
    """Random numbers of an arm's own; those of the CPU and of the inputs' GPUs go on as before."""
    devices = sorted({each.device.index for each in inputs.values() if each.is_cuda})
    drawn = random.Random(f"{arm} {seed} {number}").getrandbits(62)  # noqa: S311 - no secret
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(drawn)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(drawn)
        yield


def turn(
    arm: Candidate,
    seat: Seat,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    demands: Demands,
) -> Side:
    """Call one arm as the engine would; whatever it does but interrupt is its outcome.

    Args:
        arm: what is called.
        seat: the call.
        args: copies of the arguments that are the arm's own.
        kwargs: likewise.
        name: of the arm.
        demands: what the call must keep to.
    """
    inputs = seat.case.inputs
    device = next(iter(inputs.values())).device
    _forget(seat, args, kwargs)
    apart = own_random(inputs, seat.seed, seat.number, name)
    with receipt.collected() as left, apart, memory.measured(device) as meter:
        try:
            result = arm(*args, **kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except KeyboardInterrupt:
            raise
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            return _lost(name, "out-of-memory", call.said(error))
        except BaseException as error:  # noqa: BLE001 - an arm must not reach the engine
            return _lost(name, "crash", call.said(error))
    try:
        side = side_of(seat, args, kwargs, result, name=name)
    except Exception as error:  # noqa: BLE001 - the result is the arm's own object
        reading = str(error) if isinstance(error, UsageError) else call.said(error)
        return _lost(name, "not-compared", reading)
    gave = list(side.outputs.values())
    held = memory.bytes_of(gave, given=tensors((args, kwargs)))
    taken = meter.of(held, meter.fresh(gave))
    found = demanded(demands, name, memory=taken, paths=left)
    outputs = {stage: layout.copied(tensor) for stage, tensor in side.outputs.items()}
    return replace(
        side,
        outputs=outputs,
        scores=outputs.get("logits"),
        findings=(*side.findings, *found),
        memory=taken,
        paths=tuple(left),
    )


def _forget(seat: Seat, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Poison what arguments for outputs hold from before, which an arm might leave as its own.

    What callers fill such an argument with stays: pads, zeros, infinities. So does an input.
    """
    reading = seat.reading
    arguments = call.arguments_of(seat.like, args, kwargs)
    inputs, _ = call.inputs_of(reading, seat.like, args, kwargs)
    known = {each.untyped_storage().data_ptr() for each in inputs.values()}
    for stage, name in reading.inplace.items():
        held = arguments.get(name)
        if not isinstance(held, Tensor) or held.dtype not in stages.dtypes_of(seat.case, stage):
            continue
        if held.layout is not torch.strided or held.untyped_storage().data_ptr() in known:
            continue
        if held.element_size() == 1:
            continue  # every byte of a mask, or of e4m3, is a value
        filled = held == (0 if held.is_floating_point() else stages.pad_of(seat.case, stage))
        kind = poisons.SCORE if held.is_floating_point() else poisons.INDEX
        held.masked_fill_(~(filled | held.isinf()), kind[0])


def side_of(
    seat: Seat,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: object,
    *,
    name: str,
) -> Side:
    """What a call gave and wrote, by the names of the op; nothing is copied.

    Raises:
        UsageError: it cannot be read.
    """
    case, reading = seat.case, seat.reading
    outputs = call.outputs_of(reading, result, call.arguments_of(seat.like, args, kwargs))
    outputs = {stage: replay.plain_of(each) for stage, each in outputs.items()}
    after, _ = call.inputs_of(reading, seat.like, args, kwargs)
    mutated = {n: t for n, t in after.items() if not same(t, case.inputs[n])}
    side = sides.given(case, outputs, name)
    outcome = replay.Outcome(outputs=outputs, mutated=mutated)
    found = sides.written(case, outcome, seat.contract, name)
    return replace(side, findings=(*side.findings, *found))


def tensors(tree: object) -> list[Tensor]:
    """Every tensor in lists, tuples, dicts and dataclasses of any depth, once."""
    return clones.tensors_in([tree], {})


def spoil(gave: Iterable[object]) -> None:
    """Poison what an arm gave, since the next may hand out the same buffer unwritten."""
    for each in gave:
        # An arm's own object may do anything; where it cannot be written a stale buffer hides.
        with suppress(Exception):
            for tensor in tensors(each):
                with suppress(Exception):
                    poisons.fill(tensor, 0)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    pairs = zip(layout.pieces(a), layout.pieces(b), strict=True)
    return replay.alike(a, b) and all(torch.equal(x, y) for x, y in pairs)


def _lost(name: str, rule: str, reading: str) -> Side:
    """An arm that gave nothing."""
    found = Finding(
        stage="candidate", rule=rule, status=Status.UNDECIDED, run=name, reading=reading
    )
    return Side(name=name, findings=(found,))
