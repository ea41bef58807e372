"""A live call of an engine read as a case: its arguments and results by the op's names."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from equivalence import ops, plain, specs
from equivalence.case import JSON, Case
from equivalence.contract import Contract
from equivalence.errors import InvalidCase, UsageError
from equivalence.live.clones import bytes_of, cloned
from refimpl.profiles import PROFILES, PUBLISHED

__all__ = (
    "Reading",
    "arguments_of",
    "bytes_of",
    "case_of",
    "cloned",
    "inputs_of",
    "outputs_of",
    "said",
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a call of some function is read as a call of an op.

    Attributes:
        op: a name of `ops.OPS`.
        read: called with the call's own arguments before it runs, gives inputs and params by
            their names in the op; None takes the arguments of those names.
        give: called with the result and the arguments by name, gives outputs by name;
            None reads a tensor, a mapping of outputs, or None beside `inplace`.
        names: an input or param of the op -> the argument that is it, where their names differ.
            A positional argument without a name is "0", "1" and so on.
        inplace: an output of the op -> the argument that the call writes it into.
        params: params that no argument says; they win over the arguments.
        arithmetic: how the reference computes the scores, as `Case.arithmetic`.
        contract: of the function, as `Contract.parse` reads it.
    """

    op: str
    read: Callable[..., Mapping[str, Any]] | None = None
    give: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    inplace: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, JSON] = field(default_factory=dict)
    arithmetic: str | None = None
    contract: str | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for an op, a name, a profile or a contract that does not exist."""
        if self.op not in ops.OPS:
            raise UsageError(f"no op named {self.op!r}: one of {_listed(ops.OPS)}")
        spec = specs.OPS[self.op]
        params = {**spec.params, **spec.defaults}
        for where, given, known in (
            ("names", self.names, {**spec.inputs, **params}),
            ("inplace", self.inplace, spec.outputs),
            ("params", self.params, params),
        ):
            for name in given:
                if name not in known:
                    raise UsageError(f"{where} has {name!r}; {self.op} has {_listed(known)}")
        profiles = {**PROFILES, **PUBLISHED}
        if self.arithmetic is not None and self.arithmetic not in profiles:
            raise UsageError(f"no arithmetic named {self.arithmetic!r}: one of {_listed(profiles)}")
        if self.contract is not None:
            Contract.parse(self.contract)


def arguments_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, defaults too; those without a name as "0", "1", ...

    Raises:
        UsageError: the function cannot be called so.
    """
    while isinstance(function, partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # A function of C may tell no names.
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(plain.line(f"the call does not fit its function: {error}")) from error
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            first = len(args) - len(value)
            found |= {str(first + i): each for i, each in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        else:
            found[name] = value
    return found


def inputs_of(
    reading: Reading,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """The inputs and params of the op that a call stands for; nothing is copied.

    Args:
        reading: how the call is read.
        function: what is called.
        args: its positional arguments.
        kwargs: its keywords.

    Raises:
        UsageError: an input or param is missing or of another kind, or `read` fails.
    """
    spec = specs.OPS[reading.op]
    known = (*spec.inputs, *spec.params, *spec.defaults)
    if reading.read is None:
        arguments = _arguments(reading, function, args, kwargs)
        wanted = {name: reading.names.get(name, name) for name in known}
        given = {name: arguments[one] for name, one in wanted.items() if one in arguments}
        source, held = "the call has", arguments
    else:
        read = partial(reading.read, *args, **kwargs)
        given = held = dict(_asked(reading, "read", read))
        source = "read gave"
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in known:
            raise _unreadable(reading, f"read gave {name!r}; the op has {_listed(known)}")
    inputs = {name: value for name, value in given.items() if name in spec.inputs}
    params = {name: value for name, value in given.items() if name not in spec.inputs}
    params |= reading.params
    for name, one in inputs.items():
        if not isinstance(one, Tensor):
            raise _unreadable(reading, f"inputs.{name} is {type(one).__name__}, not a tensor")
    missing = [f"inputs.{n}" for n, s in spec.inputs.items() if not s.optional and n not in inputs]
    missing += [f"params.{n}" for n in spec.params if n not in params]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        sentence = f"{', '.join(missing)} {verb} missing; {source} {_listed(held)}"
        raise _unreadable(reading, sentence)
    return inputs, params


def outputs_of(reading: Reading, result: object, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """The outputs of a call by name: what it returned and what it wrote; nothing is copied.

    Args:
        reading: how the call is read.
        result: what the call returned; a bare tensor is the op's primary output.
        arguments: the call's arguments by name, as `arguments_of` gives them.

    Raises:
        UsageError: they cannot be read, in one sentence.
    """
    op = ops.find(reading.op)
    known = _listed(op.spec.outputs)
    given: object = result
    if reading.give is not None:
        given = _asked(reading, "give", partial(reading.give, result, arguments))
    elif isinstance(result, Tensor):
        given = {op.primary: result}
    elif result is None:
        given = {}
    if not isinstance(given, Mapping):
        sentence = f"the call returned {type(given).__name__}; without `give`, it is read from"
        raise _unreadable(reading, f"{sentence} a tensor or a mapping of {known}")
    outputs = {name: one for name, one in given.items() if one is not None}
    outputs |= _written(reading, arguments)
    for name, tensor in outputs.items():
        if name not in op.spec.outputs or not isinstance(tensor, Tensor):
            what = type(tensor).__name__
            raise _unreadable(reading, f"the call gave {name!r} ({what}), not tensors {known}")
    if not outputs:
        raise _unreadable(reading, f"the call gave nothing, and `inplace` names none of {known}")
    return outputs


def _written(reading: Reading, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the call wrote its outputs into; an optional one left out is none."""
    for name, one in reading.inplace.items():
        if one not in arguments:
            sentence = f"inplace.{name} is the argument {one!r}; the call has {_listed(arguments)}"
            raise _unreadable(reading, sentence)
    found = {name: arguments[one] for name, one in reading.inplace.items()}
    return {name: value for name, value in found.items() if value is not None}


def case_of(
    reading: Reading,
    inputs: Mapping[str, Tensor],
    params: Mapping[str, JSON],
    *,
    recorded: Sequence[Mapping[str, Tensor]] = (),
    **fields: Any,  # noqa: ANN401 - fields of a Case
) -> Case:
    """The case of a call that was read.

    Args:
        reading: how the call was read.
        inputs: as `inputs_of` gives them.
        params: likewise.
        recorded: the outputs of one run an entry, as `outputs_of` gives them.
        fields: others of the Case, such as its provenance or name.

    Raises:
        UsageError: `ops.validate` refuses the case; its sentence says why.
    """
    case = Case(
        op=reading.op,
        inputs=dict(inputs),
        params=dict(params),
        arithmetic=reading.arithmetic,
        contract=reading.contract,
        recorded=tuple(dict(entry) for entry in recorded),
        **fields,
    )
    try:
        ops.validate(case)
    except InvalidCase as error:
        raise _unreadable(reading, str(error)) from error
    return case


def said(error: BaseException) -> str:
    """The kind and the first line of an exception, whatever it does when asked."""
    try:
        text = (str(error).strip().splitlines() or ["no message"])[0]
    except Exception:  # noqa: BLE001 - it may be anyone's exception
        text = "no message"
    return plain.line(f"{type(error).__name__}: {text}")


def _arguments(
    reading: Reading,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    try:
        return arguments_of(function, args, kwargs)
    except UsageError as error:
        raise _unreadable(reading, str(error)) from error


def _asked(reading: Reading, name: str, ask: Callable[[], Any]) -> Mapping[str, Any]:
    """What the user's own `read` or `give` says.

    Raises:
        UsageError: it raised, or gave no mapping.
    """
    try:
        given = ask()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _unreadable(reading, f"{name} raised {said(error)}") from error
    if not isinstance(given, Mapping):
        raise _unreadable(reading, f"{name} gave {type(given).__name__}, not a mapping by name")
    return given


def _unreadable(reading: Reading, why: str) -> UsageError:
    return UsageError(plain.line(f"cannot be read as {reading.op}: {why}"))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
