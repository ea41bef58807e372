"""What ranks export by name: the same memory while the shape stays, other memory after that."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from equivalence.errors import UsageError

Export = Callable[[str, tuple[int, ...]], tuple[Tensor, ...]]
Share = Callable[[str, Mapping[str, Any]], list[dict[str, Any]]]


def table(
    rank: int, share: Share, make: Export, *, settle: Callable[[], None] = lambda: None
) -> Export:
    """`Link.export` of one rank, with a table of its own.

    Args:
        rank: this one.
        share: every rank's payload.
        make: (name, shape) -> new zeros of every rank, once all are there to be read; every rank
            calls it, and none has the memory of the name's old shape any more.
        settle: returns when nothing that this rank was given before reads exported memory.
    """
    held: dict[str, tuple[tuple[int, ...], tuple[Tensor, ...]]] = {}

    def export(name: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        shape = tuple(shape)
        if name not in held or held[name][0] != shape:
            settle()
            _agree(rank, share, name, shape)
            # Memory of the old shape goes first, or both would have to fit.
            held.pop(name, None)
            held[name] = (shape, make(name, shape))
        return held[name][1]

    return export


def _agree(rank: int, share: Share, name: str, shape: tuple[int, ...]) -> None:
    """Come together with every rank that exports this.

    Raises:
        UsageError: one exports another shape.
    """
    for other, told in enumerate(share(f"export {name}", {"shape": list(shape)})):
        if told["shape"] != list(shape):
            raise UsageError(
                f"rank {rank} exports {name!r} as {list(shape)}, "
                f"rank {other} as {told['shape']}: every rank gives the same shape"
            )
