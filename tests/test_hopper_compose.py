"""The measurements of composed pages, rehearsed small over shared memory."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from benchmarks import hopper, hopper_compose, hopper_exchange, page, page_ranks
from equivalence import ranks
from equivalence.case import Case
from equivalence.compose import running, steps
from equivalence.engines import pointer_gather
from equivalence.paths.ipc import moves
from equivalence.paths.ipc.faulty import Fault
from equivalence.paths.ipc.ways import WAYS, Way
from equivalence.replay import Outcome
from equivalence.world import threads

SMALL = hopper_compose.Setup(
    device="cpu",
    transport="shm",
    ranks=2,
    ways=("legacy", "direct"),
    scenarios=("bs-1-4",),
    layers=1,
    scale=8,
    timeout=20.0,
)
TIMED = hopper_exchange.Setup(
    device="cpu",
    transports=("shm",),
    ranks=2,
    batches=(("chunk", 0), ("bs-1-4", 2)),
    layers=2,
    scale=8,
    rounds=2,
    timeout=20.0,
)
FIGURES = ("seconds", "wall", "seconds_to_legacy", "wall_to_legacy")


def time_ways(case: Case, *names: str) -> list[Outcome]:
    """Ways timed once on a batch of two ranks that are threads."""
    settings: dict[str, Any] = {"names": list(names), "rounds": 1, "waits": "host"}
    settings |= case.params
    return threads.run(2, hopper_exchange.time_ways, inputs=dict(case.inputs), **settings)


@pytest.fixture(scope="module")
def timed() -> list[dict[str, Any]]:
    """Two batches over two ranks."""
    return list(hopper_exchange.exchange(TIMED))


def test_every_way_of_a_scenario_is_judged() -> None:
    """A row a scenario and way, with what was compared."""
    rows = list(hopper_compose.compose(SMALL))
    assert [(row["scenario"], row["way"]) for row in rows] == [
        ("bs-1-4", "legacy"),
        ("bs-1-4", "direct"),
    ]
    for row in rows:
        assert (row["transport"], row["ranks"], row["gpus"]) == (
            "shm",
            2,
            min(2, torch.cuda.device_count()),
        )
        assert (row["status"], row["steps"], row["planned"]) == ("EQUAL", 4, 4)
        assert (row["different"], row["findings"]) == (0, [])
        assert row["pages"] > 0
        assert row["bytes"] > 0
        assert 0 < row["seconds"] <= row["whole_seconds"]


def test_a_rank_that_fails_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is concluded, and the part goes on with the next way."""
    honest = running.played

    def played(pool: Any, way: str, cases: Any, **given: Any) -> Any:  # noqa: ANN401 - as honest
        fault = Fault(name="killed-before", rank=1) if way == "direct" else None
        return honest(pool, way, cases, fault=fault, **given)

    monkeypatch.setattr(running, "played", played)
    rows = list(hopper_compose.compose(replace(SMALL, ways=("direct", "staging"))))
    assert [row["status"] for row in rows] == ["UNDECIDED", "EQUAL"]
    assert (rows[0]["steps"], rows[0]["planned"], rows[0]["pages"]) == (1, 4, 0)
    assert "rank 1" in rows[0]["findings"][0]
    text = page_ranks.compose({"setup": asdict(SMALL), "rows": rows})
    assert "| `bs-1-4` | 0 | shm | 1 of 2 | 4 |" in text
    assert "UNDECIDED: bs-1-4.0" in text


def test_every_way_of_a_batch_has_time_and_bytes(timed: list[dict[str, Any]]) -> None:
    """Ratios are to legacy of the same run; sums are its bytes, peers' memory those of the rest."""
    batches = ["chunk.0", "bs-1-4.2"]
    told = [(row["batch"], row["waits"], row["way"]) for row in timed]
    assert told == [(batch, "host", way) for batch in batches for way in WAYS]
    for row in timed:
        assert row["same"] is True
        assert all(row[name] > 0 for name in FIGURES)
        assert (row["summed_bytes"] > 0) == WAYS[row["way"]].sums
        assert row["read_bytes"] == 0 or WAYS[row["way"]].exports
        assert row["way"] != "legacy" or row["seconds_to_legacy"] == 1.0
    sums = {row["way"]: row["summed_bytes"] for row in timed[: len(WAYS)]}
    assert sums["fused"] < sums["legacy"] <= sums["fallback"]


def test_a_way_with_other_bytes_is_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank compares what it timed with what legacy gave it."""
    case = steps.sequence("bs-1-4", cp=2, layers=1, scale=8)[2]
    honest = WAYS["direct"].run

    def wrong(*given: Any, **call: Any) -> Any:  # noqa: ANN401 - as a way
        for layer, kind, dense in honest(*given, **call):
            yield layer, kind, dense ^ 1

    monkeypatch.setattr(hopper_exchange, "WAYS", {**WAYS, "direct": Way(run=wrong)})
    for outcome in time_ways(case, "legacy", "direct", "staging"):
        assert outcome.outputs["same"].tolist() == [1, 0, 1]
        assert outcome.outputs["ran"].tolist() == [1, 1, 1]


def test_one_kernel_in_place_of_a_gather_is_a_row_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is the kernel, direct is timed with it too, and reads what direct reads."""

    class Gather:
        """As moves.gather."""

        def __call__(self, table: Any, reads: Any, out: Tensor) -> None:  # noqa: ANN401
            """Gather."""
            moves.gather(table, reads, out)

    monkeypatch.setattr(pointer_gather, "available", lambda _: True)
    monkeypatch.setattr(pointer_gather, "Gather", Gather)
    case = steps.sequence("bs-1-4", cp=2, layers=1, scale=8)[2]
    for outcome in time_ways(case, "direct", hopper_exchange.KERNEL):
        assert outcome.outputs["ran"].tolist() == [1, 1]
        assert outcome.outputs["same"].tolist() == [1, 1]
        read = outcome.outputs["read_bytes"].tolist()
        assert read[0] == read[1]


def test_waits_that_fail_are_told_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang costs its time limit once; the other kind of waiting goes on."""
    asked: list[str] = []

    def one(*given: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - as `_rows`
        about = given[-1]
        asked.append(about["waits"])
        row = (
            {"way": None, "why": "timeout: rank 1"} if about["waits"] == "stream" else {"way": "x"}
        )
        yield {**about, **row}

    monkeypatch.setattr(hopper_exchange, "_rows", one)
    monkeypatch.setattr(ranks, "start", lambda *_, **__: nullcontext())
    rows = list(hopper_exchange.exchange(TIMED))
    assert asked == ["host", "stream", "host"]
    assert [row["way"] for row in rows] == ["x", None, "x"]


def test_ranks_that_cannot_run_are_one_row() -> None:
    """The transport's sentence stands in it."""
    setup = replace(TIMED, transports=("symmetric",), device=None)
    if torch.cuda.device_count():
        pytest.skip("this machine has what the test does without")
    rows = list(hopper_exchange.exchange(setup))
    assert [row["way"] for row in rows] == [None, None]
    assert "transport symmetric needs a CUDA device; torch finds none" in rows[0]["why"]


def test_the_command_writes_both_and_the_page_tells_them(
    timed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file a part, named by the GPUs where all ranks share them; a section each at the end."""
    monkeypatch.setattr(hopper, "on_device", lambda: True)
    monkeypatch.setitem(hopper.PARTS, "compose", (hopper_compose.compose, SMALL))
    failed = {**timed[0], "way": None, "waits": "stream", "why": "timeout: rank 1 is silent"}
    other = {**timed[1], "same": False}
    rows = [timed[0], other, *timed[2:], failed]
    monkeypatch.setitem(hopper.PARTS, "exchange", (lambda _: iter(rows), TIMED))
    done = CliRunner().invoke(hopper.main, ["compose", "exchange", "--to", str(tmp_path)])
    assert done.exit_code == 0, done.output
    names = [f"hopper-compose-{torch.cuda.device_count()}gpu.json", "hopper-exchange.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    kernels = [json.loads((tmp_path / name).read_text())["provenance"]["kernels"] for name in names]
    assert kernels == ["none", hopper_exchange.kernels()]
    text = page.render(tmp_path)
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "## Pages across ranks",
        "## Exchange of pages, one rank a GPU",
        "## What these figures do not say",
    ]
    assert "| `bs-1-4` | 0 | shm | 2 of 2 | 4 |" in text
    assert "- shm, stream, `chunk.0`: timeout: rank 1 is silent\n" in text
    assert "- shm, host, `chunk.0`: fused is not legacy\n" in text
    assert text.count("2 ranks, transport `shm`, waiting `host`") == 1
