"""An engine's kernel on this machine: its module at call time, its version, its device."""

import os
import sys
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equivalence import digest, plain
from equivalence.errors import UsageError

_PREFIX = 12
"""Hex digits of a digest in a version; all 32 make a long line."""


def module(name: str, *, how: str) -> Any:  # noqa: ANN401 - a module without types
    """Import an engine's module.

    Args:
        name: of the module.
        how: what gets it, as words that follow "name is not installed; ".

    Raises:
        UsageError: it is not installed, or importing it fails.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise UsageError(f"{name} is not installed; {how}") from error
        raise UsageError(_failed(f"{name} cannot be imported", error)) from error
    # A compiled module raises whatever its libraries, its compiler or the driver lack.
    except Exception as error:
        raise UsageError(_failed(f"{name} cannot be imported", error)) from error


def library(path: str, *, variable: str) -> None:
    """Load a shared library that registers torch ops.

    Args:
        path: of the file.
        variable: the environment variable that names it, for the messages.

    Raises:
        UsageError: there is no such file, or torch cannot load it.
    """
    if not Path(path).is_file():
        raise UsageError(plain.line(f"{variable} names {path!r}, which is no file"))
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]  # torch has no types here
    except (OSError, RuntimeError) as error:
        sentence = _failed(f"{variable} names {path!r}, which cannot be loaded", error)
        raise UsageError(sentence) from error


def is_loaded(path: str) -> bool:
    """Whether torch holds this shared library."""
    return os.path.realpath(path) in torch.ops.loaded_libraries


def version(name: str) -> str:
    """Distribution and version of an imported module, its own `__version__`, or ""."""
    imported = sys.modules.get(name)
    if imported is None:
        return ""
    return _distribution(name) or str(getattr(imported, "__version__", ""))


@cache
def version_of_file(path: str) -> str:
    """A library's file name and the first digits of its XXH3-128, as far as it can be read."""
    name = plain.line(Path(path).name)
    try:
        return f"{name} xxh3 {digest.of_bytes(Path(path).read_bytes())[:_PREFIX]}"
    except OSError:
        return name


def arch(tensor: Tensor) -> str:
    """Where a kernel runs on this tensor: "sm90", or the type of its device."""
    if not tensor.is_cuda:
        return tensor.device.type
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return f"sm{major}{minor}"


@cache
def _distribution(name: str) -> str:
    """The distributions that bring a module, as "sgl-deep-gemm 0.1.4", or ""."""
    known = dict.fromkeys(metadata.packages_distributions().get(name, ()))
    return ", ".join(f"{distribution} {metadata.version(distribution)}" for distribution in known)


def _failed(what: str, error: Exception) -> str:
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return plain.line(f"{what}: {type(error).__name__}: {first}")
