"""The callable under test: found by name, and named again in reports."""

import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

from equivalence import plain
from equivalence.errors import UsageError

Candidate: TypeAlias = Callable[..., Any]


def load(name: str, *, role: str = "candidate") -> Candidate:
    """The callable named MODULE:FUNCTION, from the installed packages or the working directory.

    `MODULE:FUNCTION,key=value,...` binds keywords to it: whole numbers, true, false, none or text.

    Args:
        name: of it.
        role: what messages call it.

    Raises:
        UsageError: there is no such module or function, or a setting is no key=value.
    """
    whole, *settings = name.split(",")
    module, colon, path = whole.partition(":")
    if not colon or not module or not path:
        raise UsageError(f"{role} {name!r}: it is MODULE:FUNCTION, as in my_kernels:fast_topk")
    bound = dict(_setting(f"{role} {name!r}", text) for text in settings)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(plain.line(f"{role} {name!r}: {error}")) from error
    except KeyboardInterrupt:
        raise
    # A module that calls sys.exit must not end the run as if it were judged.
    except BaseException as error:
        kind = type(error).__name__
        sentence = plain.line(f"{role} {name!r}: importing it raised {kind}: {error}")
        raise UsageError(sentence) from error
    if not callable(found):
        raise UsageError(f"{role} {name!r}: it is {type(found).__name__}, not callable")
    if bound:
        return partial(found, **bound)
    return found  # type: ignore[no-any-return]  # any callable may be a candidate


_WORDS = {"true": True, "false": False, "none": None}


def _setting(what: str, text: str) -> tuple[str, int | bool | str | None]:
    """A keyword and its value."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise UsageError(f"{what}: {text!r} is not key=value")
    if value in _WORDS:
        return key, _WORDS[value]
    return key, int(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else value


def _settings(bound: dict[str, Any]) -> str | None:
    """Bound keywords as `load` reads them; None where it cannot."""
    told = ""
    for key, value in bound.items():
        said = next((word for word, known in _WORDS.items() if known is value), str(value))
        if type(value) not in (int, bool, str, type(None)) or "," in said:
            return None
        if type(value) is str and _setting("", f"{key}={value}")[1] != value:
            return None
        told += f",{key}={said}"
    return told


def name_of(candidate: Candidate | None) -> str:
    """`module:function` where the candidate can be imported again, or ""."""
    if type(candidate) is partial:
        bound = None if candidate.args else _settings(candidate.keywords)
        inner = name_of(candidate.func)
        return f"{inner}{bound}" if inner and bound is not None else ""
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
