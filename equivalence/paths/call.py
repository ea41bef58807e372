"""The call of a path as the record of its op, without the path's own settings."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from inspect import signature
from typing import Any, TypeVar

from equivalence.errors import UsageError

Record = TypeVar("Record")


def read(
    kind: type[Record], call: Mapping[str, Any], path: Callable[..., Any], *, op: str
) -> Record:
    """The call as this dataclass, whose fields are the inputs and parameters that a path serves.

    Raises:
        UsageError: one is missing or unknown.
    """
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    for name in call:
        if name not in known:
            kinds = signature(path).parameters.values()
            own = ", ".join(each.name for each in kinds if each.kind is each.KEYWORD_ONLY)
            raise UsageError(
                f"{path.__name__} takes no {name!r}: its settings are {own},"
                f" and {op} takes {', '.join(known)}"
            )
    for name, field in known.items():
        if name not in call and field.default is MISSING:
            raise UsageError(f"{op} needs {name!r}")
    return kind(**call)
