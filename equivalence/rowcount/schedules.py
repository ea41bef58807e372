"""Schedules: other ways to make one call, as data. Rows that a kernel gives may not notice."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence import units
from equivalence.rowcount.dispatch import CHUNKS, counts_of
from equivalence.rowcount.launch import Launch, corners, shortest
from equivalence.units import many
from refimpl.geometry import PLAN_STYLES, chunk_plan, plan_width

MOST_CALLS = 128
"""Calls of one schedule at most; of more, so many are made, evenly spread: 16,384 rows in chunks
of 128 are as many. Chunk sizes that were asked for are not cut short."""

WIDER = 64
"""Columns by which a buffer is made wider: 256 bytes of fp32, so that rows stay aligned."""

_OTHERS = (1, 7, 63)
_KIB = 1024
_RANDOM_CUTS = 7


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """One way to make a call in parts, or to make it under other conditions.

    Attributes:
        name: what reports call it.
        calls: int64 rows of each call, in order; no row is in two of them, some may be in none.
        poison: which of the two poisons fills fresh memory.
        wide: "stride" puts the rows of scores and page tables further apart, "columns" also says
            so in their shapes; "" leaves them.
        streams: halves of each call are launched on two CUDA streams at once.
        again: the number of this call where the whole one is only repeated; 0 elsewhere.
        unmade: calls that were too many to be made.
    """

    name: str
    calls: tuple[Tensor, ...]
    poison: int = 0
    wide: str = ""
    streams: bool = False
    again: int = 0
    unmade: int = 0

    @property
    def moves_rows(self) -> bool:
        """Whether rows and nothing else are what it changes."""
        return not (self.poison or self.wide or self.streams or self.again)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A schedule that cannot run, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The schedules of a call, and those that cannot run."""

    schedules: tuple[Schedule, ...]
    left_out: tuple[LeftOut, ...]


Found = Iterator[Schedule | LeftOut]


def plan_of(
    launch: Launch, *, rows: Sequence[int] | None = None, repeats: int = 2, seed: int = 0
) -> Plan:
    """Every schedule that this call allows; one that equals an earlier one is left out unsaid.

    Args:
        launch: of the call.
        rows: only chunks of so many rows.
        repeats: how often the whole call is made in all.
        seed: of what is random.
    """
    found: list[Schedule | LeftOut]
    if not launch.units:
        found = [LeftOut(name="every schedule", reason="the call has no rows")]
    elif rows is None:
        found = [
            *again(launch, repeats),
            *conditions(launch),
            *chunks(launch, [*counts_of("rows"), *CHUNKS]),
            *budgets(launch),
            *boundaries(launch),
            *lengths(launch),
            *random_parts(launch, seed),
            *companions(launch, seed),
            *permutations(launch, seed),
        ]
    else:
        found = list(chunks(launch, rows, most=launch.units))
    kept: dict[object, Schedule] = {}
    for each in found:
        if isinstance(each, Schedule):
            parts = tuple(call.numpy().tobytes() for call in each.calls)
            kept.setdefault((parts, each.poison, each.wide, each.streams, each.again), each)
    return Plan(
        schedules=tuple(kept.values()),
        left_out=tuple(each for each in found if isinstance(each, LeftOut)),
    )


def again(launch: Launch, repeats: int) -> Found:
    """The whole call a second time, and up to the number of `repeats`."""
    for number in range(2, repeats + 1):
        name = f"call {number} of the same rows"
        yield Schedule(name=name, calls=(_all(launch),), again=number)


def conditions(launch: Launch) -> Found:
    """The whole call over other memory, in wider buffers, on two streams."""
    every = (_all(launch),)
    yield Schedule(name="another poison", calls=every, poison=1)
    apart, wider = f"rows {WIDER} columns further apart", f"{WIDER} columns more"
    if not launch.tables:
        yield LeftOut(name="wider buffers", reason="no scores, mask or page table among the inputs")
    else:
        yield Schedule(name=apart, calls=every, wide="stride")
        if launch.per_column:
            yield LeftOut(name=wider, reason=f"{launch.per_column} has a value a column")
        else:
            yield Schedule(name=wider, calls=every, wide="columns")
    if not launch.cuda:
        yield LeftOut(name="two streams", reason="the inputs are on no CUDA device")
    elif launch.units > 1:
        yield Schedule(name="two streams", calls=every, streams=True)


def chunks(launch: Launch, sizes: Iterable[int], *, most: int | None = None) -> Found:
    """The rows in order, so many a call; decode rows by whole requests."""
    large: list[int] = []
    for size in sorted(set(sizes)):
        step = max(1, size // launch.next_n)
        if step < launch.units:
            cuts = range(step, launch.units, step)
            name = f"chunks of {many(step * launch.next_n, 'row')}"
            yield _cut(launch, name, cuts, most=most)
        else:
            large.append(size)
    if large:
        told = " ".join(f"{size:,}" for size in large)
        reason = f"the call has {many(launch.units * launch.next_n, 'row')}"
        yield LeftOut(name=f"chunks of {told} rows", reason=reason)


def budgets(launch: Launch) -> Found:
    """What engines' budgets make of the rows: their own, or one that gives three chunks."""
    for name, style in PLAN_STYLES.items():
        width = launch.columns * launch.next_n
        third = -(-launch.units // 3) * style.element_bytes * plan_width(columns=width, style=style)
        for budget in (style.budget_bytes, third):
            spans = chunk_plan(
                rows=launch.units,
                columns=width,
                style=style,
                budget_bytes=third if budget is None else budget,
                heads=launch.heads,
            )
            if len(spans) > 1:
                break
        held = third if budget is None else budget
        told = f"plan {name} of {units.size(held) if held >= _KIB else many(held, 'byte')}"
        if len(spans) > 1:
            yield _cut(launch, told, [first for first, _ in spans[1:]])
        else:
            yield LeftOut(name=f"plan {name}", reason="all rows are one chunk")


def boundaries(launch: Launch) -> Found:
    """Cuts at the request boundaries, and one row before and after each, so that calls cross."""
    names = {
        "cut at each request boundary": 0,
        "cut one row before each request boundary": -1,
        "cut one row after each request boundary": 1,
    }
    for name, by in names.items():
        cuts = sorted({turn + by for turn in launch.turns} & set(range(1, launch.units)))
        if cuts:
            yield _cut(launch, name, cuts)
    if not launch.turns:
        whole = launch.next_n > 1
        reason = "calls are of whole requests" if whole else "all rows are of one request"
        yield LeftOut(name="request boundaries", reason=reason)


def lengths(launch: Launch) -> Found:
    """Rows of up to so many columns in one call, longer ones in another."""
    counts = [*counts_of("columns"), *(launch.k + by for by in counts_of("k") if launch.k)]
    one_side: list[int] = []
    for most in sorted(set(counts)):
        short = launch.visible <= most
        if bool(short.any()) and bool((~short).any()):
            calls = [_rows(launch, which.nonzero()[:, 0]) for which in (short, ~short)]
            name = f"rows of up to {many(most, 'column')} apart"
            yield Schedule(name=name, calls=tuple(calls))
        else:
            one_side.append(most)
    if one_side:
        told = " ".join(f"{most:,}" for most in one_side)
        name = f"rows of up to {told} columns apart"
        yield LeftOut(name=name, reason="all rows are on one side")


def random_parts(launch: Launch, seed: int) -> Found:
    """Two random cuttings of the rows, and one that scatters them over calls."""
    if launch.units < 3:  # noqa: PLR2004 - two rows can be cut in one way
        yield LeftOut(name="random parts", reason="there are too few rows")
        return
    random = torch.Generator().manual_seed(seed)
    for number in (1, 2):
        most = min(_RANDOM_CUTS, launch.units // 2)
        order = torch.randperm(launch.units - 1, generator=random)[:most] + 1
        yield _cut(launch, f"random cuts {number}", sorted(order.tolist()))
    call = torch.randint(4, (launch.units,), generator=random)
    parts = [(call == number).nonzero()[:, 0] for number in range(4)]
    calls = tuple(_rows(launch, part) for part in parts if len(part))
    if len(calls) > 1:
        yield Schedule(name="rows scattered over calls", calls=calls)


def companions(launch: Launch, seed: int) -> Found:
    """A few rows alone and among others, and a short and a long one in both orders."""
    random = torch.Generator().manual_seed(seed)
    chosen = corners(launch)
    noun = "row" if launch.next_n == 1 else "request"
    for unit in chosen if launch.units > 1 else ():
        name = f"{noun} {unit} alone"
        yield Schedule(name=name, calls=(_rows(launch, torch.tensor([unit])),))
    for count in _OTHERS:
        if launch.units <= count + 1:
            reason = f"the call has {many(launch.units, noun)}"
            yield LeftOut(name=f"a {noun} among {count} others", reason=reason)
            continue
        for unit in chosen:
            others = torch.randperm(launch.units, generator=random)
            others = others[others != unit][:count]
            both = torch.cat([torch.tensor([unit]), others]).sort().values
            name = f"{noun} {unit} among {many(count, 'other')}"
            yield Schedule(name=name, calls=(_rows(launch, both),))
    short = shortest(launch)
    if short is None:
        return
    long = int(launch.visible.argmax())
    for one, two in ((short, long), (long, short)):
        if one < two or (one > two and not launch.ordered):
            pair = _rows(launch, torch.tensor([one, two]))
            yield Schedule(name=f"{noun} {one}, then {noun} {two}", calls=(pair,))


def permutations(launch: Launch, seed: int) -> Found:
    """All rows in one call, last one first, and in a random order."""
    name = "rows in another order"
    if launch.ordered:
        yield LeftOut(name=name, reason="query_start_loc wants them in order")
        return
    if launch.units < 2:  # noqa: PLR2004 - one has no order
        yield LeftOut(name=name, reason="there are too few rows")
        return
    backward = torch.arange(launch.units).flip(0)
    yield Schedule(name="last row first", calls=(_rows(launch, backward),))
    shuffled = torch.randperm(launch.units, generator=torch.Generator().manual_seed(seed))
    yield Schedule(name="shuffled rows", calls=(_rows(launch, shuffled),))


def _all(launch: Launch) -> Tensor:
    return torch.arange(launch.units * launch.next_n)


def _rows(launch: Launch, chosen: Tensor) -> Tensor:
    """The rows of these units, in their order."""
    return (chosen[:, None] * launch.next_n + torch.arange(launch.next_n)).reshape(-1)


def _cut(launch: Launch, name: str, cuts: Sequence[int], *, most: int | None = None) -> Schedule:
    """All rows in order, cut before these units; at most so many of the calls, or MOST_CALLS."""
    most = MOST_CALLS if most is None else most
    edges = [0, *cuts, launch.units]
    count = len(edges) - 1
    picked: Sequence[int] = range(count)
    if count > most:
        picked = [i * (count - 1) // (most - 1) for i in range(most)]
    return Schedule(
        name=name,
        calls=tuple(_rows(launch, torch.arange(edges[i], edges[i + 1])) for i in picked),
        unmade=count - len(picked),
    )
