"""The pages of docs/ say what happens: tables are the code's, their code runs and prints that."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from pages import rendered

from equivalence import specs
from equivalence.contract import FREEDOMS
from equivalence.errors import NotEquivalent
from equivalence.verdict import RULES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FAMILIES = sorted((DOCS / "families").glob("*.md"))
PAGES = [*sorted(DOCS.glob("*.md")), *FAMILIES]
LINKING = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def read(page: Path) -> str:
    """The text of a page."""
    return page.read_text(encoding="utf-8")


def block(page: Path, text: str) -> str:
    """The python block of a page that holds this text."""
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```$", read(page), re.DOTALL | re.MULTILINE)
    (found,) = (code for code in blocks if text in code)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_what_its_code_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its formulas equal the reference, its tables are generated, its messages are real."""
    monkeypatch.chdir(tmp_path)
    assert rendered(read(page)) == read(page)


@pytest.mark.parametrize(
    ("page", "marked"),
    [
        ("ops", ["ops"]),
        ("contracts", ["freedoms", "contracts"]),
        ("families/compose", ["tensors compose_pages", "ways", "scenarios", "faults"]),
    ],
)
def test_a_list_is_on_its_page(page: str, marked: list[str]) -> None:
    """Every op, contract, way, scenario and fault by name: what is marked is filled."""
    assert re.findall(r"^<!-- (.+) -->\n\|", read(DOCS / f"{page}.md"), re.MULTILINE) == marked


def test_every_freedom_is_explained() -> None:
    """Each key has its values, and in the same order what it is about."""
    page = read(DOCS / "contracts.md")
    section = page[page.index("## Freedoms") : page.index("## Named kernels")]
    keys = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert keys == 2 * [*FREEDOMS, "reserved_pages"]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.stem)
def test_links_lead_to_what_the_source_distribution_has(page: Path) -> None:
    """Files beside the page, and headings in them."""
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    only = shipped["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", read(page)):
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve()
        assert target.exists(), link
        assert target.relative_to(ROOT).parts[0] in only, link
        headings = re.findall(r"^#+ (.+)$", read(target), re.MULTILINE) if heading else []
        assert heading in ["", *(each.lower().replace(" ", "-") for each in headings)], link


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("row_start[:, None] + column", "0 * row_start[:, None] + column"),
        (".masked_fill(~inside, -torch.inf)", ""),
        (".scatter(1, newest.long(), torch.inf)", ""),
        ("min(topk_blocks, ", "min(topk_blocks + 1, "),
        ("amax(2)", "amin(2)"),
        (', contract="ties=any"', ""),
    ],
)
def test_the_mask_of_the_page_is_wrong_with_anything_left_out(old: str, new: str) -> None:
    """Every part of the publisher on the page is needed."""
    code = block(DOCS / "testing.md", "def publish(")
    assert old in code
    with pytest.raises(NotEquivalent, match="mask: "):
        exec(compile(code.replace(old, new), "testing.md", "exec"), {})  # noqa: S102 - likewise


def test_a_kernel_that_forgets_the_relu_is_outside_the_bound_of_the_page() -> None:
    """The one on the page, which rounds to bf16, is within it."""
    code = block(DOCS / "testing.md", "scores=bound")
    assert ".relu()" in code
    with pytest.raises(NotEquivalent, match="bits"):
        exec(compile(code.replace(".relu()", ""), "testing.md", "exec"), {})  # noqa: S102 - likewise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_readme_links_each_page(page: Path) -> None:
    """None is left out."""
    assert f"({page.relative_to(ROOT)})" in README


@pytest.mark.parametrize("page", FAMILIES, ids=lambda page: page.stem)
def test_names_of_functions_on_a_page_are_real(page: Path) -> None:
    """Each `refimpl.module.name` and `equivalence.module` can be imported."""
    named = set(re.findall(r"\b(?:refimpl|equivalence)(?:\.[A-Za-z_]\w*)+", read(page)))
    assert named
    for name in named:
        path = name.split(".")
        found = import_module(path[0])
        for i, part in enumerate(path[1:], start=2):
            if not hasattr(found, part):
                import_module(".".join(path[:i]))
            found = getattr(found, part)


def test_every_op_has_its_tensors_on_a_page() -> None:
    """A table of shapes, or a word that it is a part of another."""
    text = "".join(map(read, FAMILIES))
    assert [name for name in specs.OPS if f"`{name}`" not in text] == []


def test_the_masks_page_names_rules_that_exist() -> None:
    """Its table of rules is of the closed set."""
    page = read(DOCS / "families" / "v4.1.md")
    table = page[page.index("| rule |") :]
    rules = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    assert set(rules) == set(rules) & set(RULES)
    assert {"mask-extra", "mask-missing", "wrong-tie", "duplicate", "unwritten"} <= set(rules)


def test_a_changed_page_is_seen() -> None:
    """Another number in a table, in an output or in a formula is not what the code says."""
    page = read(DOCS / "families" / "v4.md")
    for old, new in (
        ("| `k` | param |  | int |", "| `k` | param |  | str |"),
        ("[0, 0, 0, 0, 0, 5, 5]", "[0, 0, 0, 0, 0, 5, 6]"),
    ):
        assert old in page
        assert rendered(page.replace(old, new, 1)) == page
    with pytest.raises(AssertionError):
        rendered(page.replace("(position + 1) // ratio", "position // ratio"))


def test_every_package_has_its_line_in_contributing() -> None:
    """From the folder one knows where a line belongs."""
    made = {
        path.parent
        for root in ("refimpl", "equivalence")
        for path in ROOT.glob(f"{root}/**/__init__.py")
    }
    told = set(re.findall(r"^\| `([\w/]+)/` \|", read(ROOT / "CONTRIBUTING.md"), re.MULTILINE))
    assert {path.relative_to(ROOT).as_posix() for path in made} <= told
    assert [folder for folder in told if not (ROOT / folder).is_dir()] == []
