"""Pages as the code has them: `python tests/pages.py PAGE ...` writes them anew.

Tables are those of `equivalence.report.tables`. Python blocks of a page run one after another in
one namespace, and what one prints stands in the text block behind it. The README is not one of
them: its code is its tests' to run.
"""

import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from os import chdir
from pathlib import Path
from tempfile import mkdtemp

from equivalence.report import tables

_BLOCKS = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?P<shown>\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE
)


def rendered(text: str) -> str:
    """The page with the tables that the code makes and the outputs that its own code prints."""
    names: dict[str, object] = {}

    def run(found: re.Match[str]) -> str:
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(found["code"], "page", "exec"), names)  # noqa: S102 - the page's own code
        shown = f"\n```text\n{printed.getvalue()}```\n" if printed.getvalue() else ""
        return f"```python\n{found['code']}```\n{shown}"

    return _BLOCKS.sub(run, tables.filled(text))


if __name__ == "__main__":
    pages = [Path(page).resolve() for page in sys.argv[1:]]
    # What a page's code writes is not kept.
    chdir(mkdtemp())
    for page in pages:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
