"""The command line: what to judge, how to say it, and the exit code."""

import errno
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

import click

from equivalence.commands.ab import ab
from equivalence.commands.common import FAILED, STOPPED, UNREAD, USAGE, say
from equivalence.commands.compose import compose_
from equivalence.commands.import_ import import_
from equivalence.commands.invariance import invariance_
from equivalence.commands.lint_ import lint_
from equivalence.commands.replay import replay
from equivalence.commands.show_ import show_
from equivalence.errors import InvalidCase, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""How a stream refuses what is printed; commands say themselves which file could not be written."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 equal, 1 different, 2 usage, 3 undecided, 4 our failure.

    130 where the user stopped it, 141 where whoever read its output has gone.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # a shell's `2>&-`: nobody listens, and nothing else takes its number
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until we exit
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    code, sentence = _run(arguments)
    lost = _lost()
    if isinstance(lost, BrokenPipeError):
        code, sentence = UNREAD, ""
    elif lost is not None:
        code, sentence = FAILED, _unwritten(lost)
    if sentence:
        say(sentence)
    sys.exit(code)


def _run(arguments: list[str]) -> tuple[int, str]:
    """Run a command line: its exit code, and a sentence where it came to no result."""
    try:
        return command.main(args=arguments, prog_name="equivalence", standalone_mode=False), ""
    except click.ClickException as error:
        return USAGE, error.format_message()
    except click.exceptions.Abort:
        return STOPPED, "stopped"
    except (UsageError, InvalidCase) as error:
        return USAGE, str(error)
    except SystemExit:
        # Whoever read the output has gone, and click ends such a run with what means DIFFERENT.
        return UNREAD, ""
    except Exception as error:  # the last line of defence: a user sees one sentence
        if "--debug" in arguments:
            raise
        return FAILED, _told(error)


def _told(error: Exception) -> str:
    """What a run failed by."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return _unwritten(error)
    if _no_memory(error):
        return "not enough memory for this: ask for less of it at once"
    kind = type(error).__name__
    return f"internal error: {kind}: {error}; this is a bug here, `--debug` prints where"


def _unwritten(error: OSError) -> str:
    return f"the output could not be written: {error.strerror}"


def _no_memory(error: Exception) -> bool:
    """Whether there was no room for a tensor: torch says so in words, or by a name of its own."""
    if isinstance(error, RuntimeError):
        return type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)
    return isinstance(error, MemoryError)


def _lost() -> OSError | None:
    """Why what was printed on stdout reached nobody; nothing tries to write it once more."""
    why = {}
    for stream in filter(None, (sys.stderr, sys.stdout)):
        try:
            stream.flush()
        except OSError as error:
            why[stream] = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return why.get(sys.stdout)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="indexer-equivalence")
@click.option("--debug", is_flag=True, help="Print where an internal error happened.")
def command(*, debug: bool) -> None:
    """Are the picks of a sparse-attention indexer the same, only tied, or wrong?"""
    del debug


for each in (import_, replay, ab, invariance_, compose_, show_, lint_):
    command.add_command(each)
