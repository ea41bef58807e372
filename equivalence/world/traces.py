"""What a world leaves outside its processes: names in shared memory, and one private folder."""

import shutil
import tempfile
from pathlib import Path

from equivalence.world import segment


def store(tag: str) -> str:
    """A file name for gloo's ranks to meet by, in a new folder that nobody else may open."""
    folder = _folder(tag)
    folder.mkdir(mode=0o700)
    return str(folder / "store")


def clean(tag: str) -> None:
    """Remove everything that a world left."""
    segment.sweep(tag)
    shutil.rmtree(_folder(tag), ignore_errors=True)


def _folder(tag: str) -> Path:
    return Path(tempfile.gettempdir()) / tag
