"""What ranks export by name: the same memory while the shape stays, other memory after that."""

from collections.abc import Callable

from torch import Tensor

from equivalence.errors import UsageError
from equivalence.world.transport import World

Export = Callable[[str, tuple[int, ...]], tuple[Tensor, ...]]


def table(world: World, make: Export, *, settle: Callable[[], None] = lambda: None) -> Export:
    """`Link.export` of one rank, with a table of its own.

    Args:
        world: of this rank.
        make: (name, shape) -> new zeros of every rank, once all are there to be read; every rank
            calls it, and none has the memory of the name's old shape any more.
        settle: returns when nothing that this rank was given before reads exported memory.
    """
    held: dict[str, tuple[tuple[int, ...], tuple[Tensor, ...]]] = {}

    def export(name: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        shape = tuple(shape)
        if name not in held or held[name][0] != shape:
            settle()
            _agree(world, name, shape)
            # Memory of the old shape goes first, or both would have to fit.
            held.pop(name, None)
            held[name] = (shape, make(name, shape))
        return held[name][1]

    return export


def _agree(world: World, name: str, shape: tuple[int, ...]) -> None:
    """Come together with every rank that exports this.

    Raises:
        UsageError: one exports another shape.
    """
    for rank, told in enumerate(world.share(f"export {name}", {"shape": list(shape)})):
        if told["shape"] != list(shape):
            raise UsageError(
                f"rank {world.rank} exports {name!r} as {list(shape)}, "
                f"rank {rank} as {told['shape']}: every rank gives the same shape"
            )
