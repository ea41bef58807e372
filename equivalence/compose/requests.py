"""Plans of steps: the requests that context-parallel ranks extend together, step after step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from equivalence.errors import UsageError

PAGE_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of one step.

    Attributes:
        text: the name under which its pages are kept.
        extend: its new tokens.
        prefix: tokens from earlier steps; None for all that its text has.
        whole: leave out what of the prefix fills no page, as a prefix cache does.
        of: the text whose pages are its prefix, where that is another.
    """

    text: str
    extend: int
    prefix: int | None = None
    whole: bool = True
    of: str = ""


def _cold() -> Iterator[list[Request]]:
    yield [Request(text="a", extend=1024)]
    yield [Request(text="b", extend=700)]
    yield [Request(text="c", extend=640), Request(text="d", extend=330)]


def _chunk() -> Iterator[list[Request]]:
    yield [Request(text="a", prefix=2048, extend=512)]
    yield [Request(text="a", extend=512)]
    yield [Request(text="a", extend=512)]


def _cache_hits() -> Iterator[list[Request]]:
    yield [Request(text="a", of="system", prefix=2048, extend=150)]
    shared = [
        Request(text=f"b{i}", of="system", prefix=512, extend=extend)
        for i, extend in enumerate((40, 64, 130, 1))
    ]
    yield [Request(text="a", extend=33), *shared]
    yield [
        Request(text=f"c{i}", of="system" if i % 3 else "b2", prefix=256, extend=1 + 11 * i)
        for i in range(12)
    ]


def _mixed() -> Iterator[list[Request]]:
    for turn in range(3):
        yield [
            Request(text="a", prefix=None if turn else 1024, extend=512),
            Request(text=f"cold{turn}", extend=90),
            Request(text=f"hit{turn}", of="system", prefix=256, extend=30 + turn),
            Request(text=f"next{turn}", of=f"cold{turn - 1}" if turn else "", extend=65),
        ]


def _page_tail() -> Iterator[list[Request]]:
    yield [Request(text="a", extend=700)]
    yield [Request(text="a", extend=300, whole=False)]
    yield [
        Request(text="b", extend=100),
        Request(text="c", prefix=128, extend=77),
        Request(text="d", prefix=64, extend=500),
    ]
    yield [Request(text="d", extend=12, whole=False)]
    yield [Request(text="a", extend=24, whole=False)]


def _decode() -> Iterator[list[Request]]:
    for turn in range(3):
        yield [
            Request(text=f"{turn}.{i}", of=f"long{i}", prefix=64 * (1 + i % 4), extend=1)
            for i in range(6)
        ]


def _sizes(first: int) -> Iterator[list[Request]]:
    for count in range(first, first + 4):
        yield [Request(text=f"{i}", extend=20 + (37 * i + 53 * count) % 81) for i in range(count)]


_PLANS: Mapping[str, Callable[[], Iterator[list[Request]]]] = {
    "cold": _cold,
    "chunk": _chunk,
    "cache-hits": _cache_hits,
    "mixed": _mixed,
    "page-tail": _page_tail,
    "decode": _decode,
    "bs-1-4": partial(_sizes, 1),
    "bs-5-8": partial(_sizes, 5),
    "bs-9-12": partial(_sizes, 9),
}
"""bs-A-B has a step of each batch size from A to B: old requests extend what they wrote."""
NAMES = tuple(_PLANS)


def plan(name: str, *, scale: int = 1) -> list[list[Request]]:
    """The steps of a scenario as requests.

    Args:
        name: one of NAMES.
        scale: divides extends, and prefixes by whole pages; one of each stays.

    Raises:
        UsageError: there is no such scenario, or scale is less than 1.
    """
    if name not in NAMES:
        raise UsageError(f"no scenario is named {name!r}: there are {', '.join(NAMES)}")
    if scale < 1:
        raise UsageError(f"scale is {scale}: it is 1 or more")
    return [[_scaled(request, scale) for request in step] for step in _PLANS[name]()]


def _scaled(request: Request, scale: int) -> Request:
    """A request with shorter lengths; aligned prefixes stay aligned."""
    prefix = request.prefix
    if prefix:
        prefix = max(1, prefix // PAGE_SIZE // scale) * PAGE_SIZE
    return replace(request, prefix=prefix, extend=max(1, request.extend // scale))
