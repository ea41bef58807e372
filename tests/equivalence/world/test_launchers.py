"""Ranks started by scripts: what they print, and what is left when the script is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_FUNCTIONS = """
import os, signal, sys, time
import torch
from equivalence import ranks
from equivalence.errors import UsageError

def who(link, *, add=0):
    link.barrier()
    return torch.tensor([link.rank + add, os.getpid()])

def hangs(link, *, folder):
    link.export("memory", (64,))
    link.agree(1)
    with open(f"{folder}/{link.rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)
"""
_GUARDED = """
if __name__ == "__main__":
    with ranks.start(2) as pool:
        print([int(outcome.outputs["result"][0]) for outcome in pool.run(who, add=5)])
"""
_BARE = """
with ranks.start(2) as pool:
    try:
        pool.run(who)
    except UsageError as error:
        print(error)
"""
_HANGING = """
if __name__ == "__main__":
    # A shell that starts tests behind itself has them ignore Control-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ranks.start(2) as pool:
        pool.run(who)
        launcher = pool.carry.args[0]
        print(launcher.host.process.pid, flush=True)
        pool.run(hangs, folder=sys.argv[1])
"""


def script(tmp_path: Path, *parts: str, name: str = "user_script.py") -> Path:
    """A user's script."""
    path = tmp_path / name
    path.write_text("".join(parts))
    return path


def environment() -> dict[str, str]:
    """Where this package is found."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What a command prints."""
    return subprocess.run(  # noqa: S603 - our own interpreter and script
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        cwd=cwd,
        timeout=60,
    )


def ended(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_a_script_and_a_module_run_their_own_functions(tmp_path: Path) -> None:
    """Functions of __main__ are found by the script's file, or by the name of a module."""
    path = script(tmp_path, _FUNCTIONS, _GUARDED)
    for done in (run(str(path)), run("-m", "user_script", cwd=tmp_path)):
        assert (done.stdout, done.stderr) == ("[5, 6]\n", "")


def test_a_script_without_a_guard_gets_one_sentence(tmp_path: Path) -> None:
    """Ranks that import it start none themselves, and nobody prints a traceback."""
    done = run(str(script(tmp_path, _FUNCTIONS, _BARE)))
    assert done.stderr == ""
    assert "start ranks of its own: in a script, start them under `if __name__" in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT", "SIGTERM"])
def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path, how: str) -> None:
    """Host and ranks end and say nothing, and no temporary file is left."""
    path, temporary = script(tmp_path, _FUNCTIONS, _HANGING), tmp_path / "temporary"
    temporary.mkdir()
    with subprocess.Popen(  # noqa: S603 - our own interpreter and script
        [sys.executable, str(path), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | {"TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout is not None
        host = int(process.stdout.readline())
        pids = [tmp_path / "0", tmp_path / "1"]
        deadline = time.monotonic() + 20
        while not all(pid.exists() and pid.read_text() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.Signals[how])
        _, printed = process.communicate(timeout=20)
    deadline = time.monotonic() + 5
    running = [host, *(int(pid.read_text()) for pid in pids)]
    while not all(map(ended, running)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in running if not ended(pid)] == []
    assert "world/serve.py" not in printed
    assert list(temporary.iterdir()) == []
