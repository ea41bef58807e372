"""Modules, libraries, versions and devices of engines, as they are found."""

import importlib
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from equivalence import digest
from equivalence.engines import found
from equivalence.errors import UsageError


def refusal(name: str) -> str:
    """The sentence of the UsageError."""
    with pytest.raises(UsageError) as raised:
        found.module(name, how="install it")
    return str(raised.value)


def test_a_module_that_is_there_is_itself() -> None:
    """Imported or not."""
    assert found.module("xxhash", how="") is sys.modules["xxhash"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "import no_such_part",
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_part'",
        ),
        (
            "raise ImportError('undefined symbol: _ZN3c10\\nin _C.so')",
            "cannot be imported: ImportError: undefined symbol: _ZN3c10",
        ),
        ("assert False", "cannot be imported: AssertionError: no message"),
    ],
)
def test_a_module_that_fails_says_how(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence, with the first line of what it raised."""
    (tmp_path / "broken_engine.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert refusal("broken_engine") == f"broken_engine {sentence}"


def test_a_module_that_is_not_there_says_what_gets_it() -> None:
    """A part of it that is missing is another sentence."""
    assert refusal("no_such_engine") == "no_such_engine is not installed; install it"


def test_a_version_names_the_distribution() -> None:
    """Of a module that no distribution brings, its own version; of none, nothing."""
    assert found.version("xxhash") == f"xxhash {metadata.version('xxhash')}"
    assert found.version("no_such_engine") == ""


def test_a_module_without_distribution_tells_its_own_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or nothing, where it has none."""
    for module, version in (
        (SimpleNamespace(__version__="1.2"), "1.2"),
        (SimpleNamespace(), ""),
    ):
        monkeypatch.setitem(sys.modules, "made_up_engine", cast("Any", module))
        assert found.version("made_up_engine") == version


def test_a_library_is_known_by_its_bytes(tmp_path: Path) -> None:
    """Its name and twelve digits; of a file that is gone, its name."""
    path = tmp_path / "common_ops.so"
    path.write_bytes(b"ops")
    digits = digest.of_bytes(b"ops")[:12]
    assert found.version_of_file(str(path)) == f"common_ops.so xxh3 {digits}"
    assert found.version_of_file(str(tmp_path / "gone.so")) == "gone.so"


def test_an_arch_is_that_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Major and minor of a GPU's capability, else the type of the device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", {"cuda:1": (9, 0)}.get)
    on_gpu = cast("Tensor", SimpleNamespace(is_cuda=True, device="cuda:1"))
    assert found.arch(on_gpu) == "sm90"
    assert found.arch(torch.empty(0)) == "cpu"
