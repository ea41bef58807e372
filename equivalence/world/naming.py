"""How a function reaches a rank: by the name of its module and its own, never as code."""

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from equivalence.errors import UsageError

_MAIN = "__main__"
_SCRIPT = "__equivalence_script__"


def address(function: Callable[..., Any]) -> dict[str, str]:
    """Where a rank finds a function.

    Raises:
        UsageError: it is not to be found by its name.
    """
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        raise UsageError(f"{type(function).__name__} has no name by which ranks could import it")
    if "<" in name:
        raise UsageError(
            f"{module}.{name} exists in this process alone: define it at the top level of a module"
        )
    home = sys.modules.get(module)
    if home is None or _within(home, name) is not function:
        raise UsageError(f"{module}.{name} is another object than this function: ranks import it")
    file = getattr(home, "__file__", None) or ""
    if module == _MAIN:
        spec = getattr(home, "__spec__", None)
        if spec is None and not file:
            raise UsageError(f"{name} was typed in: ranks import it from a file")
        module = _SCRIPT if spec is None else spec.name
    return {"module": module, "name": name, "file": str(Path(file).absolute()) if file else ""}


def settings(given: Mapping[str, Any], inputs: Mapping[str, object]) -> dict[str, Any]:
    """Settings of a run as ranks get them.

    Raises:
        UsageError: they are no JSON values, or name what a function has already.
    """
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            raise UsageError(f"input {name!r} is {type(tensor).__name__}: inputs are tensors")
    for name in given:
        if name in inputs or name == "link":
            raise UsageError(f"{name} is given twice: as a setting, and by the run itself")
    if "link" in inputs:
        raise UsageError("link is no input: every rank has its own")
    for name, value in given.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise UsageError(
                f"setting {name} is {value!r}, no JSON value: ranks get numbers, texts, lists and "
                "dicts as settings and tensors as inputs"
            ) from None
    return dict(given)


def find(where: dict[str, str]) -> Callable[..., Any]:
    """The function of an address, imported.

    Raises:
        UsageError: its module cannot be imported, or has no such function.
    """
    module, name, file = where["module"], where["name"], where["file"]
    try:
        found = _within(_module(module, file), name)
    except UsageError:
        raise
    # What a module raises on import, sys.exit included, is told of as one sentence.
    except BaseException as error:
        raise UsageError(
            f"ranks cannot import {file or module}: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise UsageError(f"{file or module} has no function {name}")
    return found


def _module(name: str, file: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    if name != _SCRIPT:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if not file or error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"ranks cannot import {file}: it is no Python file")
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _within(home: object, name: str) -> object:
    """What a dotted name leads to; None where it leads nowhere."""
    for part in name.split("."):
        home = getattr(home, part, None)
    return home
