"""The command line: what to judge, how to say it, and the exit code."""

import sys
from collections.abc import Sequence
from io import TextIOWrapper

import click

from equivalence.commands.ab import ab
from equivalence.commands.common import FAILED, USAGE, say
from equivalence.commands.compose import compose_
from equivalence.commands.import_ import import_
from equivalence.commands.invariance import invariance_
from equivalence.commands.lint_ import lint_
from equivalence.commands.replay import replay
from equivalence.commands.show_ import show_
from equivalence.errors import InvalidCase, UsageError


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 equal, 1 different, 2 usage, 3 undecided, 4 our failure."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command.main(args=arguments, prog_name="equivalence", standalone_mode=False)
    except click.ClickException as error:
        say(error.format_message())
        code = USAGE
    except click.exceptions.Abort:
        say("stopped")
        code = USAGE
    except (UsageError, InvalidCase) as error:
        say(str(error))
        code = USAGE
    except SystemExit:
        # Whoever read the output has gone, and click ends such a run with what means DIFFERENT.
        code = FAILED
    except Exception as error:  # the last line of defence: a user sees one sentence
        if "--debug" in arguments:
            raise
        kind = type(error).__name__
        say(f"internal error: {kind}: {error}; this is a bug here, `--debug` prints where")
        code = FAILED
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="indexer-equivalence")
@click.option("--debug", is_flag=True, help="Print where an internal error happened.")
def command(*, debug: bool) -> None:
    """Are the picks of a sparse-attention indexer the same, only tied, or wrong?"""
    del debug


for each in (import_, replay, ab, invariance_, compose_, show_, lint_):
    command.add_command(each)
