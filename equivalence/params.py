"""Parameters of a call: every one is the op's, and of its kind."""

from collections.abc import Callable, Mapping
from typing import Any

from equivalence.case import JSON, Case
from equivalence.errors import InvalidCase
from equivalence.schema import OpSpec
from refimpl.quant import STYLES

_LIMITS = {
    "width": (1, 1 << 24),
    "rows": (1, 1 << 24),
    "init_tokens": (0, 1 << 20),
    "local_tokens": (0, 1 << 20),
    "cp": (1, 1 << 10),
    "pad": (-1, 0),
    "staging_pages": (0, 1 << 24),
    "max_tokens": (0, 1 << 30),
    "max_requests": (0, 1 << 24),
}
"""The smallest and largest value of a parameter: memory is made by most."""
_USUAL = (1, 1 << 20)
_LARGEST = 1e30
_NONE = (
    "width",
    "topk_blocks",
    "heads",
    "softmax_scale",
    "staging_pages",
    "max_tokens",
    "max_requests",
)
"""Parameters that may be None, as if they were not there."""


def check(case: Case, spec: OpSpec) -> None:
    """Raise InvalidCase, in one sentence, unless the parameters of a case are those of its op."""
    if not isinstance(case.params, Mapping):
        raise InvalidCase(f"params are a {type(case.params).__name__}; they go by name")
    known = {**spec.params, **spec.defaults}
    for name, value in case.params.items():
        if name not in known:
            raise InvalidCase(
                f"params.{name} is not one of {case.op}'s: {', '.join(known) or 'it has none'}"
            )
        if value is None and name in _NONE and name not in spec.params:
            continue
        wrong = _KINDS.get(name, _whole)(name, value)
        if wrong:
            raise InvalidCase(f"params.{name} is {value!r}; it is {wrong}")
    for name in spec.params:
        if name not in case.params:
            raise InvalidCase(f"params.{name} is missing")


def _whole(name: str, value: JSON) -> str:
    least, most = _LIMITS.get(name, _USUAL)
    fits = type(value) is int and least <= value <= most
    return "" if fits else f"{least} to {most:,}"


def _columns(_name: str, value: JSON) -> str:
    return "" if value in ("absolute", "row-relative") else "absolute or row-relative"


def _style(_name: str, value: JSON) -> str:
    return "" if value in list(STYLES) else f"one of {', '.join(STYLES)}"


def _number(_name: str, value: Any) -> str:  # noqa: ANN401 - a JSON value
    number = isinstance(value, float | int) and not isinstance(value, bool)
    return "" if number and -_LARGEST <= value <= _LARGEST else "a finite number"


_KINDS: Mapping[str, Callable[[str, Any], str]] = {
    "columns": _columns,
    "style": _style,
    "softmax_scale": _number,
}
"""What is wrong with a parameter that is no whole number, or ""."""
