"""Failing rows of masks, packed rows and calls that cannot be cut: saved, chosen, shown again."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny import call_of

from equivalence import generate, ops, saved, store
from equivalence.case import held
from equivalence.judge import check
from refimpl import masks, pages, qsa, quant, ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from equivalence.case import Case
    from equivalence.verdict import Verdict
    from refimpl import forms

Call = Any
"""Inputs and params of an op by keyword."""
Tell = Any


def tail(form: forms.Form) -> Callable[..., dict[str, Tensor]]:
    """The last published row lacks a block, or has one that it should not."""

    def publish(**call: Call) -> dict[str, Tensor]:
        mask = masks.publish(**call, form=form)
        if mask.dtype is torch.int32:
            mask[-1, 0] = -1
            return {"block_ids": mask}
        mask.view(torch.uint8)[-1, : 8 if mask.dtype is torch.bool else 1] ^= mask.view(
            torch.uint8
        ).amax()
        return {"mask": mask}

    return publish


def every_row(**call: Call) -> dict[str, Tensor]:
    """All rows of a mask of which only a tail is declared; the last one is wrong."""
    mask = masks.publish(**{**call, "rows": None})
    mask[-1, :8] ^= True
    return {"mask": mask}


def twice(**call: Call) -> Tensor:
    """The last row picks its second column twice."""
    mask = call.pop("mask", None)
    picks = masks.masked_topk(mask=call.pop("block_ids") if mask is None else mask, **call)
    picks[-1, 0] = picks[-1, 1]
    return picks


def holed(**call: Call) -> dict[str, Tensor]:
    """The last row of a QSA layer lacks its first block."""
    given = qsa.qsa_indexer(**call)
    given["block_ids"][-1, 0] = -1
    return given


def applied(**call: Call) -> Tensor:
    """The last row is not applied."""
    out = masks.apply(**call)
    out[-1] = call["scores"][-1]
    return out


def doubled(**call: Call) -> dict[str, Tensor]:
    """The last scale is doubled."""
    given = quant.quantize_q(**call)
    given["scale"][-1] *= 2
    return given


CUT: dict[str, tuple[Case, Callable[..., Any], int]] = {
    "tail bool": (generate.publish_mask(3, tail=2), tail("bool"), 8),
    "tail packed": (generate.publish_mask(3, tail=2), tail("packed"), 8),
    "tail ids": (generate.publish_mask(3, tail=2), tail("ascending"), 8),
    "every row": (generate.publish_mask(3, tail=2), every_row, 8),
    "consumer": (generate.consumer(1), twice, 8),
    "consumer of ids": (generate.consumer(1, form="ascending"), twice, 8),
    "qsa_indexer": (generate.qsa_indexer(0), holed, 11),
    "apply_mask": (generate.apply_mask(1), applied, 8),
    "quantize_q": (generate.quantize_q(0), doubled, 8),
}


def facts(verdict: Verdict) -> dict[str, set[str]]:
    """The rules of every output."""
    return {name: set(stage.rules) for name, stage in verdict.stages.items()}


@pytest.mark.parametrize("name", CUT)
def test_the_failing_row_alone_fails_alike(name: str, tmp_path: Path) -> None:
    """Saved with what was recorded, or called again, or chosen by its number."""
    case, candidate, row = CUT[name]
    verdict = check(case, candidate)
    assert verdict.failing == [row]
    found = saved.save_failing(verdict, case, tmp_path)
    assert found is not None
    path, told = found
    again = check(store.load(path), candidate)
    assert (told.split(",")[0], again.failing, facts(again)) == (f"row {row}", [0], facts(verdict))
    given = candidate(**{n: t.clone() for n, t in case.inputs.items()}, **case.params)
    entry = given if isinstance(given, dict) else {ops.find(case.op).primary: given}
    recorded = replace(case, recorded=(entry,))
    kept = saved.save_failing(check(recorded), recorded, tmp_path / "recorded")
    assert kept is not None
    replayed = check(store.load(kept[0]))
    assert (replayed.failing, facts(replayed)) == ([0], facts(verdict))
    chosen = check(case, candidate, rows=[row])
    assert (chosen.failing, facts(chosen)) == ([row], facts(verdict))


def moved(**call: Call) -> Tensor:
    """Row 3 is that of row 4."""
    out = ranks.gather_rows(**call)
    out[3] = out[4]
    return out


def rescaled(*, rows: int, **call: Call) -> dict[str, Tensor]:
    """The scale of key 3 is doubled."""
    found = pages.gather_batch(**call)
    found["k_scale"][3 % rows] *= 2
    return found


def displaced(**call: Call) -> Tensor:
    """Page 3 is that of page 4."""
    out = pages.move_tokens(**call)
    out[3] = out[4]
    return out


@pytest.mark.parametrize(
    ("case", "candidate"),
    [
        (generate.gather_rows(0), moved),
        (generate.gather_keys(0), rescaled),
        (generate.move_tokens(0), displaced),
    ],
    ids=lambda each: getattr(each, "op", ""),
)
def test_a_call_that_cannot_be_cut_is_kept_whole(
    case: Case, candidate: Callable[..., Any], tmp_path: Path
) -> None:
    """The sentence says so, its rows keep their numbers, and what stands in a file stays there."""
    verdict = check(case, candidate)
    found = saved.save_failing(verdict, case, tmp_path, still=lambda _: False)
    assert verdict.failing == [3]
    assert found is not None
    path, told = found
    size = f"{round(path.stat().st_size / 1024)} KiB"
    assert told == f"all rows: {case.op} cannot be cut, {size}"
    again = check(store.load(path), candidate)
    assert (again.failing, facts(again)) == ([3], facts(verdict))
    assert saved.save_failing(again, held(store.load(path)), tmp_path / "more") is None


def test_a_row_with_two_owners_is_kept_whole(tmp_path: Path) -> None:
    """A fault of the call itself names no row, and its case is kept."""
    case = generate.gather_rows(0)
    ids = case.inputs["row_ids"].clone()
    ids[2, 0] = ids[0, 0]
    twice_owned = replace(case, inputs={**case.inputs, "row_ids": ids})
    right = ranks.gather_rows(**call_of(case))
    verdict = check(twice_owned, lambda **_: right)
    found = saved.save_failing(verdict, twice_owned, tmp_path)
    assert found is not None
    rules = {f.rule for f in check(store.load(found[0]), lambda **_: right).findings}
    assert rules == {"two-writers", "no-writer"}


def test_rows_of_a_tail_are_chosen_on_the_command_line(tmp_path: Path, tell: Tell) -> None:
    """Their numbers stay those of the call, and rows of a gather are refused with exit 2."""
    case = generate.publish_mask(3, tail=2)
    mask = masks.publish(**call_of(case))
    mask[-1, :8] ^= True
    path, gather = tmp_path / "tail.safetensors", tmp_path / "gather.safetensors"
    store.save(replace(case, recorded=({"mask": mask},)), path)
    store.save(generate.gather_rows(0), gather)
    code, out, _ = tell("replay", path, "--rows", "2,8")
    assert (code, "row 8   mask" in out) == (1, True)
    code, _, err = tell("replay", gather, "--candidate", "refimpl.ranks:gather_rows", "--rows", "1")
    assert (code, "gather_rows is judged whole: it takes no rows" in err) == (2, True)


_PUBLISHER = """
from refimpl import masks

def publish(**call):
    mask = masks.publish(**call, form="packed")
    mask[-1, 0] ^= 255
    return mask
"""


def test_the_command_under_a_failure_shows_it_again(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    """A test of a published tail saves its row, and the command that it prints fails alike."""
    pytester.makepyfile(publishers=_PUBLISHER)
    store.save(generate.publish_mask(3, tail=2), pytester.path / "tail.safetensors")
    option = "--equivalence-candidate=publishers:publish"
    result = pytester.runpytest_inprocess("-p", "no:benchmark", option)
    text = result.stdout.str()
    assert result.ret == 1
    assert "row 8   mask" in text
    (kept,) = (pytester.path / ".equivalence").glob("tail-*.safetensors")
    again = f"equivalence replay .equivalence/{kept.name} --candidate publishers:publish"
    assert f"  again     {again}" in text
    assert held(store.load(kept)).inputs["rows"].tolist() == [0]
    monkeypatch.syspath_prepend(pytester.path)
    code, out, _ = tell(*shlex.split(again)[1:])
    assert (code, "row 0   mask" in out) == (1, True)
