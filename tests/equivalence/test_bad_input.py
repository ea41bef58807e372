"""Bad input gets one line that names it, never a traceback, never EQUAL; the rest is judged."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bad_candidates
import pytest
import tiny
import torch
from tiny import ints

from equivalence import cli, judge, ops
from equivalence.candidate import Candidate
from equivalence.case import Case, Space
from equivalence.commands import common
from equivalence.planted.reference import right_outputs
from equivalence.verdict import Status

MESSAGES = Path(__file__).parents[1] / "messages"
Bad = Callable[[Path], object]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return code, printed.out, printed.err


def golden(name: str) -> dict[str, str]:
    """The lines `key | text` of a golden file."""
    lines = (MESSAGES / name).read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("| ") for line in lines)
    return {key.strip(): text for key, _, text in pairs}


def raw(content: bytes) -> Bad:
    """A file of these bytes."""
    return lambda path: path.write_bytes(content)


def cut(keep: Callable[[bytes], bytes]) -> Bad:
    """The good file, edited as bytes."""

    def make(path: Path) -> None:
        tiny.put(path.parent, tiny.topk("bad"))
        path.write_bytes(keep(path.read_bytes()))

    return make


def flipped(at: int) -> Bad:
    """The good file with one bit turned."""
    return cut(lambda b: b[:at] + bytes([b[at] ^ 4]) + b[at + 1 :] if at >= 0 else _last(b, at))


def _last(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 4
    return bytes(changed)


def resealed(
    edit: Callable[[dict[str, Any]], object], case: Callable[..., Case] = tiny.topk
) -> Bad:
    """The good file with its JSON edited by someone who also knows how to seal it."""

    def make(path: Path) -> None:
        tiny.put(path.parent, replace(case(), name="bad"))
        tiny.reseal(path, edit)

    return make


def _rename_key(head: dict[str, Any]) -> None:
    """One bad bit in the metadata's key."""
    metadata = head["__metadata__"]
    metadata["equivalencd"] = metadata.pop("equivalence")


def table(edit: Callable[[dict[str, Any], bytearray], object]) -> Bad:
    """The good file with its header edited."""

    def make(path: Path) -> None:
        tiny.put(path.parent, tiny.topk("bad"))
        head, data = tiny.header_of(path)
        content = bytearray(data)
        edit(head, content)
        tiny.write(path, head, bytes(content))

    return make


def param(name: str, value: object) -> Bad:
    """The good file with one parameter changed."""
    return resealed(lambda meta: meta["params"].update({name: value}))


def field(name: str, value: object) -> Bad:
    """The good file with one field of its JSON changed."""
    return resealed(lambda meta: meta.update({name: value}))


def layout(stride: list[int], offset: int = 0) -> Bad:
    """The good file whose scores are said to be strided."""
    return field("layout", {"inputs.scores": {"stride": stride, "offset": offset}})


def typed(name: str, **entry: object) -> Bad:
    """The good file with one entry of its header changed."""
    return table(lambda head, _: head[name].update(entry))


def extra(head: dict[str, Any], data: bytearray) -> None:
    """One tensor more."""
    at = len(data)
    data += b"\0" * 4
    head["inputs.more"] = {"dtype": "I32", "shape": [1], "data_offsets": [at, at + 4]}


def missing(head: dict[str, Any], data: bytearray) -> None:
    """The last tensor of the file is gone."""
    names = [name for name in head if name != "__metadata__"]
    last = max(names, key=lambda name: head[name]["data_offsets"][1])
    del data[head.pop(last)["data_offsets"][0] :]


def wrong(**entry: object) -> Bad:
    """The good file whose writer stored scores of another dtype or shape."""

    def make(path: Path) -> None:
        typed("inputs.scores", **entry)(path)
        tiny.reseal(path, lambda meta: meta)

    return make


def decoded() -> Case:
    """A decode case with picks of one launch."""
    picks = ints([0, 1, 2, 3], [0, 1, 2, 3])
    return replace(tiny.decode(), recorded=({"raw_indices": picks},))


DEEP = b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
FILES: dict[str, Bad] = {
    "empty file": raw(b""),
    "three bytes": raw(b"abc"),
    "foreign": raw(b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'}" + b" " * 64),
    "pickle": raw(b"\x80\x04\x95\x1a\0\0\0\0\0\0\0cos\nsystem\n(S'true'\ntR." + b" " * 32),
    "oversized header": raw((1 << 40).to_bytes(8, "little") + b"{}"),
    "header not there": raw((100).to_bytes(8, "little") + b"{}"),
    "header no JSON": raw((4).to_bytes(8, "little") + b"{]\x1b["),
    "header no UTF-8": raw((4).to_bytes(8, "little") + b'{"\xff}'),
    "header a list": lambda path: tiny.write(path, [], b""),
    "header deep": lambda path: tiny.write(path, DEEP, b""),
    "header NaN": lambda path: tiny.write(path, b'{"a":NaN}', b""),
    "header huge number": lambda path: tiny.write(path, b'{"a":' + b"9" * 5000 + b"}", b""),
    "header key twice": lambda path: tiny.write(path, b'{"a":{},"a":{}}', b""),
    "metadata no table": lambda path: tiny.write(path, {"__metadata__": {"a": 1}}, b""),
    "truncated": cut(lambda content: content[:-5]),
    "bytes after": cut(lambda content: content + b"more"),
    "flip in length": flipped(1),
    "flip in header": flipped(40),
    "flip in tensor": flipped(-9),
    "entry of shape": typed("inputs.scores", shape=[4, 31]),
    "entry negative": typed("inputs.scores", shape=[-4, -32]),
    "entry huge": typed("inputs.scores", shape=[1 << 70]),
    "entry a text": table(lambda head, _: head.update({"inputs.scores": "x"})),
    "entry dtype": typed("inputs.scores", dtype="F16", shape=[4, 64]),
    "entry unknown dtype": typed("inputs.scores", dtype="F4"),
    "entry overlap": typed("inputs.scores", data_offsets=[8, 520]),
    "extra tensor": table(extra),
    "missing tensor": table(missing),
    "hostile name": table(lambda head, _: head.update({"\x1b[31mred\n\u202e": "x"})),
    "no key": table(lambda head, _: _rename_key(head)),
    "JSON no JSON": table(lambda head, _: head["__metadata__"].update(equivalence="{")),
    "JSON a list": table(lambda head, _: head["__metadata__"].update(equivalence="[]")),
    "JSON deep": table(
        lambda head, _: head["__metadata__"].update(equivalence="[" * 99_999 + "]" * 99_999)
    ),
    "JSON Infinity": table(
        lambda head, _: head["__metadata__"].update(equivalence='{"schema": -Infinity}')
    ),
    "JSON changed": table(
        lambda head, _: head["__metadata__"].update(
            equivalence=head["__metadata__"]["equivalence"].replace('"k": 8', '"k": 9')
        )
    ),
    "JSON spaced": table(
        lambda head, _: head["__metadata__"].update(
            equivalence=" " + head["__metadata__"]["equivalence"]
        )
    ),
    "schema unknown": field("schema", 2),
    "schema true": field("schema", value=True),
    "field unknown": field("more\x1b[2J", 1),
    "field missing": resealed(lambda meta: meta.pop("layout")),
    "field type": field("recorded", {}),
    "op unknown": field("op", "topk\x07" + "x" * 5000),
    "k missing": field("params", {}),
    "k unknown": param("kk", 3),
    "k a text": param("k", "8"),
    "k true": param("k", True),
    "k zero": param("k", 0),
    "k huge": param("k", 10**30),
    "k half": param("k", 8.5),
    "k infinite": param("k", 1e999),
    "k a list": param("k", [8]),
    "page_size deep": resealed(lambda m: m["params"].update(page_size={"a": [[1]]}), tiny.pages),
    "page_size zero": resealed(lambda m: m["params"].update(page_size=0), tiny.decode),
    "page_size other": resealed(lambda m: m["params"].update(page_size=5), tiny.decode),
    "page_size of qsa": resealed(lambda m: m["params"].update(page_size=5), tiny.qsa),
    "columns unknown": resealed(lambda m: m["params"].update(columns="mine"), tiny.prefill),
    "arithmetic unknown": field("arithmetic", "by hand"),
    "arithmetic of other": resealed(
        lambda m: m.update(arithmetic="vllm_qsa_prefill.sm90"), decoded
    ),
    "wrong dtype": wrong(dtype="I32"),
    "wrong shape": wrong(shape=[8, 16]),
    "wrong dimensions": wrong(shape=[128]),
    "contract unknown": field("contract", "ties=maybe"),
    "contract key": field("contract", "tie=any"),
    "flag unknown": field("flags", ["exact-tie"]),
    "flag a number": field("flags", [1]),
    "space unknown": field("spaces", {"raw_indices": {"kind": "relative", "pad": -1}}),
    "space of nothing": field("spaces", {"picks": {"kind": "slot", "pad": -1}}),
    "space of slots": field("spaces", {"raw_indices": {"kind": "slot", "pad": -1}}),
    "pad huge": field("spaces", {"raw_indices": {"kind": "absolute", "pad": 1 << 40}}),
    "poison a word": field("provenance", {"poison.raw_indices": "seven"}),
    "poison NaN": field("provenance", {"poison.raw_indices": "nan"}),
    "provenance number": field("provenance", {"seed": 1}),
    "reference of nothing": field("reference", {"scores": "0"}),
    "chain unsorted": field("recorded", [["raw_indices", "raw_indices"]]),
    "chain too many": field("recorded", [["raw_indices"], ["raw_indices"]]),
    "chain too few": field("recorded", []),
    "layout overlap": layout([1, 1]),
    "layout far": layout([1 << 39, 1]),
    "layout offset": layout([64, 1], 1 << 30),
    "layout short": layout([1]),
    "layout negative": layout([-32, 1]),
    "layout of nothing": field("layout", {"inputs.x": {"stride": [1], "offset": 0}}),
    "folder": lambda path: path.mkdir(),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_undecided_in_one_line_and_the_others_are_judged(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is `invalid-record` and UNDECIDED, exit 3; its neighbour is judged; `lint` finds it."""
    folder = tmp_path / "cases"
    tiny.put(folder, tiny.topk("good"))
    path = folder / "bad.safetensors"
    FILES[name](path)

    code, out, err = run(capsys, "replay", folder, "--json", tmp_path / "out.json")
    told = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    status = {case["case"]: case["status"] for case in told["cases"]}
    bad = next(case for case in told["cases"] if case["case"] == "bad")
    sentences = [finding["reading"] for finding in bad["findings"]]
    assert (code, status, err) == (common.UNDECIDED, {"bad": "UNDECIDED", "good": "EQUAL"}, "")
    assert [finding["rule"] for finding in bad["findings"]] == ["invalid-record"]
    assert [s.replace(f"{path}: ", "") for s in sentences] == [golden("bad_files.txt")[name]]
    assert out.replace("\n", "").isprintable()

    code, out, err = run(capsys, "lint", folder)
    lines = out.splitlines()
    assert (code, err, len(lines)) == (common.DIFFERENT, "", 2)
    assert lines[0].startswith(f"{path}: ")
    assert lines[0].isprintable()


@pytest.mark.parametrize("name", FILES)
def test_show_says_what_is_wrong_and_exits_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`show` of a bad file is one line or the case's own words, never a traceback."""
    path = tmp_path / "bad.safetensors"
    FILES[name](path)
    code, out, err = run(capsys, "show", path)
    assert code == (common.EQUAL if name == "arithmetic of other" else common.USAGE)
    assert (out + err).replace("\n", "").isprintable()
    assert "internal error" not in err


ROWS: dict[str, tuple[Case, int]] = {
    "start negative": (tiny.swap(tiny.topk(), row_start=ints(0, -3, 10, 5)), 1),
    "end past": (tiny.swap(tiny.topk(), row_end=ints(33, 31, 14, 5)), 0),
    "backwards": (tiny.swap(tiny.topk(), row_end=ints(32, 31, 9, 5)), 2),
    "far": (tiny.swap(tiny.topk(), row_end=ints(32, 31, 14, 2**31 - 1)), 3),
    "no request": (tiny.swap(tiny.pages(), row_to_request=ints(0, 2, 1, 1)), 1),
    "request negative": (tiny.swap(tiny.pages(), row_to_request=ints(0, -1, 1, 1)), 1),
    "table short": (tiny.swap(tiny.pages(), page_table=ints([5, 3, 9, 7, 2, 4, 6], [1] * 7)), 0),
    "page negative": (
        tiny.swap(tiny.pages(), page_table=ints([5, 3, 9, 7, 2, 4, 6, -1], [11] * 8)),
        0,
    ),
    "page of the cache": (tiny.swap(tiny.decode(), block_table=ints([1, 2, 3], [4, 6, 0])), 1),
    "length negative": (tiny.swap(tiny.decode(), context_lens=ints([-1], [8])), 0),
    "length past": (tiny.swap(tiny.decode(), context_lens=ints([9], [13])), 1),
    "blocks negative": (tiny.swap(tiny.qsa(), visible_blocks=ints(3, -8, 0, 5)), 1),
    "page of qsa": (tiny.swap(tiny.qsa(), page_table=ints([1, 2], [3, 9])), 3),
    "slot negative": (
        tiny.swap(
            tiny.pages(),
            page_table=None,
            row_to_request=None,
            slot_map=ints(*range(31), -1),
        ),
        0,
    ),
    "width": (replace(tiny.prefill(), params={"topk": 4, "width": 10}), 0),
    "width of a window": (
        replace(tiny.prefill(), params={"topk": 4, "width": 10, "columns": "row-relative"}),
        0,
    ),
    "row class": (
        replace(tiny.topk(), row_class=torch.tensor([0, 9, 0, 0], dtype=torch.int8)),
        1,
    ),
    "pick past": (
        Case(
            op="translate_pages",
            inputs={"raw_indices": ints([0, 5], [1, 16]), "page_table": ints([1, 2], [3, 4])},
            params={"page_size": 4},
        ),
        1,
    ),
    "pick negative": (
        Case(
            op="translate_pages",
            inputs={"raw_indices": ints([0, -2], [1, 6]), "page_table": ints([1, 2], [3, 4])},
            params={"page_size": 4},
        ),
        0,
    ),
}


def correct(case: Case) -> Candidate:
    """A candidate that gives the outputs of the case's op on whatever it is called with."""
    names = set(case.inputs)
    return lambda **call: right_outputs(
        replace(
            case,
            recorded=(),
            inputs={name: tensor for name, tensor in call.items() if name in names},
            row_class=None,
        )
    )


@pytest.mark.parametrize("name", ROWS)
def test_a_broken_row_is_told_and_the_others_are_judged(name: str) -> None:
    """A row whose metadata cannot be is `invalid-record` by number; every other row is judged."""
    case, row = ROWS[name]
    verdict = judge.check(replace(case, recorded=()), correct(case))
    found = [(f.rule, f.row, f.reading) for f in verdict.findings]
    rows = ops.validate(case)["rows"]
    assert verdict.status is Status.UNDECIDED
    assert found == [("invalid-record", row, golden("bad_rows.txt")[name])]
    assert verdict.coverage.rows == rows - 1
    assert {stage.status for stage in verdict.stages.values()} == {Status.EQUAL}


@pytest.mark.parametrize("name", ROWS)
def test_lint_names_the_broken_row(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lint` prints the same sentence for a broken row as the judge."""
    case, row = ROWS[name]
    path = tiny.put(tmp_path, replace(case, recorded=(), name="bad"))
    code, out, _ = run(capsys, "lint", tmp_path)
    assert code == common.DIFFERENT
    assert out.splitlines()[0] == f"{path}: row {row}: {golden('bad_rows.txt')[name]}"


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (
            tiny.swap(tiny.qsa(), query_start_loc=ints(0, 3, 2)),
            "inputs.query_start_loc does not ascend from 0 to the 4 rows",
        ),
        (
            tiny.swap(tiny.qsa(), query_start_loc=None),
            "2 requests of a page table need inputs.query_start_loc",
        ),
        (
            tiny.swap(tiny.pages(), row_to_request=None),
            "a page table of 2 requests and 4 rows need row_to_request",
        ),
        (
            tiny.swap(tiny.topk(), row_end=ints(32, 28, 4, 0).to("meta")),
            "inputs.row_end is a torch.strided tensor on meta: it holds no plain values",
        ),
        (
            tiny.swap(tiny.topk(), scores=tiny.scores().to_sparse()),
            "inputs.scores is a torch.sparse_coo tensor on cpu: it holds no plain values",
        ),
    ],
)
def test_what_no_row_can_be_blamed_for_is_said_of_the_case(case: Case, sentence: str) -> None:
    """A table that fits no row is `invalid-record` of the whole case."""
    verdict = judge.check(case)
    assert verdict.status is Status.UNDECIDED
    assert [(f.rule, f.row, f.reading) for f in verdict.findings] == [
        ("invalid-record", None, sentence)
    ]


@pytest.mark.parametrize("key", golden("bad_candidates.txt"))
def test_a_bad_candidate_is_an_outcome(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a candidate raises or returns is in the verdict; it never ends the run."""
    exit_code, rules, reading = golden("bad_candidates.txt")[key].split(" | ")
    tiny.put(tmp_path, tiny.topk())
    code, out, _ = run(
        capsys, "replay", tmp_path, "--candidate", f"bad_candidates:{key}", "--json", "-"
    )
    case = json.loads(out)["cases"][0]
    findings = case["findings"]
    assert (code, " ".join(dict.fromkeys(f["rule"] for f in findings))) == (
        int(exit_code),
        rules.removeprefix("-"),
    )
    told = re.sub(r" \(bad_candidates\.py:\d+\)$", "", findings[0]["reading"] if findings else "")
    assert told == reading.removeprefix("-")
    assert case["status"] == {0: "EQUAL", 1: "DIFFERENT", 3: "UNDECIDED"}[code]


def test_a_candidate_that_reuses_its_buffer_is_judged_by_each_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the second call writes over the first one's result does not change its verdict."""
    tiny.put(tmp_path, tiny.topk())
    code, out, _ = run(
        capsys,
        *("replay", tmp_path, "--candidate", "bad_candidates:same_buffer"),
        *("--repeats", 2, "--json", "-"),
    )
    runs = json.loads(out)["cases"][0]["runs"]
    status = {each["run"]: each["stages"]["raw_indices"]["status"] for each in runs}
    assert (code, status) == (1, {"candidate": "EQUAL", "candidate, call 2": "DIFFERENT"})


@pytest.mark.parametrize(
    "case",
    [
        tiny.topk(
            inputs={
                "scores": torch.zeros(0, 32),
                "row_start": torch.zeros(0, dtype=torch.int32),
                "row_end": torch.zeros(0, dtype=torch.int32),
            },
            recorded=({"raw_indices": torch.zeros(0, 8, dtype=torch.int32)},),
        ),
        tiny.topk(
            inputs={"scores": torch.zeros(2, 0), "row_start": ints(0, 0), "row_end": ints(0, 0)},
            recorded=({"raw_indices": torch.full((2, 8), -1, dtype=torch.int32)},),
        ),
    ],
)
def test_a_case_without_a_cell_is_undecided(case: Case) -> None:
    """No rows, or no columns: nothing could be wrong, so nothing is shown."""
    assert judge.check(case).status is Status.UNDECIDED


def test_k_may_be_wider_than_the_row() -> None:
    """A k above L makes every row short."""
    case = replace(tiny.topk(recorded=()), params={"k": 40})
    verdict = judge.check(case, correct(case))
    assert verdict.stages["raw_indices"].counts["short"] == 3


def test_a_space_of_its_own_pad_is_judged() -> None:
    """Absolute columns with another pad are the same picks."""
    case = tiny.topk()
    raw_indices = case.recorded[0]["raw_indices"]
    moved = torch.where(raw_indices < 0, -9, raw_indices + case.inputs["row_start"][:, None]).int()
    moved_case = replace(
        case,
        recorded=({"raw_indices": moved},),
        spaces={"raw_indices": Space(kind="absolute", pad=-9)},
    )
    assert judge.check(moved_case).status is Status.EQUAL


def test_logits_of_another_width_judge_nothing() -> None:
    """Recorded logits that do not fit their stage are no scores for the picks beside them."""
    picks = ints(*[[0, 1, 2, 3]] * 3)
    logits = torch.zeros(3, 5)
    case = tiny.prefill(arithmetic=None, recorded=({"logits": logits, "raw_indices": picks},))
    verdict = judge.check(case)
    assert verdict.scores == "none"
    assert [(f.stage, f.rule) for f in verdict.findings] == [
        ("logits", "shape"),
        ("raw_indices", "not-compared"),
    ]


@pytest.mark.parametrize(
    ("baseline", "rule"),
    [
        (bad_candidates.exits, "crash"),
        (lambda **_: {"logits": torch.zeros(3, 5)}, "shape"),
        (lambda q, k, **_: {"logits": q.zero_().new_empty(3, len(k)).float()}, "wrote-outside"),
    ],
)
def test_a_bad_baseline_proves_nothing(baseline: Candidate, rule: str) -> None:
    """What a failing baseline leaves to compare with is not enough to be equal."""
    case = tiny.prefill(recorded=())
    verdict = judge.check(case, lambda **_: right_outputs(case), baseline=baseline)
    assert verdict.status is not Status.EQUAL
    assert (rule, "baseline", Status.UNDECIDED) in [
        (f.rule, f.run, f.status) for f in verdict.findings
    ]
