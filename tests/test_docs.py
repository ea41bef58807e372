"""The pages of docs/ say what happens: tables are the code's, their code runs and prints that."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from pages import rendered

from equivalence import specs, tables
from equivalence.verdict import RULES

DOCS = Path(__file__).parent.parent / "docs"
FAMILIES = sorted((DOCS / "families").glob("*.md"))
README = (DOCS.parent / "README.md").read_text(encoding="utf-8")


def read(page: Path) -> str:
    """The text of a page."""
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", FAMILIES, ids=lambda page: page.stem)
def test_a_page_of_a_family_is_what_its_code_says(page: Path) -> None:
    """Its formulas equal the reference, its tables are generated, its messages are real."""
    assert rendered(read(page)) == read(page)


def test_the_list_of_contracts_is_generated() -> None:
    """Every documented kernel is in docs/contracts.md."""
    page = read(DOCS / "contracts.md")
    assert tables.of_contracts() in page
    assert tables.filled(page) == page


@pytest.mark.parametrize("page", FAMILIES, ids=lambda page: page.stem)
def test_the_readme_links_each_family(page: Path) -> None:
    """No page is left out."""
    assert f"(docs/families/{page.name})" in README


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
