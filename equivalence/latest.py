"""The latest results of a function, found by a key."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import ParamSpec, TypeVar

Call = ParamSpec("Call")
Made = TypeVar("Made")


def latest(
    make: Callable[Call, Made], *, key: Callable[Call, Hashable], most: int
) -> Callable[Call, Made]:
    """A function that makes what it was not asked for lately; threads may call it.

    `functools.lru_cache` does the same where arguments are keys themselves, which tensors are not.

    Args:
        make: what is called.
        key: takes the same arguments; calls of one key share a result.
        most: results kept, those used last.
    """
    held: OrderedDict[Hashable, Made] = OrderedDict()
    lock = Lock()

    def of(*args: Call.args, **named: Call.kwargs) -> Made:
        asked = key(*args, **named)
        with lock:
            if asked in held:
                held.move_to_end(asked)
                return held[asked]
        made = make(*args, **named)
        with lock:
            held[asked] = made
            while len(held) > most:
                held.popitem(last=False)
        return made

    return of
