"""The ways as candidates of compose_pages: ranks run a step, and their outputs are stacked.

`equivalence replay CASE --candidate equivalence.paths.ipc.candidate:direct` runs one over threads.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from equivalence import ranks, receipt
from equivalence.errors import UsageError
from equivalence.paths.ipc import step, ways
from equivalence.world import threads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from equivalence.candidate import Candidate
    from equivalence.paths.ipc.faulty import Fault
    from equivalence.replay import Outcome


class RanksFailed(RuntimeError):  # noqa: N818 - it says what happened, as TimeoutError does
    """Ranks gave no result; `rule` says how, as in a Finding, and `rank` which one failed first."""

    def __init__(self, message: str, *, rule: str, rank: int | None) -> None:
        """Keep the sentence, how the rank failed, and which it was."""
        super().__init__(message)
        self.rule = rule
        self.rank = rank


class Pool(Protocol):
    """Ranks that run a function and give an Outcome each."""

    @property
    def ranks(self) -> int:
        """How many."""

    def run(
        self,
        function: Any,  # noqa: ANN401 - a transport may ask for an importable one
        *,
        inputs: Mapping[str, Tensor],
        timeout: float | None = None,
        **settings: Any,  # noqa: ANN401 - the function's own
    ) -> list[Outcome]:
        """Call `function(link, **inputs, **settings)` on every rank."""


def over(
    pool: Pool,
    way: str,
    *,
    fault: Fault | None = None,
    timeout: float | None = None,
    hits: Sequence[Sequence[bool]] | None = None,
) -> Candidate:
    """A candidate of compose_pages that runs on the ranks of a pool.

    Turns go on from call to call, so that each call meets what the one before it left.

    Args:
        pool: its `run` is used alone.
        way: a name in `ways.WAYS`.
        fault: what ranks do wrong, or None.
        timeout: seconds that a rank waits for the others; the pool's own when None.
        hits: [rank][layer], whether prefetch gathers that prefix early.

    Raises:
        UsageError: there is no such way.
    """
    if way not in ways.WAYS:
        raise UsageError(f"no way named {way!r}: one of {', '.join(ways.WAYS)}")
    turn = 0

    def candidate(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and parameters
        nonlocal turn
        inputs = {name: value for name, value in call.items() if isinstance(value, Tensor)}
        settings = {name: value for name, value in call.items() if name not in inputs}
        outcomes = pool.run(
            step.compose,
            inputs={name: tensor.cpu().contiguous() for name, tensor in inputs.items()},
            timeout=timeout,
            way=way,
            turn=turn,
            fault=None if fault is None else fault.as_json(),
            hits=hits,
            **settings,
        )
        turn += max((len(inputs[n]) for n in inputs if n.endswith("_pools")), default=0)
        return stacked(outcomes)

    return candidate


def stacked(outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    """What every rank holds, [cp, ...]; strays, where they report them, get more rows of -1.

    Args:
        outcomes: one a rank, as `Pool.run` gives them; each has the same outputs.

    Raises:
        RanksFailed: a rank gave no result.
    """
    failure = ranks.failure(outcomes)
    if failure is not None:
        failed = sum(bool(outcome.rule) for outcome in outcomes)
        told = f"{failure.message} ({failed} of {len(outcomes)} ranks gave no result)"
        raise RanksFailed(told, rule=failure.rule, rank=failure.rank)
    for outcome in outcomes:
        for path in outcome.paths:
            for rows in path.rows:
                about = {"version": path.version, "arch": path.arch, **path.arguments}
                receipt.leave(path.kernel, rows=rows, **about)  # type: ignore[arg-type]  # as it was left
    made = {}
    for name in outcomes[0].outputs:
        parts = [outcome.outputs[name] for outcome in outcomes]
        if name == "strays":
            most = max(map(len, parts))
            parts = [torch.nn.functional.pad(p, (0, 0, 0, most - len(p)), value=-1) for p in parts]
        made[name] = torch.stack(parts)
    return made


def local(way: str, **settings: Any) -> Candidate:  # noqa: ANN401 - as `over`
    """A candidate that runs a way on threads, as many as the case has ranks.

    Their memory lasts from call to call as long as the number of ranks stays.
    """
    held: dict[int, Candidate] = {}

    def candidate(*, cp: int, **call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as the op
        if cp not in held:
            held[cp] = over(threads.Threads(cp), way, **settings)
        result: dict[str, Tensor] = held[cp](cp=cp, **call)
        return result

    return candidate


@cache
def _alone(way: str) -> Candidate:
    """A way by its name, the same function each time, each call on ranks of its own."""

    def candidate(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and parameters
        result: dict[str, Tensor] = local(way)(**call)
        return result

    candidate.__name__ = candidate.__qualname__ = way
    candidate.__doc__ = f"The {way} way over threads."
    return candidate


def __getattr__(name: str) -> Candidate:
    """Every way by its name."""
    if name not in ways.WAYS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _alone(name)
