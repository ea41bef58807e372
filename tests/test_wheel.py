"""The built wheel, installed where nothing else of the project is, replays what it ships."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, folder: Path) -> str:
    """What a command prints."""
    done = subprocess.run(  # noqa: S603 - our own interpreter and arguments
        [str(part) for part in command], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_wheel_ships_its_cases_and_replays_them(tmp_path: Path) -> None:
    """Only torch and the other dependencies come from this environment; the project does not."""
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(sys.executable, *build, "--wheel-dir", tmp_path, ROOT, folder=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "empty", folder=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", site, folder=tmp_path).strip())
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target")
    run(sys.executable, *install, packages, wheel, folder=tmp_path)
    # A path line brings the dependencies, not the editable install, whose own .pth stays unread.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    home = run(python, "-c", "import equivalence; print(equivalence.__file__)", folder=tmp_path)
    assert Path(home.strip()).is_relative_to(packages)
    replayed = run(
        python, "-m", "equivalence", "replay", "--shipped", "--json", "-", folder=tmp_path
    )
    data = json.loads(replayed)
    assert (data["status"], len(data["cases"])) == ("EQUAL", 10)
    assert {Path(case["path"]).parent for case in data["cases"]} == {
        packages / "equivalence" / "fixtures" / "cases"
    }
