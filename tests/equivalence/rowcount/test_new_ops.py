"""Row-count invariance of masks, packed rows, merges and quantisers: honest ones and faults."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from equivalence import generate, store
from equivalence.drawn.masks import source
from equivalence.errors import UsageError
from equivalence.invariance import check_row_count, in_short
from equivalence.planted.reference import right_outputs
from equivalence.report import as_text
from equivalence.rowcount import trials
from equivalence.verdict import Status
from refimpl import masks, qsa, quant, ranks, topk
from refimpl.forms import FAR_PAD

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from equivalence.candidate import Candidate
    from equivalence.case import Case
    from equivalence.verdict import Finding, Verdict
    from refimpl import forms

FORMS: tuple[forms.Form, ...] = ("bool", "packed", "unordered", "ascending")
CHUNKS = (1, 2, 4)
EVERY = ("tail packed", "tail unordered", "apply", "merge_topk", "quantize_k", "stride")
"""What is called by every schedule; the rest in chunks."""
Call = Any
"""Inputs and params of an op by keyword."""


def named(mask: Tensor) -> dict[str, Tensor]:
    """A mask under the name of its form."""
    return {"block_ids" if mask.dtype is torch.int32 else "mask": mask}


def publishing(form: forms.Form, **rules: Any) -> Candidate:  # noqa: ANN401 - settings
    """The reference as a candidate of publish_mask."""
    return lambda **call: named(masks.publish(**{**call, **rules}, form=form))


def under(function: Callable[..., Tensor]) -> Candidate:
    """A candidate that takes its mask in either form."""

    def candidate(**call: Call) -> Tensor:
        mask = call.pop("mask", None)
        return function(mask=call.pop("block_ids") if mask is None else mask, **call)

    return candidate


RIGHT: dict[str, tuple[Case, Candidate]] = {
    **{f"tail {form}": (generate.publish_mask(3, tail=2), publishing(form)) for form in FORMS},
    "bool": (generate.publish_mask(3), publishing("bool")),
    "ascending": (generate.publish_mask(3), publishing("ascending")),
    "consumer": (generate.consumer(1), under(masks.masked_topk)),
    "consumer of ids": (generate.consumer(1, form="unordered"), under(masks.masked_topk)),
    "apply": (generate.apply_mask(1, form="packed"), under(masks.apply)),
    "qsa_indexer": (generate.qsa_indexer(0), qsa.qsa_indexer),
    "expand_blocks": (generate.expand_blocks(0), qsa.expand_blocks),
    "merge_topk": (generate.merge_topk(0), ranks.merge_topk),
    "quantize_q": (generate.quantize_q(0), quant.quantize_q),
    "quantize_k": (generate.quantize_k(0), quant.quantize_k),
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_honest_kernel_is_equal(name: str) -> None:
    """Parts are narrower, of one dimension or of three, and in any order."""
    case, candidate = RIGHT[name]
    verdict = check_row_count(case, candidate, rows=None if name in EVERY else CHUNKS)
    assert (verdict.status, verdict.findings) == (Status.EQUAL, ())
    short = in_short(verdict).runs[1]
    assert all(stage.counts["different"] == 0 for stage in short.stages.values())
    assert "EQUAL" in as_text.case_lines(in_short(verdict))


@pytest.mark.parametrize("form", FORMS)
def test_a_publisher_may_give_every_row_in_some_calls(form: forms.Form) -> None:
    """Only declared rows are compared, whether a call gives them alone or among all."""

    def every(**call: Call) -> object:
        full = len(call["row_start"]) % 2
        return publishing(form)(**{**call, "rows": None if full else call["rows"]})

    case = generate.publish_mask(3, tail=2)
    verdict = check_row_count(case, every, rows=CHUNKS)
    assert (verdict.status, verdict.findings) == (Status.EQUAL, ())
    (stage,) = verdict.runs[1].stages.values()
    assert stage.counts["rows"] == 4


def variance(verdict: Verdict) -> Finding:
    """The first finding about schedules."""
    return next(found for found in verdict.findings if found.rule == "row-variance")


def halved(form: forms.Form) -> Candidate:
    """Half the blocks from four rows on."""

    def publish(**call: Call) -> dict[str, Tensor]:
        mask = masks.publish(**call, form=form)
        if len(call["row_start"]) > 3:
            few = masks.publish(**{**call, "topk_blocks": call["topk_blocks"] // 2}, form=form)
            pads = mask[:, few.shape[1] :] * 0 + FAR_PAD
            mask = torch.cat([few, pads], 1) if few.dtype is torch.int32 else few
        return named(mask)

    return publish


def newest_of_the_longest(**call: Call) -> Tensor:
    """Every row that selects admits the newest block of the call's longest row beside its own."""
    out = masks.publish(**call)
    size = call["row_end"] - call["row_start"]
    block = (int(size.max()) - 1) // 8
    longer = (size > 8 * call["topk_blocks"]) & (size > 8 * block)
    shorter = (size > 8 * call["topk_blocks"]) & ~longer
    out[shorter, 0:8] = longer.any()
    return out


def five_rows_of_qsa(**call: Call) -> dict[str, Tensor]:
    """Rows from the sixth on lose their first block."""
    given = qsa.qsa_indexer(**call)
    some = torch.arange(len(given["packed"])) >= 5
    given["block_ids"][some, 0] = -1
    given["packed"][some, :4] = -1
    return given


def one_amax(*, x: Tensor, style: str) -> dict[str, Tensor]:
    """The scale is taken over all rows of the call."""
    scale = quant.quantize_k(x=x.abs().amax().expand_as(x).contiguous(), style=style)["scale"]
    return {"values": quant.to_e4m3(x.float() / scale[:, None]), "scale": scale}


def one_amax_of_heads(**call: Call) -> dict[str, Tensor]:
    """The weights carry the scale of the call's first row from the third row on."""
    given = quant.quantize_q(**call)
    if len(given["scale"]) > 2:
        given["weights"] = given["weights"] / given["scale"] * given["scale"][:1]
    return given


def mask_of_the_row_before(**call: Call) -> Tensor:
    """From the third row on a row has the mask of the row before it."""
    mask = call.pop("mask").clone()
    mask[2:] = mask.clone()[1:-1]
    return masks.apply(mask=mask, **call)


def packed_mask_rows(**call: Call) -> Tensor:
    """The stride of a mask's row is taken to be its width."""
    mask = call.pop("mask")
    packed = mask.as_strided(mask.shape, (mask.shape[1], 1), mask.storage_offset())
    return masks.apply(mask=packed, **call)


def best_of_rank_0(**call: Call) -> Tensor:
    """From three rows on only the first rank is read."""
    if len(call["context_lens"]) > 2:
        call["scores"] = call["scores"].clone()
        call["scores"][1:] -= 9
    return ranks.merge_topk(**call)


def count_of_the_last(**call: Call) -> Tensor:
    """Every row has the count of the call's last one."""
    out = qsa.expand_blocks(**call)
    out[:, -1] = out[-1, -1]
    return out


FAULTS: dict[str, tuple[Case, Candidate, str, str]] = {
    **{
        form: (
            generate.publish_mask(3, tail=tail),
            halved(form),
            "mask" if form in ("bool", "packed") else "block_ids",
            "row 0 is right in calls of up to 3 rows and wrong in one of 4",
        )
        for form, tail in zip(FORMS, (None, 2, 2, None), strict=True)
    },
    "newest": (
        generate.publish_mask(3),
        newest_of_the_longest,
        "mask",
        "row 0 alone is right; before row 2 it is wrong",
    ),
    "qsa_indexer": (
        generate.qsa_indexer(0),
        five_rows_of_qsa,
        "block_ids",
        "row 5 is right in calls of up to 5 rows and wrong in one of 6",
    ),
    "quantize_k": (
        generate.quantize_k(0),
        one_amax,
        "values",
        "row 0 alone is right; before row 3 it is wrong",
    ),
    "quantize_q": (
        generate.quantize_q(0),
        one_amax_of_heads,
        "weights",
        "row 1 alone is right; among rows 0 2 it is wrong",
    ),
    "apply_mask": (
        generate.apply_mask(1),
        mask_of_the_row_before,
        "scores",
        "row 2 alone is right; after rows 0-1 it is wrong",
    ),
    "stride": (
        generate.apply_mask(1),
        packed_mask_rows,
        "scores",
        "is right where rows are packed and wrong where they lie 64 columns further apart",
    ),
    "merge_topk": (
        generate.merge_topk(0, tie_rich=False),
        best_of_rank_0,
        "raw_indices",
        "row 0 is right in calls of up to 2 rows and wrong in one of 3",
    ),
    "expand_blocks": (
        generate.expand_blocks(0),
        count_of_the_last,
        "packed",
        "row 6 alone is right; before row 7 it is wrong",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_row_that_depends_on_the_call_is_told(name: str) -> None:
    """It is row-variance, with the smallest call that shows it."""
    case, candidate, stage, reading = FAULTS[name]
    verdict = check_row_count(case, candidate, rows=None if name in EVERY else CHUNKS)
    found = next(
        f for f in verdict.findings if (f.stage, f.rule) == (stage, "row-variance") and f.reading
    )
    assert verdict.status is Status.DIFFERENT
    assert reading in found.reading
    assert [line.label for line in found.evidence].count("call") == 1


@pytest.mark.parametrize("form", FORMS)
def test_another_tie_set_in_a_chunk_is_treated_as_picks_are(form: forms.Form) -> None:
    """It is tied where the contract leaves ties free, and else row-variance."""

    def publish(**call: Call) -> object:
        small = len(call["row_start"]) < 9
        return publishing(form, ties="highest" if small else "lowest")(**call)

    case = generate.publish_mask(3)
    free = check_row_count(case, publish, contract="ties=any", rows=CHUNKS)
    (stage,) = in_short(free).runs[1].stages.values()
    assert (free.status, stage.counts["different"]) == (Status.EQUAL, 0)
    assert stage.counts["tied"] > 0
    strict = check_row_count(case, publish, rows=CHUNKS)
    assert (strict.status, strict.runs[0].findings) == (Status.DIFFERENT, ())
    assert variance(strict).place.endswith("wrong-tie")


def test_a_byte_that_is_no_bool_is_seen_in_a_chunk() -> None:
    """True as 255 is other bits than True as 1."""

    def publish(**call: Call) -> Tensor:
        mask = masks.publish(**call)
        return mask if len(mask) == 9 else (mask.view(torch.uint8) * 255).view(torch.bool)

    found = variance(check_row_count(generate.publish_mask(3), publish, rows=[2]))
    assert (found.stage, found.row, "bits" in found.place) == ("mask", 8, True)


def test_a_row_that_a_chunk_leaves_unwritten_is_told() -> None:
    """The last row of a smaller call keeps the poison of its buffer."""

    def publish(**call: Call) -> Tensor:
        right = masks.publish(**call)
        out = torch.empty_like(right)
        written = len(right) - (len(right) < 9)
        out[:written] = right[:written]
        return out

    found = variance(check_row_count(generate.publish_mask(3), publish, rows=[2]))
    assert "unwritten" in found.place


def layer(tail: int | None) -> Case:
    """A dense source layer of nine rows."""
    case = generate.prefill_indexer(0, topk=4, columns=96, heads=16, head_dim=32)
    return source(case, topk_blocks=2, tail=tail)


def laid(case: Case) -> Candidate:
    """The reference of a source layer."""

    def candidate(**call: Call) -> dict[str, Tensor]:
        part = replace(case, inputs={name: call[name] for name in case.inputs})
        given = right_outputs(part)
        end = call.get("row_end", call.get("context_lens"))
        assert end is not None
        start = call.get("row_start", torch.zeros_like(end))
        mask = masks.publish(
            scores=given["logits"],
            row_start=start.flatten(),
            row_end=end.flatten(),
            topk_blocks=2,
            rows=call.get("rows"),
        )
        return {**given, "mask": mask}

    return candidate


@pytest.mark.parametrize("tail", [None, 2])
def test_a_source_layer_is_compared_in_every_output(tail: int | None) -> None:
    """Logits, picks, slots and the mask of the published rows."""
    case = layer(tail)
    verdict = check_row_count(case, laid(case), contract="reserved_pages=0", rows=(1, 4))
    assert (verdict.status, verdict.findings) == (Status.EQUAL, ())
    counts = {n: s.counts.get("rows") for n, s in verdict.runs[1].stages.items()}
    assert (counts["mask"], counts["raw_indices"]) == (len(case.inputs.get("rows", range(9))), 9)


def test_decode_rows_of_a_source_layer_come_by_requests() -> None:
    """Of two rows of a request one may be published; the fault of a third request is told."""
    base = generate.decode_indexer(0, topk=4, heads=16, head_dim=32, page_size=16)
    listed = torch.tensor([1, 4, 5], dtype=torch.int32)
    case = source(base, topk_blocks=2)
    case = replace(case, inputs={**case.inputs, "rows": listed})
    right: Callable[..., dict[str, Tensor]] = laid(case)
    assert check_row_count(case, right, rows=CHUNKS).status is Status.EQUAL

    def wrong(**call: Call) -> dict[str, Tensor]:
        given = right(**call)
        if len(call["context_lens"]) > 2:
            given["mask"][:1] ^= True
        return given

    found = variance(check_row_count(case, wrong, rows=CHUNKS))
    assert (found.stage, found.row) == ("mask", 1)
    assert found.reading == "row 1 alone is right; before rows 2-5 it is wrong"


def test_masks_that_nothing_judges_are_compared_with_the_row_alone() -> None:
    """Without a bit model a strict contract leaves a mask no choice, and the columns are shown."""
    case = replace(layer(None), arithmetic=None)
    right = laid(replace(case, arithmetic="deep_gemm.sm90"))

    def wrong(**call: Call) -> dict[str, Tensor]:
        mask = right(**call)["mask"]
        if len(mask) < 9:
            mask[:, 0] ^= True
        return {"mask": mask}

    verdict = check_row_count(case, wrong, rows=[4])
    found = variance(verdict)
    assert (verdict.status, found.stage, found.row) == (Status.DIFFERENT, "mask", 8)
    assert [(line.label, line.place) for line in found.evidence[:2]] == [
        ("want", "column 0"),
        ("got", "column 0"),
    ]
    loose = check_row_count(case, wrong, rows=[4], contract="ties=any")
    assert "no scores say whether legally" in "".join(f.reading for f in loose.findings)


def test_a_layer_within_its_bound_may_still_not_vary() -> None:
    """Logits that are legal in both calls are other bits, and picks are judged by the bound."""
    case = replace(layer(None), params={"topk": 4, "page_size": 4})

    def shaky(**call: Call) -> dict[str, Tensor]:
        part = replace(case, inputs={name: call[name] for name in case.inputs})
        given = right_outputs(part)
        if len(call["q"]) < 9:
            given["logits"] = torch.nextafter(given["logits"], torch.tensor(torch.inf))
        return given

    free = "scores=bound,reserved_pages=0"
    verdict = check_row_count(case, shaky, contract=free, rows=[4])
    assert verdict.runs[0].findings == ()
    found = variance(verdict)
    assert (found.stage, found.row) == ("logits", 8)
    assert found.reading == "row 8 is changed in a call of 1 row and unchanged in one of 9"


def test_picks_within_the_bound_may_vary() -> None:
    """A chunk that rounds otherwise picks other columns of equal scores: open, and not by bits."""
    case = replace(layer(None), params={"topk": 4, "page_size": 4})

    def picks(**call: Call) -> Tensor:
        part = replace(case, inputs={name: call[name] for name in case.inputs})
        scores = right_outputs(part)["logits"]
        if len(call["q"]) < 9:
            scores[:, 1::2] = torch.nextafter(scores[:, 1::2], torch.tensor(torch.inf))
        return topk.ragged_topk(
            scores=scores, row_start=call["row_start"], row_end=call["row_end"], k=4
        )

    free = check_row_count(case, picks, contract="scores=bound,order=any", rows=[4])
    assert (free.status, free.findings) == (Status.EQUAL, ())
    assert free.runs[1].stages["raw_indices"].counts["tied"] > 0
    assert check_row_count(case, picks, contract="order=any", rows=[4]).status is Status.DIFFERENT


@pytest.mark.parametrize(
    "case", [generate.gather_rows(0), generate.gather_keys(0), generate.move_tokens(0)]
)
def test_what_cannot_be_cut_is_refused(
    case: Case, tmp_path: Path, tell: Callable[..., tuple[int, str, str]]
) -> None:
    """One sentence, and exit 2 on the command line."""
    sentence = f"{case.op} cannot be cut into calls of fewer rows: it has no invariance to check"
    with pytest.raises(UsageError) as caught:
        check_row_count(case, ranks.gather_rows)
    assert str(caught.value) == sentence
    path = tmp_path / "case.safetensors"
    store.save(case, path)
    code, _, err = tell("invariance", path, "--candidate", "refimpl.ranks:gather_rows")
    assert (code, sentence in err) == (2, True)


def test_a_mask_that_cannot_be_read_is_an_invalid_record() -> None:
    """Nothing is called with it."""
    case = generate.consumer(1)
    narrow = replace(case, inputs={**case.inputs, "mask": case.inputs["mask"][:, :100]})
    called: list[int] = []
    verdict = check_row_count(narrow, lambda **_: called.append(1))
    assert [(f.rule, f.reading) for f in verdict.findings] == [
        ("invalid-record", "inputs: mask has 100 columns: row 0 sees 153")
    ]
    assert called == []


def test_freedoms_of_masks_are_refused_where_none_is_published() -> None:
    """As `check` refuses them."""
    with pytest.raises(UsageError, match="ties=all speaks of masks"):
        check_row_count(generate.ragged_topk(0), ranks.merge_topk, contract="ties=all")


@pytest.mark.parametrize(("form", "noun"), [("bool", "column"), ("ascending", "block")])
def test_a_mask_that_does_not_repeat_is_nondeterminism(form: forms.Form, noun: str) -> None:
    """The columns that moved are shown, or the blocks."""
    calls: list[int] = []

    def publish(**call: Call) -> object:
        calls.append(1)
        return publishing(form, ties="lowest" if len(calls) % 2 else "highest")(**call)

    verdict = check_row_count(generate.publish_mask(3), publish)
    found = next(f for f in verdict.findings if f.rule == "nondeterminism" and f.evidence)
    assert (found.row, found.evidence[0].place.split()[0]) == (2, noun)


def test_another_form_of_a_mask_is_another_output() -> None:
    """A bool mask here and a packed one there are not compared, nor a mask narrower than a row."""

    def packed(**call: Call) -> object:
        return publishing("bool" if len(call["row_start"]) == 9 else "packed")(**call)

    def narrow(**call: Call) -> Tensor:
        mask = masks.publish(**call)
        return mask if len(mask) == 9 else mask[:, :8]

    case = generate.publish_mask(3)
    told = []
    for candidate in (packed, narrow):
        verdict = check_row_count(case, candidate, rows=[4])
        (found,) = verdict.findings
        told.append((verdict.status, found.rule, found.evidence[0].value))
    assert told == [
        (Status.DIFFERENT, "dtype", "want [4, 29] bool   got [4, 29] uint8"),
        (Status.DIFFERENT, "shape", "want [4, 231 or wider]   got [4, 8]"),
    ]


def test_halves_of_two_streams_are_joined_as_wide_as_either() -> None:
    """Every byte stays, and what a narrower half lacks admits nothing."""
    one = torch.tensor([[0, 255]], dtype=torch.uint8).view(torch.bool)
    two = torch.tensor([[1, 0, 1]], dtype=torch.uint8).view(torch.bool)
    got = trials._joined([{"mask": one}, {"mask": two}])
    assert isinstance(got, dict)
    assert got["mask"].view(torch.uint8).tolist() == [[0, 255, 0], [1, 0, 1]]
    ids = trials._joined([torch.tensor([[3]]).int(), torch.tensor([[1, 2]]).int()])
    assert isinstance(ids, torch.Tensor)
    assert ids.tolist() == [[3, -1], [1, 2]]
    values = torch.tensor([[0x80]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    both = trials._joined([values, values])
    assert isinstance(both, torch.Tensor)
    assert both.view(torch.uint8).tolist() == [[0x80], [0x80]]


def test_ids_that_ascend_stay_in_order_beside_wider_ones() -> None:
    """Pads that a narrower chunk lacks follow its ids."""
    verdict = check_row_count(
        generate.publish_mask(3), publishing("ascending"), contract="order=ascending", rows=CHUNKS
    )
    assert (verdict.status, verdict.findings) == (Status.EQUAL, ())


def test_a_poisoned_id_is_told_by_its_block() -> None:
    """Where nothing judges, the blocks of which one call has only one are shown."""
    case = replace(layer(None), arithmetic=None)
    right = laid(replace(case, arithmetic="deep_gemm.sm90"))

    def wrong(**call: Call) -> dict[str, Tensor]:
        del right(**call)["mask"]
        ids = torch.zeros(len(call["q"]), 2, dtype=torch.int32)
        ids[:, 1] = 1 if len(ids) == 9 else 2_122_219_134
        return {"block_ids": ids}

    found = variance(check_row_count(case, wrong, rows=[4]))
    assert [(line.label, line.place, line.value) for line in found.evidence[:4]] == [
        ("want", "block 1", "1"),
        ("got", "block 1", "0"),
        ("want", "block 2122219134", "0"),
        ("got", "block 2122219134", "1"),
    ]


def test_a_mask_is_judged_on_the_command_line(
    tmp_path: Path, tell: Callable[..., tuple[int, str, str]]
) -> None:
    """A publisher that is right exits 0, and its published rows are counted."""
    path = tmp_path / "mask.safetensors"
    store.save(generate.publish_mask(3, tail=2), path)
    code, out, _ = tell("invariance", path, "--candidate", "refimpl.masks:publish", "--rows", "2")
    assert (code, "1 schedule" in out, "mask            4 rows: 4 identical" in out) == (
        0,
        True,
        True,
    )
