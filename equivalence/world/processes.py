"""Whether the processes of other ranks still live, as the kernel says it at once."""

import os
import select
from collections.abc import Iterable, Mapping

from torch._C._distributed_c10d import Store

_ENDED = -1


def tell(store: Store, rank: int) -> None:
    """Say which process a rank is."""
    store.set(_key(rank), str(os.getpid()))


def watch(store: Store, ranks: Iterable[int]) -> dict[int, int]:
    """A descriptor of each rank's process; ranks that cannot be watched are left out.

    Args:
        store: where each of them has told its process.
        ranks: whom to watch.
    """
    found = {}
    for rank in ranks:
        try:
            found[rank] = os.pidfd_open(int(store.get(_key(rank))))
        except ProcessLookupError:
            found[rank] = _ENDED
        except (OSError, AttributeError):
            continue
    return found


def ended(watched: Mapping[int, int]) -> list[int]:
    """The ranks whose process has ended."""
    poll = select.poll()
    for handle in set(watched.values()) - {_ENDED}:
        poll.register(handle, select.POLLIN)
    over = {handle for handle, _ in poll.poll(0)} | {_ENDED}
    return [rank for rank, handle in sorted(watched.items()) if handle in over]


def leave(watched: dict[int, int]) -> None:
    """Watch nobody any more."""
    while watched:
        handle = watched.popitem()[1]
        if handle != _ENDED:
            os.close(handle)


def _key(rank: int) -> str:
    return f"equivalence/pid/{rank}"
