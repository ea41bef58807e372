"""Plain recordings become cases; what is none is refused in one line."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file
from tiny import ints
from torch import Tensor

from equivalence import judge, store
from equivalence.errors import InvalidCase, UsageError
from equivalence.importers import recorded_layer
from equivalence.planted.reference import right_outputs
from equivalence.verdict import Status

META = {"format": "recorded-layer/0", "topk": "4", "kind": "randn", "seed": "3", "other": "x"}


def recording(path: Path, tensors: dict[str, Tensor], **meta: str | None) -> Path:
    """A recording with these tensors; metadata of None is left out."""
    told = {name: text for name, text in {**META, **meta}.items() if text is not None}
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata=told)
    return path


def dense() -> dict[str, Tensor]:
    """A dense layer: its inputs, its logits, two runs and a fused one."""
    case = tiny.prefill()
    offset = ints(0, 5, 9)
    out = right_outputs(tiny.swap(case, topk_indices_offset=offset))
    return {
        **case.inputs,
        "topk_indices_offset": offset,
        "logits": out["logits"],
        "raw_indices.run0": out["raw_indices"],
        "raw_indices.run1": out["raw_indices"].clone(),
        "ragged_indices": out["ragged_indices"],
        "positions": ints(1),
    }


def test_a_dense_recording_is_three_launch_chains(tmp_path: Path) -> None:
    """Logits and the first run are one chain; what is not imported is said; it is judged equal."""
    path = recording(tmp_path / "dense.safetensors", dense())
    case = recorded_layer.read(path)
    assert (case.op, case.name, case.params) == ("prefill_indexer", "dense", {"topk": 4})
    assert [sorted(entry) for entry in case.recorded] == [
        ["logits", "raw_indices"],
        ["raw_indices"],
        ["ragged_indices"],
    ]
    assert case.provenance == {
        "kind": "randn",
        "seed": "3",
        "source": "dense.safetensors",
        "not imported": "positions",
    }
    assert case.flags == {
        "distinct-scores",
        "windows-not-from-zero",
        "empty-rows",
        "short-rows",
    }
    assert sorted(case.reference) == ["logits"]
    assert judge.check(case).status is Status.EQUAL
    assert judge.check(store.load(tiny.put(tmp_path / "out", case))).status is Status.EQUAL


def test_a_paged_recording_brings_its_pages(tmp_path: Path) -> None:
    """Page size and draft rows are told from the recording."""
    case = tiny.decode()
    out = right_outputs(case)
    tensors = {**case.inputs, "raw_indices.run0": out["raw_indices"]}
    path = recording(
        tmp_path / "paged.safetensors", tensors, page_size="4", kind=None, kernel_topk="fast_topk"
    )
    got = recorded_layer.read(path)
    assert (got.op, got.params) == ("decode_indexer", {"topk": 4, "page_size": 4})
    assert got.flags == {"dirty-past-length"}
    assert got.contract == "sgl_kernel.fast_topk_v2"


def test_drafts_are_flagged(tmp_path: Path) -> None:
    """Several rows a request hunt another fault."""
    case = tiny.decode()
    tensors = {
        **case.inputs,
        "q": case.inputs["q"].repeat_interleave(2, 1).contiguous(),
        "weights": case.inputs["weights"].repeat(2, 1),
        "context_lens": ints([8, 9], [3, 4]),
    }
    path = recording(tmp_path / "draft.safetensors", tensors, page_size="4")
    flags = recorded_layer.read(path).flags
    assert flags == {"distinct-scores", "dirty-past-length", "draft-rows", "short-rows"}


def test_scores_alone_are_a_selection(tmp_path: Path) -> None:
    """Logits without keys are the input of `ragged_topk`; qsa keeps its poison."""
    case = tiny.topk()
    tensors = {
        "logits": case.inputs["scores"],
        "row_start": case.inputs["row_start"],
        "row_end": case.inputs["row_end"],
        "raw_indices.run0": case.recorded[0]["raw_indices"],
    }
    clean = "x (clean_logits=True)"
    path = recording(
        tmp_path / "topk.safetensors",
        tensors,
        topk="8",
        kernel_topk="fast_topk",
        kernel_scoring=clean,
    )
    got = recorded_layer.read(path)
    assert (got.op, got.params) == ("ragged_topk", {"k": 8})
    assert got.contract == "sgl_kernel.fast_topk_v2,dead=-inf"
    path = recording(tmp_path / "qsa.safetensors", dict(tiny.qsa().inputs), poison="12345.0")
    got = recorded_layer.read(path, settings={"page_size": 4})
    assert (got.op, got.provenance["poison.logits"]) == ("qsa_logits", "12345.0")
    assert "dirty-past-length" in got.flags


def test_settings_change_params_and_words(tmp_path: Path) -> None:
    """`--set` reaches params, arithmetic, contract and flags."""
    path = recording(tmp_path / "dense.safetensors", dense())
    case = recorded_layer.read(
        path,
        op="prefill_indexer",
        settings={
            "topk": 3,
            "arithmetic": "exact",
            "contract": "order=any",
            "flags": "generated+slot-map",
        },
    )
    assert (case.params["topk"], case.arithmetic, case.contract) == (3, "exact", "order=any")
    assert case.flags >= {"generated", "slot-map"}


@pytest.mark.parametrize(
    ("change", "meta", "settings", "sentence"),
    [
        ({}, {"format": "other\x1b/1"}, {}, "format 'other\\x1b/1'; this importer reads"),
        ({}, {"format": None}, {}, "format 'none'; this importer reads"),
        ({}, {"topk": "many"}, {}, "metadata topk is 'many'; it is a whole number"),
        ({}, {"topk": "9" * 5000}, {}, "metadata topk is '999"),
        ({}, {"topk": "-4"}, {}, "params.topk is -4"),
        ({}, {"topk": None}, {}, "params.topk is missing"),
        ({}, {"poison": "grey"}, {}, "provenance.poison.logits is 'grey'; it is a number"),
        ({"row_start": ints([0, 2, 4])}, {}, {}, "inputs.row_start has shape [1, 3]"),
        ({"row_start": torch.zeros(3)}, {}, {}, "inputs.row_start is float32; the op wants int32"),
        ({"k": None, "k_scale": None, "logits": None}, {}, {}, "no op has these tensors: "),
        ({"logits": ints([1, 2, 3])}, {}, {}, "recorded.0.logits is int32; the op wants float32"),
        (
            {},
            {},
            {"arithmetic": "vllm_qsa_prefill.sm90"},
            "arithmetic is 'vllm_qsa_prefill.sm90', which computes no mqa logits",
        ),
        ({}, {}, {"arithmetic": 5}, "no arithmetic named '5'"),
        ({}, {}, {"contract": "x=1"}, "contract: a contract has no key 'x'"),
        ({}, {}, {"flags": "ties"}, "no flag named 'ties'"),
        (
            {"kv_cache": ints(4)},
            {},
            {},
            "k is no tensor of decode_indexer: q, kv_cache, weights",
        ),
    ],
)
def test_what_is_no_recording_is_refused(
    change: dict[str, Tensor | None],
    meta: dict[str, str | None],
    settings: dict[str, str | int],
    sentence: str,
    tmp_path: Path,
) -> None:
    """One line that names the file and the reason."""
    tensors = {name: t for name, t in {**dense(), **change}.items() if t is not None}
    path = recording(tmp_path / "bad.safetensors", tensors, **meta)
    with pytest.raises(InvalidCase) as caught:
        recorded_layer.read(path, settings=settings)
    assert str(caught.value).startswith(f"{path}: {sentence}")
    assert str(caught.value).isprintable()


def test_wrong_use_is_a_usage_error(tmp_path: Path) -> None:
    """An op or a setting that does not exist."""
    path = recording(tmp_path / "dense.safetensors", dense())
    with pytest.raises(UsageError, match="no op named 'x'"):
        recorded_layer.read(path, op="x")
    with pytest.raises(UsageError, match="--set x: prefill_indexer has topk, "):
        recorded_layer.read(path, settings={"x": 1})


def test_a_recording_without_rows_has_no_window_to_flag(tmp_path: Path) -> None:
    """Zero rows are imported as they are."""
    tensors = {
        "logits": tiny.scores()[:0],
        "row_start": ints(0)[:0],
        "row_end": ints(0)[:0],
    }
    path = recording(tmp_path / "none.safetensors", tensors, kind="?")
    assert recorded_layer.read(path).flags == frozenset()


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the library cannot open after all is one line."""
    path = recording(tmp_path / "dense.safetensors", dense())

    def gone(*_: object, **__: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(store, "safe_open", gone)
    with pytest.raises(InvalidCase, match="cannot be read: gone"):
        recorded_layer.read(path)


def test_every_run_of_an_output_is_a_chain(tmp_path: Path) -> None:
    """Runs may be numbered on, or not at all; the first raw_indices goes with the logits."""
    tensors = dense()
    tensors["raw_indices"] = tensors.pop("raw_indices.run0")
    tensors["raw_indices.run7"] = tensors["raw_indices"].flip(1)
    case = recorded_layer.read(recording(tmp_path / "runs.safetensors", tensors))
    assert [sorted(entry) for entry in case.recorded] == [
        ["logits", "raw_indices"],
        ["raw_indices"],
        ["raw_indices"],
        ["ragged_indices"],
    ]
    assert judge.check(case).status is Status.DIFFERENT


def test_a_misnamed_output_is_refused(tmp_path: Path) -> None:
    """It would go unjudged."""
    tensors = dense()
    tensors["page_indicies"] = tensors.pop("raw_indices.run1")
    with pytest.raises(InvalidCase, match="page_indicies is no tensor of prefill_indexer"):
        recorded_layer.read(recording(tmp_path / "typo.safetensors", tensors))


def test_what_index_buffers_held_is_told_by_the_user(tmp_path: Path) -> None:
    """`--set poison=-7` speaks of every index output."""
    path = recording(tmp_path / "dense.safetensors", dense())
    case = recorded_layer.read(path, settings={"poison": -7})
    poisons = {n: text for n, text in case.provenance.items() if n.startswith("poison.")}
    assert poisons == dict.fromkeys(
        ["poison.raw_indices", "poison.ragged_indices", "poison.page_indices"], "-7"
    )
