"""The pytest plugin: case files are tests, and the fixture `equivalence` judges in tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from equivalence import session as sessions
from equivalence.errors import InvalidCase, NotEquivalent, UsageError
from equivalence.fixture import Equivalence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

    from equivalence.ranks import Pool

_STATE = pytest.StashKey[sessions.Session]()
_WORKER = "equivalence_alone"
_RANKS = "ranks(n=2, *, timeout=30, transport='shm', device=None): processes of `ranks`."
_PLAIN = int | float | str | None
_LOOKS = ("collectonly", "showfixtures", "show_fixtures_per_test", "setupplan")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    add = parser.getgroup("equivalence", "are picks equal, only tied, or wrong").addoption
    add("--equivalence-candidate", metavar="MODULE:FUNCTION", help="Judge this on every case.")
    add("--equivalence-contract", metavar="NAME|KEY=VALUE,...", help="What may differ.")
    add("--equivalence-op", metavar="OP", help="Only case files of this op.")
    add("--equivalence-device", metavar="DEVICE", help="Where inputs go and the reference runs.")
    text = "A kernel that each call of a candidate must have run; may be given again."
    add("--equivalence-require-path", metavar="NAME", action="append", default=[], help=text)
    add("--equivalence-require-cases", action="store_true", help="Fail where no case ran.")
    text = "Where failing rows go (.equivalence under the root)."
    add("--equivalence-save", metavar="DIR|off", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Read the options."""
    names = ("candidate", "contract", "device", "op", "require_path", "require_cases", "save")
    options = {name: config.getoption(f"equivalence_{name}") for name in names}
    try:
        state = sessions.start(**options, root=config.rootpath)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_STATE] = state
    config.addinivalue_line("markers", _RANKS)
    config.pluginmanager.register(_Listener(state))


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> CaseFile | None:
    """Collect case files."""
    named = parent.session.isinitpath(file_path)
    if sessions.wants(parent.config.stash[_STATE], file_path, named=named):
        return CaseFile.from_parent(parent, path=file_path)
    return None


class CaseFile(pytest.File):
    """A file that holds one case."""

    def collect(self) -> Iterator[CaseItem]:
        """Give its one test."""
        candidate = self.config.stash[_STATE].candidate
        yield CaseItem.from_parent(
            self, name=sessions.RECORDED if candidate is None else sessions.CANDIDATE
        )


class CaseItem(pytest.Item):
    """The test of one case: its recorded runs, or the candidate on its inputs."""

    def runtest(self) -> None:
        """Judge it."""
        sessions.judge_file(self.config.stash[_STATE], self.path)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *rest: Any) -> Any:  # noqa: ANN401 - pytest's hook
        """Say what differs; where it was raised helps nobody."""
        if isinstance(excinfo.value, NotEquivalent | InvalidCase | UsageError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *rest)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Name the case."""
        return self.path, None, self.path.stem


@pytest.fixture(scope="session")
def equivalence(pytestconfig: pytest.Config) -> Equivalence:
    """`check`, `assert_equivalent` and `load_cases`, with the options and the summary."""
    return Equivalence(session=pytestconfig.stash[_STATE])


@pytest.fixture(scope="session")
def _kept_ranks() -> Iterator[Callable[..., Pool]]:
    """Pools of ranks, each started once a session."""
    from equivalence import ranks  # noqa: PLC0415 - torch is imported on use

    with ranks.kept() as pools:
        yield pools


@pytest.fixture
def ranks(request: pytest.FixtureRequest, _kept_ranks: Callable[..., Pool]) -> Pool:
    """The processes that the test's marker `ranks` asks for; `run` runs a function on each."""
    marker = request.node.get_closest_marker("ranks")
    if marker is None:
        return _kept_ranks()
    args, named = marker.args, marker.kwargs
    plain = all(isinstance(value, _PLAIN) for value in (*args, *named.values()))
    if len(args) + ("n" in named) > 1 or not plain:
        raise UsageError(
            "the marker ranks takes one number, and timeout=, transport= and device=: it has "
            f"{args} and {named}"
        )
    return _kept_ranks(*args, **named)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that judged nothing though it should; a worker hands on what it left alone."""
    config, state = session.config, session.config.stash[_STATE]
    if hasattr(config, "workeroutput"):
        config.workeroutput[_WORKER] = sorted(state.alone)
    elif not _looks(config):
        session.exitstatus, _ = sessions.ending(state, int(session.exitstatus))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Print what was judged."""
    state = config.stash[_STATE]
    told = sessions.lines(state)
    sentence = "" if _looks(config) else sessions.ending(state, int(exitstatus))[1]
    if told or sentence:
        terminalreporter.write_sep("=", "equivalence")
    for line in told:
        terminalreporter.write_line(line)
    if sentence:
        terminalreporter.write_line(sentence, red=True)


def _looks(config: pytest.Config) -> bool:
    """Whether tests are only looked at."""
    return any(config.getoption(name, default=False) for name in _LOOKS)


@dataclass(frozen=True)
class _Listener:
    """Hooks that are not told the config, bound to their session."""

    state: sessions.Session

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Know the test that runs; going on is for others."""
        self.state.properties = item.user_properties

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take verdicts from a finished test, of this process or of a worker."""
        if report.when == "teardown":
            sessions.hear(self.state, report.nodeid, report.user_properties)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:  # noqa: ANN401 - xdist's, where installed
        """Take what a worker left alone."""
        self.state.alone.update(getattr(node, "workeroutput", {}).get(_WORKER, ()))
