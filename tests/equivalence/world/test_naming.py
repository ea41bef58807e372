"""Functions reach ranks by name, and what stands in the way of that is told."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import rank_calls

from equivalence.errors import UsageError
from equivalence.world import naming


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A __main__ that has a function `work`."""
    made = ModuleType("__main__")
    exec("def work(link): return 7", made.__dict__)  # noqa: S102 - as a script would define it
    monkeypatch.setitem(sys.modules, "__main__", made)
    return made


def test_an_address_finds_its_function() -> None:
    """By the name of its module, where that is imported."""
    where = naming.address(rank_calls.Held.inside)
    assert (where["module"], where["name"]) == ("rank_calls", "Held.inside")
    assert naming.find(where) is rank_calls.Held.inside


def test_a_script_is_found_by_its_file(main: ModuleType, tmp_path: Path) -> None:
    """It is imported under another name than __main__, once."""
    path = tmp_path / "a_script.py"
    path.write_text("def work(link): return __name__\n")
    main.__file__ = str(path)
    where = naming.address(main.work)
    try:
        found = naming.find(where)
        assert found(None) == where["module"] != "__main__"
        assert naming.find(where) is found
    finally:
        del sys.modules[where["module"]]


def test_what_was_typed_in_is_refused(main: ModuleType) -> None:
    """Without a file or a module's name no rank could find it."""
    with pytest.raises(UsageError, match="work was typed in: ranks import it from a file"):
        naming.address(main.work)
    main.__spec__ = ModuleSpec("package.tool", None)
    assert naming.address(main.work)["module"] == "package.tool"


def test_a_module_that_is_on_no_path_is_found_by_its_file(tmp_path: Path) -> None:
    """As pytest imports tests."""
    path = tmp_path / "lonely_module.py"
    path.write_text("def work(link): return 7\n")
    where = {"module": "lonely_module", "name": "work", "file": str(path)}
    try:
        assert naming.find(where)(None) == 7
    finally:
        del sys.modules["lonely_module"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("import equivalence.errors as e; raise e.UsageError('first this')", "first this"),
        ("work = 7", "has no function work"),
        ("", "has no function work"),
    ],
)
def test_what_an_import_raises_is_one_sentence(tmp_path: Path, text: str, told: str) -> None:
    """The module, and why."""
    path = tmp_path / "broken_module.py"
    path.write_text(text)
    try:
        with pytest.raises(UsageError) as caught:
            naming.find({"module": "broken_module", "name": "work", "file": str(path)})
        assert told in str(caught.value)
    finally:
        sys.modules.pop("broken_module", None)


def test_a_module_without_a_file_must_be_on_the_path(tmp_path: Path) -> None:
    """Nothing else is tried; a file that is no Python is refused."""
    with pytest.raises(UsageError, match="No module named 'no_such_module'"):
        naming.find({"module": "no_such_module", "name": "work", "file": ""})
    path = tmp_path / "notes.txt"
    with pytest.raises(UsageError, match="it is no Python file"):
        naming.find({"module": "no_such_module", "name": "work", "file": str(path)})
