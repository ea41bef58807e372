"""The callable under test: found by name, and named again in reports."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

from equivalence import plain
from equivalence.errors import UsageError

Candidate: TypeAlias = Callable[..., Any]


def load(name: str) -> Candidate:
    """The callable named MODULE:FUNCTION, from the installed packages or the working directory.

    Raises:
        UsageError: there is no such module or function.
    """
    module, colon, path = name.partition(":")
    if not colon or not module or not path:
        raise UsageError(f"candidate {name!r}: it is MODULE:FUNCTION, as in my_kernels:fast_topk")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(plain.line(f"candidate {name!r}: {error}")) from error
    except KeyboardInterrupt:
        raise
    # A module that calls sys.exit must not end the run as if it were judged.
    except BaseException as error:
        kind = type(error).__name__
        sentence = plain.line(f"candidate {name!r}: importing it raised {kind}: {error}")
        raise UsageError(sentence) from error
    if not callable(found):
        raise UsageError(f"candidate {name!r}: it is {type(found).__name__}, not callable")
    return found  # type: ignore[no-any-return]  # any callable may be a candidate


def name_of(candidate: Candidate | None) -> str:
    """`module:function` where the candidate can be imported again, or ""."""
    try:
        module = getattr(candidate, "__module__", None)
        name = getattr(candidate, "__qualname__", "")
    except Exception:  # noqa: BLE001 - a candidate's own attributes may do anything
        return ""
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return ""
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is candidate and name else ""
