"""Who may import whom, and that breaking a rule is seen."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HELPERS = {
    "bounds",
    "e4m3",
    "fault",
    "maskevidence",
    "maskreadings",
    "maskwords",
    "misgathered",
    "mismoved",
    "misquantised",
    "openblocks",
    "pickevidence",
    "published",
    "readings",
    "rows",
}
"""Parts that checks share, or that one of them is made of: all else in the folder is a check."""
CHECKS = {path.stem for path in (ROOT / "equivalence/checks").iterdir()} - HELPERS - {"__init__"}
ABOVE = ("equivalence.compose", "equivalence.commands", "equivalence.report")
"""Who may import compose: it runs ways over ranks and has them judged."""


def modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every module of both packages by its dotted name."""
    for package in ("refimpl", "equivalence"):
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            yield name.removesuffix(".__init__"), ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> set[str]:
    """Every module a tree imports, anywhere in it, types included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
            found |= {"."} if node.level else set()
    return found


def tops(names: set[str]) -> set[str]:
    """The top-level packages of module names."""
    return {name.partition(".")[0] for name in names} - {""}


def packages(names: set[str]) -> set[str]:
    """Modules and all packages that they are in."""
    parts = [name.split(".") for name in names]
    return {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}


def breaches(root: Path) -> list[str]:
    """Every import that breaks a rule."""
    found = []
    own = {"verdict", "contract", "errors", "header", "compose.matrix"}
    for name, tree in modules(root):
        used = imports(tree)
        outside = tops(used) - set(sys.stdlib_module_names)
        check = name.removeprefix("equivalence.checks.").partition(".")[0]
        rules = {
            "refimpl imports torch and itself alone": name.startswith("refimpl")
            and outside - {"torch", "refimpl"},
            "no torch": name in {f"equivalence.{m}" for m in own} and "torch" in outside,
            "only store imports safetensors": name != "equivalence.store"
            and "safetensors" in outside,
            "only pytest_plugin imports pytest": name != "equivalence.pytest_plugin"
            and outside & {"pytest", "_pytest"},
            "only strategies imports hypothesis": name != "equivalence.strategies"
            and "hypothesis" in outside,
            "checks never import each other": name.startswith("equivalence.checks.")
            and {f"equivalence.checks.{c}" for c in CHECKS if c != check} & packages(used),
            "compose is above the judge": not name.startswith(ABOVE)
            and "equivalence.compose" in packages(used),
            "imports are absolute": "." in used,
            "reports decide nothing": name.startswith("equivalence.report.")
            and {"equivalence.judge", "equivalence.blocks", "torch"} & used,
            "only engines name kernels": not name.startswith("equivalence.engines")
            and {"deep_gemm", "sgl_kernel", "triton", "vllm"} & outside,
        }
        found += [f"{name}: {rule}" for rule, broken in rules.items() if broken]
    return found


def test_no_module_breaks_an_import_rule() -> None:
    """Both packages keep every rule."""
    assert breaches(ROOT) == []


@pytest.mark.parametrize(
    ("module", "line", "rule"),
    [
        ("refimpl/topk.py", "import equivalence", "refimpl imports torch and itself alone"),
        ("refimpl/bits.py", "import numpy", "refimpl imports torch and itself alone"),
        ("equivalence/verdict.py", "import torch", "no torch"),
        ("equivalence/contract.py", "from torch import Tensor", "no torch"),
        ("equivalence/judge.py", "import safetensors", "only store imports safetensors"),
        ("equivalence/run.py", "import pytest", "only pytest_plugin imports pytest"),
        ("equivalence/faults.py", "import hypothesis", "only strategies imports hypothesis"),
        (
            "equivalence/checks/pages.py",
            "from equivalence.checks import topk",
            "checks never import each other",
        ),
        (
            "equivalence/checks/published.py",
            "from equivalence.checks.composed.told import Told",
            "checks never import each other",
        ),
        (
            "equivalence/checks/composed/pages.py",
            "from equivalence.checks import topk",
            "checks never import each other",
        ),
        (
            "equivalence/checks/composed/told.py",
            "from equivalence.compose.matrix import Cell",
            "compose is above the judge",
        ),
        (
            "equivalence/ops.py",
            "import equivalence.compose.judging",
            "compose is above the judge",
        ),
        ("equivalence/compose/matrix.py", "import torch", "no torch"),
        ("equivalence/checks/topk.py", "from . import rows", "imports are absolute"),
        ("equivalence/ab.py", "import deep_gemm", "only engines name kernels"),
        (
            "equivalence/report/as_text.py",
            "from equivalence.judge import check",
            "reports decide nothing",
        ),
    ],
)
def test_a_planted_import_is_seen(tmp_path: Path, module: str, line: str, rule: str) -> None:
    """Each rule is broken once, and named."""
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(f"{line}\n", encoding="utf-8")
    name = module.removesuffix(".py").replace("/", ".")
    assert breaches(tmp_path) == [f"{name}: {rule}"]


def test_every_helper_of_checks_is_one() -> None:
    """It is there, and another module of the folder imports it."""
    used: set[str] = set()
    for name, tree in modules(ROOT):
        if name.startswith("equivalence.checks."):
            used |= imports(tree)
    assert {helper for helper in HELPERS if f"equivalence.checks.{helper}" not in used} == set()


@pytest.mark.parametrize(
    "module",
    [
        "equivalence",
        "equivalence.pytest_plugin",
        "equivalence.verdict",
        "equivalence.contract",
        "equivalence.compose.matrix",
    ],
)
def test_what_loads_with_pytest_does_not_load_torch(module: str) -> None:
    """A fresh interpreter imports the module and has neither torch nor safetensors."""
    heavy = "[name for name in ('torch', 'safetensors') if name in sys.modules]"
    program = f"import sys, {module}; print({heavy})"
    done = subprocess.run(  # noqa: S603 - our own interpreter and program
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
