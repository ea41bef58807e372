"""Ranks: run one function in several processes at once and have every rank's outcome."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from os import environ
from types import MappingProxyType, UnionType
from typing import Any

from torch import Tensor

from equivalence.errors import UsageError
from equivalence.replay import Outcome
from equivalence.world import forked, launch, meeting, silence
from equivalence.world import joined as others
from equivalence.world import transport as transports

TIMEOUT = transports.TIMEOUT
MOST = transports.MOST
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """Ranks that run functions, made by `start` or `joined`.

    Attributes:
        ranks: how many.
        transport: what carries their bytes.
        timeout: seconds that a rank may be silent, where a run says nothing else.
        rank: which of them this process is; None where all are processes of their own.
        carry: (function, inputs, timeout, settings) -> outcomes; what is behind `run`.
        tell: (value) -> the value of rank 0, so that all ranks of a command end alike.
    """

    ranks: int
    transport: str
    timeout: float = TIMEOUT
    rank: int | None = None
    carry: Callable[..., list[Outcome]] = field(repr=False)
    tell: Callable[[int], int] = field(default=int, repr=False)

    def run(
        self,
        function: Callable[..., Any],
        *,
        inputs: Mapping[str, Tensor] = _NOTHING,
        timeout: float | None = None,
        **settings: Any,  # noqa: ANN401 - any JSON value
    ) -> list[Outcome]:
        """Run `function(link, **inputs, **settings)` on every rank.

        Args:
            function: at the top level of a module; it gets a `equivalence.world.link.Link` and
                returns tensors by name, one tensor or None.
            inputs: what every rank gets, contiguous and on the CPU, each in memory of its own.
            timeout: seconds that a rank may be silent or keep others waiting.
            settings: JSON values, by keyword.

        Returns:
            one outcome a rank. Where a rank died, was silent or raised, its rule and message say
            so, and those of the others name it.

        Raises:
            UsageError: ranks cannot be given this function, these inputs or settings.
        """
        limit = self.timeout if timeout is None else timeout
        return self.carry(function, inputs=inputs, timeout=seconds(limit), settings=settings)


@contextmanager
def start(
    number: int,
    *,
    transport: str = "shm",
    timeout: float = TIMEOUT,
    device: str | None = None,
) -> Iterator[Pool]:
    """A pool of ranks, each a process of its own, ended with the block.

    Args:
        number: how many ranks, 1 to 64.
        transport: what carries their bytes: "shm", "cuda" or "symmetric".
        timeout: seconds that a rank may be silent or keep others waiting.
        device: where exported memory is; the transport's own choice when None.

    Raises:
        UsageError: there is no such transport or number of ranks, or a rank starts ranks.
    """
    if forked.VARIABLE in environ:
        raise UsageError(
            f"rank {environ[forked.VARIABLE]} would start ranks of its own: in a script, start "
            'them under `if __name__ == "__main__":`'
        )
    if not _is(number, int) or not 1 <= number <= MOST:
        raise UsageError(f"{number!r} ranks: it is a number from 1 to {MOST}")
    launcher = launch.Launcher(
        ranks=number, transport=transports.known(transport), timeout=seconds(timeout), device=device
    )
    launch.start(launcher)
    carry = partial(launch.run, launcher)
    try:
        yield Pool(ranks=number, transport=transport, timeout=launcher.timeout, carry=carry)
    finally:
        launch.close(launcher)


@contextmanager
def joined(
    *, transport: str = "shm", timeout: float = TIMEOUT, device: str | None = None
) -> Iterator[Pool]:
    """The ranks that torchrun started, of which this process is one.

    Every rank runs the same functions in the same order; each of them has all outcomes.

    Args:
        transport: what carries their bytes: "shm", "cuda" or "symmetric".
        timeout: seconds that a rank may be silent or keep others waiting within a run; between
            two runs one of them may do something alone for half an hour.
        device: where exported memory is; the transport's own choice when None.

    Raises:
        UsageError: this process is no such rank, or its ranks are on several machines.
    """
    limit = seconds(timeout)
    name = transports.known(transport)
    store, rank, ranks = meeting.store(environ, timeout=max(limit, silence.START))
    member = meeting.Member(
        rank=rank,
        ranks=ranks,
        transport=name,
        device=device,
        timeout=limit,
        store=store,
        serial=count(),
    )
    pool = Pool(
        ranks=ranks,
        transport=name,
        timeout=limit,
        rank=rank,
        carry=partial(others.run, member),
        tell=partial(others.tell, member),
    )
    try:
        yield pool
    finally:
        others.leave(member)


@contextmanager
def kept() -> Iterator[Callable[..., Pool]]:
    """Pools that are started when they are first asked for, one of each kind, and end together.

    Yields:
        (n, *, transport, timeout, device) -> a pool as `start` makes it; the time limit may
        differ from call to call.
    """
    with ExitStack() as stack:

        @cache
        def started(number: int, transport: str, device: str | None) -> Pool:
            return stack.enter_context(start(number, transport=transport, device=device))

        def pool(
            n: int = 2,
            *,
            transport: str = "shm",
            timeout: float = TIMEOUT,
            device: str | None = None,
            **strange: object,
        ) -> Pool:
            if strange:
                raise UsageError(f"ranks are asked for by n, transport, timeout, device: {strange}")
            return replace(started(n, transport, device), timeout=seconds(timeout))

        yield pool


def failure(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Why ranks gave no result: that of one which failed by itself; None where none failed.

    Args:
        outcomes: one a rank, as `Pool.run` gives them.
    """
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.rule}
    own = [outcome for rank, outcome in failed.items() if outcome.rank == rank]
    return next(iter([*own, *failed.values()]), None)


def seconds(timeout: float) -> float:
    """A time limit, checked.

    Raises:
        UsageError: it is no positive finite number.
    """
    if not _is(timeout, int | float) or not 0 < timeout < float("inf"):
        raise UsageError(f"timeout is {timeout!r}: it is a number of seconds above 0")
    return float(timeout)


def _is(value: object, kind: type | UnionType) -> bool:
    """Whether a value is of a kind of number, which True is not."""
    return isinstance(value, kind) and not isinstance(value, bool)
