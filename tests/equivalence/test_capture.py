"""Recording a live callable: what its files hold, what is counted, and what the caller gets."""

import errno
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tiny
import torch
from tiny import ints
from torch import Tensor

from equivalence import capture, judge, ops, store
from equivalence.capture import Recorder, record
from equivalence.case import Case, held
from equivalence.errors import UsageError
from equivalence.live import clones, recorder
from equivalence.live.budget import Budget, Counts
from equivalence.live.call import Reading
from equivalence.verdict import Status
from refimpl.topk import ragged_topk

CASE = tiny.topk()
PICKS = CASE.recorded[0]["raw_indices"]


def topk(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int = 8) -> Tensor:
    """Right picks."""
    return ragged_topk(scores=scores, row_start=row_start, row_end=row_end, k=k)


def loses(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int = 8) -> Tensor:
    """The first winner of row 0 is lost."""
    picks = topk(scores, row_start, row_end, k)
    picks[0, 0] = int(scores[0].argmin())
    return picks


def mutates(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int = 8) -> Tensor:
    """Right picks of scores that are then gone."""
    picks = topk(scores, row_start, row_end, k)
    scores.fill_(-1.0)
    return picks


def writes(score: Tensor, windows: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Right picks into a buffer."""
    out.copy_(topk(score, *windows, k=out.shape[1]))


def windows_of(score: Tensor, windows: tuple[Tensor, Tensor], out: Tensor) -> Mapping[str, Any]:
    """A call of `writes` by the op's names."""
    return {
        "scores": score,
        "row_start": windows[0],
        "row_end": windows[1],
        "k": out.shape[1],
    }


def run(fn: Callable[..., Any], times: int = 1) -> Any:  # noqa: ANN401 - what the callable returns
    """Call with fresh copies of the case's inputs, `times` over; the last result."""
    result = None
    for _ in range(times):
        result = fn(**{name: t.clone() for name, t in CASE.inputs.items()}, k=8)
    return result


def files(folder: Path) -> list[str]:
    """Every name in a folder and below it, hidden ones too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def inputs_in(path: Path) -> dict[str, Any]:
    """The inputs of a file as numbers."""
    return {name: t.tolist() for name, t in held(store.load(path)).inputs.items()}


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def only(folder: Path) -> Path:
    """The one file of a folder."""
    (path,) = folder.iterdir()
    return path


WANT = {name: t.tolist() for name, t in CASE.inputs.items()}
"""The inputs of every call here, as they are before it."""


@pytest.mark.parametrize(
    ("fn", "status"), [(topk, Status.EQUAL), (mutates, Status.EQUAL), (loses, Status.DIFFERENT)]
)
def test_a_recorded_call_is_judged_as_what_it_was(
    fn: Callable[..., Any], status: Status, tmp_path: Path
) -> None:
    """The file holds inputs from before the call and the run as entry 0, and replays both ways."""
    recorded = record(fn, op="ragged_topk", to=tmp_path)
    result = run(recorded)
    assert recorded.counts == Counts(calls=1, written=1, bytes=size_of(tmp_path))
    (case,) = store.load_cases(tmp_path)
    assert inputs_in(only(tmp_path)) == WANT
    assert dict(case.params) == {"k": 8}
    assert [entry["raw_indices"].tolist() for entry in case.recorded] == [result.tolist()]
    assert judge.check(case).status is status
    assert judge.check(case, topk).status is Status.EQUAL
    assert judge.check(case, loses).status is Status.DIFFERENT


def test_an_output_written_in_place_is_stored_as_it_is_after_the_call(tmp_path: Path) -> None:
    """The buffer is an output and no input; what it held before is nowhere."""
    recorded = record(
        writes,
        op="ragged_topk",
        to=tmp_path,
        read=windows_of,
        inplace={"raw_indices": "out"},
    )
    scores, start, end = (CASE.inputs[name] for name in ("scores", "row_start", "row_end"))
    out = torch.full((4, 8), -7, dtype=torch.int32)
    assert recorded(scores, (start, end), out=out) is None
    (case,) = store.load_cases(tmp_path)
    assert inputs_in(only(tmp_path)) == WANT
    assert torch.equal(case.recorded[0]["raw_indices"], out)
    assert torch.equal(out, PICKS)
    assert judge.check(case).status is Status.EQUAL


def test_an_argument_that_is_input_and_output_is_stored_as_both(tmp_path: Path) -> None:
    """Where the op says it is an input, its values from before the call are kept."""
    table, raw = ints([5, 3]), ints([0, 5, -1, 7])

    def pages(raw_indices: Tensor, page_table: Tensor, page_size: int) -> None:
        slots = page_table[0][raw_indices.clamp(min=0).long() // page_size] * page_size
        slots += raw_indices % page_size
        raw_indices.copy_(torch.where(raw_indices < 0, -1, slots))

    recorded = record(
        pages, op="translate_pages", to=tmp_path, inplace={"page_indices": "raw_indices"}
    )
    recorded(raw, table, page_size=4)
    (case,) = store.load_cases(tmp_path)
    assert case.inputs["raw_indices"].tolist() == [[0, 5, -1, 7]]
    assert case.recorded[0]["page_indices"].tolist() == raw.tolist() == [[20, 13, -1, 15]]
    assert judge.check(case).status is Status.EQUAL


def test_the_caller_gets_the_very_object_and_its_inputs_as_the_callable_left_them(
    tmp_path: Path,
) -> None:
    """Recorded, left out or unreadable: a result passes by identity, a mutation stays."""
    made: list[object] = []

    def kernel(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> object:
        picks = mutates(scores, row_start, row_end, k)
        results = [picks, picks[:, :4], (picks, scores), None, {"raw_indices": picks}]
        made.append(results[len(made)])
        return made[-1]

    recorded = record(kernel, op="ragged_topk", to=tmp_path)
    for _ in range(5):
        scores = CASE.inputs["scores"].clone()
        result = recorded(scores, CASE.inputs["row_start"], CASE.inputs["row_end"], 8)
        assert result is made[-1]
        assert torch.equal(scores, torch.full_like(scores, -1.0))
    assert recorded.counts == Counts(
        calls=5,
        written=3,
        bytes=size_of(tmp_path),
        left_out={
            "unreadable: cannot be read as ragged_topk: the call returned tuple; without `give`,"
            " it is read from a tensor or a mapping of raw_indices": 2
        },
    )


def test_a_wrapped_function_looks_and_binds_as_before(tmp_path: Path) -> None:
    """Name, doc and signature stay; as a method of a class it gets its object."""

    class Indexer:
        k = 8

        def pick(self, scores: Tensor, row_start: Tensor, row_end: Tensor) -> Tensor:
            """Pick."""
            return topk(scores, row_start, row_end, self.k)

    plain = Indexer.pick
    patched: Any = Indexer
    patched.pick = record(plain, op="ragged_topk", to=tmp_path, params={"k": 8})
    indexer = Indexer()
    picks = indexer.pick(**CASE.inputs)
    assert torch.equal(picks, PICKS)
    assert (patched.pick.__name__, patched.pick.__doc__) == ("pick", "Pick.")
    assert patched.pick.__wrapped__ is plain
    bound: Any = indexer.pick
    assert bound.counts == Counts(calls=1, written=1, bytes=size_of(tmp_path))
    assert re.fullmatch(rf"pick-{os.getpid()}-\d{{6}}\.safetensors", only(tmp_path).name)


class Halt(BaseException):
    """What no handler expects."""


@pytest.mark.parametrize("error", [ValueError("its own"), KeyboardInterrupt(), Halt()])
def test_what_the_callable_raises_passes_unchanged_and_is_counted(
    error: BaseException, tmp_path: Path
) -> None:
    """The very exception comes out, with no context of ours, and nothing is written."""

    def kernel(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
        del scores, row_start, row_end, k
        raise error

    recorded = record(kernel, op="ragged_topk", to=tmp_path, every=2)
    for _ in range(3):
        with pytest.raises(type(error)) as caught:
            run(recorded)
        assert caught.value is error
        assert error.__context__ is None
    assert recorded.counts == Counts(calls=3, left_out={"raised": 3})
    assert files(tmp_path) == []


def test_every_and_limit_leave_calls_out(tmp_path: Path) -> None:
    """One call in three from the first on, four files, and each other call by its reason."""
    recorded = record(topk, op="ragged_topk", to=tmp_path, every=3, limit=4)
    run(recorded, times=20)
    assert recorded.counts == Counts(
        calls=20, written=4, bytes=size_of(tmp_path), left_out={"every": 13, "limit": 3}
    )
    numbers = [int(case.provenance["call"]) for case in store.load_cases(tmp_path)]
    assert numbers == [0, 3, 6, 9]


def test_the_bytes_of_all_files_stay_within_their_budget(tmp_path: Path) -> None:
    """The file that does not fit is not written, and takes nothing from one that does."""
    first = record(topk, op="ragged_topk", to=tmp_path / "first")
    run(first)
    most = 3 * first.counts.bytes + recorder._HEADER
    recorded = record(topk, op="ragged_topk", to=tmp_path / "all", max_bytes=most)
    run(recorded, times=9)
    counts = recorded.counts
    assert counts == Counts(
        calls=9,
        written=3,
        bytes=size_of(tmp_path / "all"),
        left_out={"max_bytes": 6},
    )
    assert 0 < counts.bytes <= most


def test_a_call_beyond_the_budget_is_never_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs too large are left alone before the call, outputs too large after it."""
    copies: list[tuple[int, ...]] = []
    copy = clones.on_host

    def spy(tensor: Tensor) -> Tensor:
        copies.append(tuple(tensor.shape))
        return copy(tensor)

    monkeypatch.setattr(clones, "on_host", spy)
    monkeypatch.setattr(recorder, "_ESCAPED", 0)
    inputs = sum(t.numel() * 4 for t in CASE.inputs.values())
    small = record(topk, op="ragged_topk", to=tmp_path, max_bytes=recorder._HEADER + inputs - 1)
    run(small)
    assert (copies, files(tmp_path)) == ([], [])
    assert small.counts == Counts(calls=1, left_out={"max_bytes": 1})
    larger = record(
        topk, op="ragged_topk", to=tmp_path, max_bytes=recorder._HEADER + inputs + 4 * 8 * 4 - 1
    )
    run(larger)
    assert (copies, files(tmp_path)) == ([(4, 32), (4,), (4,)], [])
    assert larger.counts == Counts(calls=1, left_out={"max_bytes": 1})


@pytest.mark.parametrize("case", [tiny.topk(), tiny.pages(), tiny.decode(), tiny.prefill()])
def test_no_file_is_larger_than_what_was_held_for_it(case: Case, tmp_path: Path) -> None:
    """Its header fits in what is reckoned for it, escapes and strides and all."""
    reading = Reading(op=case.op, arithmetic=case.arithmetic, contract="sgl_kernel.fast_topk_v2")
    wide = {
        n: torch.cat([t, t], -1)[..., : t.shape[-1]] for n, t in case.inputs.items() if t.dim() > 1
    }
    keep = Recorder(
        reading=reading, to=tmp_path, name="x", provenance={"callable": '\u00fc"\x1b' * 999}
    )
    path = keep.save({**case.inputs, **wide}, case.params, case.recorded)
    assert path is not None
    loaded = store.load(path)
    assert path.stat().st_size <= recorder._size(loaded)
    assert loaded.inputs["q" if "q" in wide else "scores"].stride()[-2] > 1


def test_a_full_disk_is_counted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails half-way takes its part with it, and the next one is tried again."""
    save = store.save

    def full(case: Case, path: Path) -> None:
        save(case, path)
        path.write_bytes(path.read_bytes()[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    recorded = record(topk, op="ragged_topk", to=tmp_path, limit=1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "save", full)
        assert torch.equal(run(recorded, times=2), PICKS)
    left = {"write: No space left on device": 2}
    assert (recorded.counts, files(tmp_path)) == (Counts(calls=2, left_out=left), [])
    run(recorded)
    assert recorded.counts == Counts(calls=3, written=1, bytes=size_of(tmp_path), left_out=left)


def test_only_the_first_reason_of_a_kind_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures whose sentences differ never make the counts grow."""
    errors = iter([RuntimeError("one\nmore"), OSError("two"), MemoryError()])

    def fail(case: Case, path: Path) -> None:
        del case, path
        raise next(errors)

    recorded = record(topk, op="ragged_topk", to=tmp_path)
    monkeypatch.setattr(store, "save", fail)
    run(recorded, times=3)
    assert recorded.counts == Counts(calls=3, left_out={"write: RuntimeError: one": 3})


def test_a_folder_that_cannot_be_made_is_counted(tmp_path: Path) -> None:
    """A file stands where the folder should be, or above it."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    recorded = record(topk, op="ragged_topk", to=blocked)
    run(recorded)
    assert recorded.counts == Counts(calls=1, left_out={"write: File exists": 1})
    nowhere = record(topk, op="ragged_topk", to=blocked / "under")
    run(nowhere)
    assert nowhere.counts == Counts(calls=1, left_out={"write: Not a directory": 1})


def test_an_interrupt_while_writing_passes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's Ctrl-C is not ours to keep; what was held for the call is free again."""

    def interrupted(case: Case, path: Path) -> None:
        path.write_bytes(b"half")
        del case
        raise KeyboardInterrupt

    recorded = record(topk, op="ragged_topk", to=tmp_path, limit=1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(recorded)
    assert (recorded.counts, files(tmp_path)) == (Counts(calls=1, left_out={"interrupted": 1}), [])
    run(recorded)
    assert recorded.counts.written == 1


def test_a_call_that_cannot_be_read_goes_on(tmp_path: Path) -> None:
    """A missing input, a wrong dtype and a raising reader are counted, never raised."""

    class Odd(Exception):  # noqa: N818 - it stands for anyone's
        def __str__(self) -> str:
            raise ValueError

    def raises(**_: object) -> Mapping[str, Any]:
        raise Odd

    def doubled(**inputs: Any) -> Tensor:  # noqa: ANN401 - any of them
        return topk(**{**inputs, "row_end": inputs["row_end"].int()})

    wrong = record(doubled, op="ragged_topk", to=tmp_path)
    wrong(**{**CASE.inputs, "row_end": CASE.inputs["row_end"].long()}, k=8)
    missing = record(topk, op="ragged_topk", to=tmp_path, names={"k": "width"})
    reader = record(topk, op="ragged_topk", to=tmp_path, read=raises)
    for fn in (missing, reader):
        assert torch.equal(run(fn), PICKS)
    sentence = "unreadable: cannot be read as ragged_topk: "
    assert [fn.counts.left_out for fn in (wrong, missing, reader)] == [
        {f"{sentence}inputs.row_end is int64; the op wants int32": 1},
        {f"{sentence}params.k is missing; the call has scores, row_start, row_end, k": 1},
        {f"{sentence}read raised Odd: no message": 1},
    ]
    assert files(tmp_path) == []


def test_a_reader_that_exits_ends_nothing(tmp_path: Path) -> None:
    """What `read` or `give` raises is counted, sys.exit too."""

    def leaves(*_args: object, **_kwargs: object) -> NoReturn:
        raise SystemExit(0)

    for reader in ("read", "give"):
        options: dict[str, Any] = {reader: leaves}
        recorded = record(topk, op="ragged_topk", to=tmp_path, **options)
        run(recorded)
        (reason,) = recorded.counts.left_out
        assert reason.endswith(f"{reader} raised SystemExit: 0")


def test_outputs_that_do_not_fit_the_inputs_are_unreadable(tmp_path: Path) -> None:
    """A result of too few rows is no run of this call."""

    def short(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
        return topk(scores, row_start, row_end, k)[:2]

    recorded = record(short, op="ragged_topk", to=tmp_path)
    assert run(recorded).shape == (2, 8)
    (reason,) = recorded.counts.left_out
    assert reason.startswith(
        "unreadable: cannot be read as ragged_topk: recorded.0.raw_indices has"
    )
    assert files(tmp_path) == []


def test_threads_share_budgets_and_never_a_file(tmp_path: Path) -> None:
    """Eight threads of five calls: thirty files, each whole, and every call counted once."""
    recorded = record(topk, op="ragged_topk", to=tmp_path, limit=30)
    gate = threading.Barrier(8)

    def work() -> None:
        gate.wait()
        run(recorded, times=5)

    threads = [threading.Thread(target=work) for _ in range(8)]
    was = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(was)
    assert recorded.counts == Counts(
        calls=40, written=30, bytes=size_of(tmp_path), left_out={"limit": 10}
    )
    cases = store.load_cases(tmp_path)
    assert all(judge.check(case).status is Status.EQUAL for case in cases)
    assert len({case.provenance["call"] for case in cases}) == 30


def test_threads_hold_bytes_for_calls_under_way(tmp_path: Path) -> None:
    """Calls that are all inside the callable at once do not share one file's room."""
    one = record(topk, op="ragged_topk", to=tmp_path / "one")
    run(one)
    gate = threading.Barrier(4)

    def waits(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
        gate.wait()
        return topk(scores, row_start, row_end, k)

    most = 2 * (one.counts.bytes + recorder._HEADER)
    recorded = record(waits, op="ragged_topk", to=tmp_path / "all", max_bytes=most)
    threads = [threading.Thread(target=run, args=(recorded,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorded.counts == Counts(
        calls=4, written=2, bytes=size_of(tmp_path / "all"), left_out={"max_bytes": 2}
    )


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("layer 3/../../etc", "layer_3_.._.._etc"),
        ("..", "ragged_topk"),
        ("\x00\n\u202e", "ragged_topk"),
        (".hidden", "hidden"),
        ("x" * 300, "x" * 80),
        ("", "ragged_topk"),
    ],
)
def test_no_name_steers_a_path(
    name: str, stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is called and whatever the rank says, the file lies in its folder."""
    monkeypatch.setenv("RANK", "../7")
    folder = tmp_path / "deep" / "er"
    recorded = record(topk, op="ragged_topk", to=folder, name=name)
    run(recorded)
    assert recorded.counts.written == 1
    pattern = rf"{re.escape(stem)}-7-{os.getpid()}-\d{{6}}\.safetensors"
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert path.parent == folder
    assert re.fullmatch(pattern, path.name)


def test_a_file_is_its_owners_alone_and_says_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode 0600; the callable, the call, the rank and torch, and no host or user."""
    modes: list[int] = []
    save = store.save

    def spy(case: Case, path: Path) -> None:
        save(case, path)
        modes.append(stat.S_IMODE(path.parent.stat().st_mode))

    monkeypatch.setattr(store, "save", spy)
    monkeypatch.setenv("RANK", "3")
    run(record(topk, op="ragged_topk", to=tmp_path))
    assert stat.S_IMODE(only(tmp_path).stat().st_mode) == 0o600
    assert modes == [0o700]
    assert store.load(only(tmp_path)).provenance == {
        "callable": f"{__name__}:topk",
        "call": "0",
        "rank": "3",
        "torch": str(torch.__version__),
    }


def test_a_file_that_is_there_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier process of the same id left files: ours take other numbers."""
    stem = f"topk-{os.getpid()}"
    monkeypatch.setattr(recorder, "_NUMBERS", iter(range(9)))
    for number in (0, 1, 3):
        (tmp_path / f"{stem}-{number:06d}.safetensors").write_text("theirs")
    run(record(topk, op="ragged_topk", to=tmp_path), times=2)
    theirs = [path.name for path in tmp_path.iterdir() if path.stat().st_size == 6]
    assert sorted(theirs) == [f"{stem}-{number:06d}.safetensors" for number in (0, 1, 3)]
    assert files(tmp_path) == [f"{stem}-{number:06d}.safetensors" for number in range(5)]


def test_strides_are_kept_where_a_file_can_hold_them(tmp_path: Path) -> None:
    """Rows of wider memory keep their stride; a thin slice of a wide pool is packed."""
    recorded = record(topk, op="ragged_topk", to=tmp_path)
    start, end = CASE.inputs["row_start"], CASE.inputs["row_end"]
    pool = torch.zeros(4, 1 << 18)
    for view in (torch.zeros(4, 40)[:, 3:35], pool[:, 9:41]):
        view.copy_(CASE.inputs["scores"])
        recorded(view, start, end)
    far = {**CASE.inputs, "scores": pool[:, 9:41]}
    recorded.recorder.save(far, CASE.params, [{"raw_indices": PICKS}])
    strides = [case.inputs["scores"].stride() for case in store.load_cases(tmp_path)]
    assert strides == [(40, 1), (32, 1), (32, 1)]
    assert [inputs_in(path) for path in sorted(tmp_path.iterdir())] == [WANT, WANT, WANT]


def test_a_copy_on_the_host_is_made_in_pieces_and_no_larger_than_a_file_may_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few rows at a time; memory between rows only where their stride is kept."""
    monkeypatch.setattr(clones, "_PIECE", 64)
    pool = torch.arange(7.0 * (1 << 18)).reshape(7, 1 << 18)
    copies = [
        clones.on_host(view) for view in (pool[:, :8], pool[:, :8].t(), pool[0, :8].expand(7, 8))
    ]
    assert [copy.tolist() for copy in copies] == [
        pool[:, :8].tolist(),
        pool[:, :8].t().tolist(),
        [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]] * 7,
    ]
    assert [copy.untyped_storage().nbytes() for copy in copies] == [7 * 8 * 4] * 3
    close = torch.arange(70.0).reshape(7, 10)[:, 1:9]
    copy = clones.on_host(close)
    assert (copy.stride(), copy.tolist()) == ((10, 1), close.tolist())


def test_no_rows_and_gradients_are_recorded_too(tmp_path: Path) -> None:
    """An empty call is a case, and so is one whose scores want a gradient."""
    recorded = record(topk, op="ragged_topk", to=tmp_path)
    none = torch.zeros(0, dtype=torch.int32)
    recorded(torch.zeros(0, 32), none, none)
    run(recorded)
    recorded(CASE.inputs["scores"].clone().requires_grad_(), ints(0, 0, 0, 0), ints(9, 9, 9, 9))
    assert recorded.counts == Counts(calls=3, written=3, bytes=size_of(tmp_path))


def test_nothing_is_read_while_a_graph_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for the device would break the capture: the call is left out."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    recorded = record(topk, op="ragged_topk", to=tmp_path)
    assert torch.equal(run(recorded), PICKS)
    assert recorded.counts == Counts(calls=1, left_out={"capturing": 1})


def test_what_is_compiled_calls_the_function_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a compiled function there is nothing to read yet."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    recorded = record(topk, op="ragged_topk", to=tmp_path)
    assert torch.equal(run(recorded), PICKS)
    assert recorded.counts == Counts()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"every": 0}, "every is 0; it is a whole number, 1 or more"),
        ({"limit": -1}, "limit is -1; it is a whole number, 0 or more"),
        ({"max_bytes": 1e9}, "max_bytes is 1000000000.0; it is a whole number, 0 or more"),
        ({"op": "topk"}, f"no op named 'topk': one of {', '.join(ops.OPS)}"),
        ({"inplace": {"out": "x"}}, "inplace has 'out'; ragged_topk has raw_indices"),
        ({"fn": 7}, "record wraps a callable, not int"),
    ],
)
def test_a_record_that_cannot_be_is_refused_at_once(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """What is wrong whatever is called is told where it is written."""
    fn = changes.pop("fn", topk)
    with pytest.raises(UsageError) as caught:
        record(fn, **{"op": "ragged_topk", "to": tmp_path, **changes})
    assert str(caught.value) == sentence


def test_a_call_that_is_there_is_saved_within_the_same_budget(tmp_path: Path) -> None:
    """A recorder writes what it is given, by the same names and counts."""
    keep = Recorder(
        reading=Reading(op="ragged_topk"), to=tmp_path, name="shadow", budget=Budget(limit=2)
    )
    run_, other = CASE.recorded[0], {"raw_indices": run(loses)}
    paths = [
        keep.save(CASE.inputs, CASE.params, [run_, other], layer="7"),
        keep.save(CASE.inputs, {}, [run_]),
        keep.save(CASE.inputs, CASE.params, [run_]),
        keep.save(CASE.inputs, CASE.params, [run_]),
    ]
    reason = "unreadable: cannot be read as ragged_topk: params.k is missing"
    assert keep.counts == Counts(
        calls=4, written=2, bytes=size_of(tmp_path), left_out={reason: 1, "limit": 1}
    )
    assert [path is None for path in paths] == [False, True, False, True]
    assert paths[0] is not None
    case = store.load(paths[0])
    assert case.provenance["layer"] == "7"
    assert [entry["raw_indices"].tolist() for entry in case.recorded] == [
        each["raw_indices"].tolist() for each in (run_, other)
    ]
    assert capture.Recorder is Recorder
