"""A/B: an original, the same original again and a candidate on identical inputs, call by call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from equivalence import allowed, judge, ops, sides, windows
from equivalence.candidate import Candidate, name_of
from equivalence.case import JSON, Case, held
from equivalence.contract import Contract, describe
from equivalence.demands import Demands
from equivalence.errors import InvalidCase, UsageError
from equivalence.live.call import Reading
from equivalence.live.recorder import Recorder
from equivalence.live.watch import BASELINE, PLACE, Plan, Shadow, Where
from equivalence.sample import LEAST
from equivalence.scenarios import Forward as Made
from equivalence.sides import Side
from equivalence.versus import turns
from equivalence.versus.abreast import Rules, abreast, failed
from equivalence.versus.forwards import AGAIN, CANDIDATE, ORIGINAL, Comparison, Forward, Label
from equivalence.versus.ledger import About, Ledger

Progress = Callable[[str, int], None]


def compare(
    original: Candidate,
    candidate: Candidate,
    forwards: Iterable[Case | Made],
    *,
    contract: Contract | str | None = None,
    baseline: Candidate | None = None,
    control: bool = True,
    device: torch.device | str | None = None,
    sample: int = LEAST,
    seed: int = 0,
    require_path: str | Sequence[str] = (),
    progress: Progress | None = None,
) -> Comparison:
    """Compare two callables over layer-forwards, and the original with itself.

    Each layer-forward calls the original, the original again and the candidate in random order,
    each with copies of its own, fresh memory poisoned and random numbers of its own.
    All rows of the arms are compared bit for bit. A sample of rows is judged by the reference,
    and so is each further row where arms differ, there by the original's logits where it gave any
    that are right.

    Args:
        original: `f(**inputs, **params)` giving a tensor or a mapping of outputs.
        candidate: likewise.
        forwards: cases of one op, or what `scenarios.forwards` gives; what they recorded is not
            read. Layer, ratio and rank of a case are those of its provenance.
        contract: what may differ; of every arm, strict by default.
        baseline: an implementation whose logits judge, where no bit model exists.
        control: whether the original is called again; without it nothing can be EQUAL.
        device: where the inputs go and the reference runs.
        sample: rows a layer-forward that are judged at least.
        seed: of the sample, the order and the random numbers of the arms.
        require_path: kernels or modules of which each call of the candidate must leave a receipt.
        progress: told (name, layer-forwards done) before each.

    Returns:
        The comparison; a bad case or a failing arm is in it, as UNDECIDED.

    Raises:
        UsageError: for a contract that cannot be read or judged, a device that is not there, a
            sample that is none, forwards of several ops, or a baseline of an op whose scores are
            inputs.
    """
    rules, demands = _rules(contract, sample, seed), _demands(require_path)
    if device is not None:
        judge.check_device(device)
    ledger: Ledger | None = None
    torch.set_flush_denormal(False)  # the reference needs subnormals
    for number, each in enumerate(forwards):
        case, place = _placed(each)
        if ledger is None:
            _check_baseline(case.op, baseline)
            ledger = Ledger(about=_about(case.op, original, candidate, rules, control=control))
        if case.op != ledger.about.op:
            raise UsageError(
                f"{case.name} is {case.op}, others are {ledger.about.op}: one op a run"
            )
        if progress is not None:
            progress(case.name, number)
        arms = {ORIGINAL: original, **({AGAIN: original} if control else {}), CANDIDATE: candidate}
        arms |= {} if baseline is None else {BASELINE: baseline}
        ledger.add(_one(case, arms, place, rules, demands, number=number, device=device))
    if ledger is None:
        ledger = Ledger(about=_about("", original, candidate, rules, control=control))
    return ledger.result()


def shadow(
    original: Candidate,
    candidate: Candidate,
    *,
    op: str,
    every: int = 1,
    contract: Contract | str | None = None,
    baseline: Candidate | None = None,
    control: bool = True,
    sample: int = LEAST,
    seed: int = 0,
    read: Callable[..., Mapping[str, Any]] | None = None,
    give: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None,
    names: Mapping[str, str] | None = None,
    inplace: Mapping[str, str] | None = None,
    params: Mapping[str, JSON] | None = None,
    arithmetic: str | None = None,
    where: Where | None = None,
    max_bytes: int = 4 << 30,
    max_seconds: float | None = None,
    require_path: str | Sequence[str] = (),
    save: Path | str | None = None,
) -> Shadow:
    """Wrap a live function so that its calls are compared with a candidate's as they happen.

    A compared call runs the original on the caller's own arguments, and the original again and
    the candidate on copies made before anything runs, in random order.
    The caller gets the original's own result, with the values it had when the original returned,
    and the original's own exceptions; nothing else is raised but an interrupt.
    Torch's random numbers on the CPU and on the arguments' GPUs go on as if the original alone
    had run, unless another thread draws meanwhile. On a GPU each compared call waits for the
    device, and the peak counters of its allocator start again; a kernel that breaks the CUDA
    context breaks it for the engine too.
    Calls inside a compiled function or from within an arm go straight to the original.
    What any two calls share besides arguments, as a kernel's own state, is not copied, nor is
    what holds an argument's tensors unless it is a list, tuple, dict or dataclass.

    Args:
        original: any callable; a method is wrapped in its class.
        candidate: called with the same arguments.
        op: what they are called as.
        every: compare one call in so many.
        contract: what may differ; of every arm, strict by default.
        baseline: called likewise; its logits judge, where no bit model exists.
        control: whether the original is called again; without it nothing can be EQUAL.
        sample: rows a call that are judged at least.
        seed: of the sample, the order and the random numbers of the arms.
        read: as in `Reading`, and so are the others.
        give: likewise.
        names: likewise.
        inplace: likewise.
        params: likewise.
        arithmetic: likewise; without it the original's logits judge, or scores that are inputs.
        where: layer, ratio and rank, or a function of the arguments by name that gives them.
        max_bytes: of the copies of one call: twice its arguments, and every arm's outputs.
        max_seconds: of everything done here, after which calls go straight to the original.
        require_path: kernels or modules of which each call of the candidate must leave a receipt.
        save: a folder for the calls in which the candidate differs, see `record`.

    Returns:
        The wrapped function; its `.result()` is the comparison so far.

    Raises:
        UsageError: for an argument that is wrong whatever is called.
    """
    for role, each in (("original", original), ("candidate", candidate), ("baseline", baseline)):
        if not callable(each) and (role != "baseline" or each is not None):
            raise UsageError(f"the {role} is {type(each).__name__}, not a callable")
    for name, value in (("every", every), ("max_bytes", max_bytes)):
        if type(value) is not int or value < 1:
            raise UsageError(f"{name} is {value!r}; it is a whole number, 1 or more")
    if max_seconds is not None and not max_seconds >= 0:
        raise UsageError(f"max_seconds is {max_seconds!r}; it is 0 or more")
    rules = _rules(contract, sample, seed)
    reading = Reading(
        op=op,
        read=read,
        give=give,
        names=names or {},
        inplace=inplace or {},
        params=params or {},
        arithmetic=arithmetic,
        contract=str(rules.contract),
    )
    _check_baseline(op, baseline)
    arms = {**({AGAIN: original} if control else {}), CANDIDATE: candidate}
    arms |= {} if baseline is None else {BASELINE: baseline}
    recorder = None
    if save is not None:
        recorder = Recorder(reading=reading, to=Path(save), name=f"{op}-differs")
    plan = Plan(
        reading=reading,
        about=_about(op, original, candidate, rules, control=control),
        rules=rules,
        demands=_demands(require_path),
        every=every,
        max_bytes=max_bytes,
        max_seconds=max_seconds,
        where=where or {},
        recorder=recorder,
    )
    return Shadow(original, arms, plan)


def _placed(each: Case | Made) -> tuple[Case, dict[str, Label]]:
    """A case, and where it stands in a model."""
    if isinstance(each, Made):
        return each.case, {"layer": each.layer, "ratio": each.ratio}
    if not isinstance(each, Case):
        raise UsageError(f"compare wants cases, not {type(each).__name__}; load_cases reads files")
    about = {name: each.provenance[name] for name in PLACE if name in each.provenance}
    return each, {n: int(v) if v.isdecimal() and len(v) < 10 else v for n, v in about.items()}  # noqa: PLR2004 - an int


def _one(
    case: Case,
    arms: Mapping[str, Candidate],
    place: Mapping[str, Label],
    rules: Rules,
    demands: Demands,
    *,
    number: int,
    device: torch.device | str | None,
) -> Forward:
    """One layer-forward: every arm called, compared and judged."""
    try:
        ops.validate(case)
        loaded = replace(held(case, device=device), recorded=(), contract=None)
        given = windows.emptied(loaded, ops.find(case.op).windows(loaded))
        got = {}
        for arm in turns.order(arms, rules.seed, number):
            gave: list[object] = []
            with turns.own_random(given.inputs, rules.seed, number, arm):
                (side,) = sides.called(
                    given,
                    _heard(arms[arm], gave),
                    rules.contract,
                    shared=True,
                    demands=demands if arm == CANDIDATE else None,
                )
            turns.spoil(gave)
            got[arm] = _renamed(side, arm)
        baseline = got.pop(BASELINE, None)
        return abreast(loaded, got, rules=rules, place=place, baseline=baseline)
    except InvalidCase as error:
        return failed(case, f"invalid-record: {error}", place=place)


def _heard(arm: Candidate, gave: list[object]) -> Candidate:
    """The arm, whose results are also told to the list."""

    def call(**inputs: Any) -> Any:  # noqa: ANN401 - whatever the arm takes and gives
        gave.append(arm(**inputs))
        return gave[-1]

    return call


def _renamed(side: Side, name: str) -> Side:
    """The side under the name of its arm."""
    found = tuple(replace(each, run=name if each.run else "") for each in side.findings)
    return replace(side, name=name, findings=found)


def _rules(contract: Contract | str | None, sample: int, seed: int) -> Rules:
    """How to judge, where that can be.

    Raises:
        UsageError: the contract cannot be read or judged, or a number is out of range.
    """
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise UsageError(f"seed is {seed!r}; it is a whole number from 0 to 2**63 - 1")
    if type(sample) is not int or sample < 1:
        raise UsageError(f"sample is {sample!r}; it is a number of rows, 1 or more")
    free = Contract() if contract is None else allowed.freedoms(contract)
    return Rules(contract=free, count=sample, seed=seed)


def _demands(require_path: str | Sequence[str]) -> Demands:
    paths = (require_path,) if isinstance(require_path, str) else tuple(require_path)
    return Demands(require_path=paths)


def _check_baseline(op: str, baseline: object) -> None:
    if baseline is not None and op in ops.OPS and ops.find(op).score is None:
        raise UsageError(f"a baseline gives the scores that judge; {op} has its own: leave it out")


def _about(
    op: str, original: Candidate, candidate: Candidate, rules: Rules, *, control: bool
) -> About:
    return About(
        op=op,
        original=name_of(original),
        candidate=name_of(candidate),
        contract=describe(rules.contract, origin="argument"),
        control=control,
        sample=rules.count,
        seed=rules.seed,
    )
