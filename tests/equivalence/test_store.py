"""Case <-> file: what is read is what was stored, to the bit, or it is refused."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from tiny import ints
from torch import Tensor

from equivalence import header, ops, poisons, store
from equivalence.case import Case, Space, held
from equivalence.errors import InvalidCase, UsageError
from refimpl.bits import as_int


def content(case: Case) -> dict[str, object]:
    """Everything of a case that compares, tensors as dtype, strides and bits."""

    def bits(tensors: dict[str, Tensor]) -> dict[str, object]:
        return {
            name: (t.dtype, t.stride(), as_int(t).tolist()) for name, t in sorted(tensors.items())
        }

    whole = held(case)
    return {
        "inputs": bits(dict(whole.inputs)),
        "recorded": [bits(dict(entry)) for entry in whole.recorded],
        "row_class": None if whole.row_class is None else whole.row_class.tolist(),
        **{
            name: getattr(case, name)
            for name in (
                *("op", "params", "arithmetic", "spaces", "contract"),
                *("flags", "provenance", "reference", "name"),
            )
        },
    }


def strided(values: Tensor) -> Tensor:
    """The values as columns 3 .. of wider memory."""
    wide = torch.zeros(values.shape[0], values.shape[1] + 5, dtype=values.dtype)
    wide[:, 3 : 3 + values.shape[1]] = values
    return wide[:, 3 : 3 + values.shape[1]]


CASES = {
    "fp32": tiny.topk(
        spaces={"raw_indices": Space(kind="row-relative", pad=-1)},
        contract="order=any",
        row_class=torch.tensor([0, 1, 2, 3], dtype=torch.int8),
        flags=frozenset({"short-rows", "empty-rows"}),
        provenance={"device": "Zürich \x1b\u00e9", "poison.raw_indices": "-7"},
        reference={"logits": "00"},
    ),
    "bf16": tiny.swap(tiny.topk(), scores=tiny.scores().bfloat16()),
    "fp16": tiny.swap(tiny.topk(), scores=tiny.scores().half()),
    "nan": tiny.swap(tiny.topk(), scores=torch.full((4, 32), -torch.nan)),
    "pages": tiny.pages(),
    "int64": tiny.swap(tiny.pages(), page_table=None, slot_map=torch.arange(32)),
    "fp8 and bytes": tiny.decode(),
    "dense": tiny.prefill(),
    "qsa": tiny.qsa(),
    "bf16 keys": tiny.swap(
        tiny.qsa(),
        q=torch.ones(4, 4, 32, dtype=torch.bfloat16),
        k_cache=torch.ones(6, 4, 1, 32, dtype=torch.bfloat16),
    ),
    "strided": tiny.swap(tiny.topk(), scores=strided(tiny.scores())),
    "transposed": tiny.swap(tiny.topk(), scores=tiny.scores().t().contiguous().t()),
    "no rows": tiny.topk(
        inputs={
            "scores": torch.zeros(0, 32),
            "row_start": torch.zeros(0, dtype=torch.int32),
            "row_end": torch.zeros(0, dtype=torch.int32),
        },
        recorded=(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_case_comes_back_as_it_was_stored(name: str, tmp_path: Path) -> None:
    """Every dtype, stride, space, class and word of a case survives its file."""
    case = replace(CASES[name], name="tiny")
    assert content(store.load(tiny.put(tmp_path, case))) == content(case)


def test_the_same_case_is_the_same_bytes(tmp_path: Path) -> None:
    """A file depends on nothing but its case."""
    paths = [tiny.put(tmp_path / str(i), tiny.pages()) for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_memory_between_strided_rows_is_poisoned(tmp_path: Path) -> None:
    """What a kernel reads past a row is no zero and no old score."""
    case = tiny.swap(tiny.topk(), scores=strided(tiny.scores()))
    loaded = store.load(tiny.put(tmp_path, case)).inputs["scores"]
    whole = loaded.as_strided((3 + 4 * 37 - 5,), (1,), 0)
    outside = torch.ones_like(whole, dtype=torch.bool)
    outside.as_strided((4, 32), (37, 1), 3).fill_(value=False)
    assert set(whole[outside].tolist()) == {torch.tensor(poisons.SCORE[0]).item()}


def test_cells_that_share_memory_are_stored_packed(tmp_path: Path) -> None:
    """An expanded tensor comes back with memory of its own."""
    case = tiny.swap(tiny.topk(recorded=()), scores=tiny.scores(rows=1).expand(4, 32))
    loaded = store.load(tiny.put(tmp_path, case)).inputs["scores"]
    assert loaded.stride() == (32, 1)
    assert torch.equal(loaded, case.inputs["scores"])


def test_tensors_are_read_only_when_asked_for(tmp_path: Path) -> None:
    """Loading reads a header; a missing name is a KeyError, and the names need no tensor."""
    path = tiny.put(tmp_path, tiny.topk())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "safe_open", None)
        case = store.load(path)
        assert ops.validate(case)["rows"] == 4
    path.unlink()
    assert (sorted(case.inputs), len(case.inputs)) == (["row_end", "row_start", "scores"], 3)
    with pytest.raises(KeyError):
        case.inputs["k"]
    with pytest.raises(InvalidCase, match=r"inputs.scores cannot be read"):
        case.inputs["scores"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file with strides, spaces, flags and escapes, and its bytes."""
    case = tiny.swap(CASES["fp32"], scores=strided(tiny.scores()))
    path = tiny.put(tmp_path_factory.mktemp("small"), replace(case, name="small"))
    return path, path.read_bytes()


def read_all(path: Path) -> None:
    """Everything a run reads of a file."""
    held(store.load(path))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_single_bit_can_turn_unseen(small: tuple[Path, bytes], data: st.DataObject) -> None:
    """Any bit of a case file that turns, in its length, header, JSON or tensors, is told."""
    path, whole = small
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    path.with_name("flipped.safetensors").write_bytes(changed)
    with pytest.raises(InvalidCase):
        read_all(path.with_name("flipped.safetensors"))


def test_no_bit_of_the_header_can_turn_unseen(small: tuple[Path, bytes]) -> None:
    """One bit of each byte of length and header, a different one from byte to byte."""
    path, whole = small
    flipped = path.with_name("flipped.safetensors")
    for at in range(header.read(path).data):
        changed = bytearray(whole)
        changed[at] ^= 1 << (5 if at % 2 else at % 8)
        flipped.write_bytes(changed)
        with pytest.raises(InvalidCase):
            read_all(flipped)


@pytest.mark.parametrize("fiftieth", range(50))
def test_a_file_cut_anywhere_is_told(fiftieth: int, small: tuple[Path, bytes]) -> None:
    """Every fiftieth of a file is truncated, and says so."""
    path, whole = small
    cut = path.with_name("cut.safetensors")
    cut.write_bytes(whole[: len(whole) * fiftieth // 50])
    with pytest.raises(InvalidCase, match=r"too few|truncated"):
        read_all(cut)


def test_saving_leaves_no_part_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves the old file as it was, and nothing else."""
    path = tiny.put(tmp_path, tiny.topk())
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(store, "save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        tiny.put(tmp_path, tiny.topk(flags=frozenset({"short-rows"})))
    assert (list(tmp_path.iterdir()), path.read_bytes()) == ([path], before)


def test_a_file_is_as_readable_as_others(tmp_path: Path) -> None:
    """The mode of a case file is that of any new file."""
    (tmp_path / "other").touch()
    path = tiny.put(tmp_path, tiny.topk())
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (tiny.topk(flags=frozenset({"x"})), "no flag named 'x'"),
        (tiny.topk(params={"k": 0}), r"params\.k is 0"),
        (tiny.topk(provenance={"seed": 3}), r"provenance holds a value of the wrong type"),
        (tiny.swap(tiny.topk(), scores=torch.zeros(4, 32, dtype=torch.float64)), "float64"),
        (tiny.topk(row_class=ints(0, 0, 0, 0)), "row_class is torch.int32"),
        (tiny.topk(provenance={"note": "x"}, reference={"logits": 3}), "reference holds a value"),
    ],
)
def test_a_case_that_could_not_be_read_is_not_written(
    case: Case, message: str, tmp_path: Path
) -> None:
    """`save` refuses what `load` would."""
    with pytest.raises(InvalidCase, match=message):
        tiny.put(tmp_path, case)
    assert list(tmp_path.iterdir()) == []


def test_find_goes_through_folders_in_order_and_names_a_file_once(tmp_path: Path) -> None:
    """Files of folders are sorted; a file given twice is found once; links to folders are left."""
    a = tiny.put(tmp_path / "x", tiny.topk("a"))
    b = tiny.put(tmp_path / "x" / "deep", tiny.topk("b"))
    (tmp_path / "x" / "loop").symlink_to(tmp_path / "x")
    (tmp_path / "x" / "notes.txt").touch()
    assert store.find([b, tmp_path / "x", a]) == [b, a]


def test_what_cannot_be_searched_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is not there, one too long, and a folder that is closed are usage errors."""
    with pytest.raises(UsageError, match="nowhere does not exist"):
        store.find([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="File name too long"):
        store.find([tmp_path / ("x" * 5000)])

    def closed(folder: Path, onerror: object) -> list[object]:
        assert callable(onerror)
        onerror(PermissionError(13, "Permission denied", str(folder)))
        return []

    monkeypatch.setattr(os, "walk", closed)
    with pytest.raises(UsageError, match=r"cannot be searched: Permission denied"):
        store.find([tmp_path])


def test_load_cases_passes_over_what_is_no_case(tmp_path: Path) -> None:
    """In a folder, files of others are left alone; a name in a call must be a case."""
    tiny.put(tmp_path, tiny.topk("a"))
    tiny.put(tmp_path, tiny.pages(name="b"))
    foreign = tmp_path / "c.safetensors"
    tiny.write(foreign, {}, b"")
    assert [case.name for case in store.load_cases(tmp_path)] == ["a", "b"]
    assert [case.name for case in store.load_cases(str(tmp_path), op="topk_pages")] == ["b"]
    with pytest.raises(InvalidCase, match="no key"):
        store.load_cases(foreign)
    with pytest.raises(InvalidCase, match="no case of op qsa_logits in"):
        store.load_cases(tmp_path, op="qsa_logits")
    with pytest.raises(InvalidCase, match="no case in no path"):
        store.load_cases()
    with pytest.raises(UsageError, match="no op named 'x'"):
        store.load_cases(tmp_path, op="x")


def test_a_dtype_that_no_case_holds_is_named(tmp_path: Path) -> None:
    """A sealed file with fp64 scores is refused by name."""
    path = tiny.put(tmp_path, tiny.topk())
    head, data = tiny.header_of(path)
    head["inputs.scores"] |= {"dtype": "F64", "shape": [4, 16]}
    tiny.write(path, head, data)
    tiny.reseal(path, lambda meta: meta)
    with pytest.raises(InvalidCase, match=r"inputs\.scores is F64; a case holds BF16, BOOL"):
        store.load(path)


def test_a_tensor_outside_the_names_of_a_case_is_refused(tmp_path: Path) -> None:
    """A sealed file with a tensor under no prefix is no case of this version."""
    path = tiny.put(tmp_path, tiny.topk())
    head, data = tiny.header_of(path)
    head["other"] = {"dtype": "U8", "shape": [0], "data_offsets": [len(data), len(data)]}
    tiny.write(path, head, data)
    tiny.reseal(path, lambda meta: meta["digests"].update(other="0"))
    with pytest.raises(InvalidCase, match="other is no tensor of a case"):
        store.load(path)
