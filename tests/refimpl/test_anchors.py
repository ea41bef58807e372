"""The reference against what the engines' own helpers answered, recorded in fixtures/anchors."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from equivalence.case import Case
from equivalence.judge import check
from equivalence.verdict import Status
from refimpl import blocks, geometry, masks, mx, pages, qsa, topk

ANCHORS = Path(__file__).parents[2] / "fixtures" / "anchors"
ENGINE: dict[str, Any] = {"nan": "drop", "short_rows": "any", "zero_sign": "equal"}
FREE = "order=any,ties=any,holes=allow,short_rows=any,minus_inf=pad,zero_sign=equal"
KEYS = {"package", "version", "wheel", "wheel_sha256", "file", "file_sha256", "function", "lines"}
KEYS |= {"run", "seed", "torch", "calls", "note"}


@cache
def metadata(name: str) -> dict[str, str]:
    """The header of an anchor."""
    with safe_open(ANCHORS / f"{name}.safetensors", framework="pt") as file:
        words: dict[str, str] = file.metadata()
    return words


@cache
def tensors(name: str) -> dict[str, Tensor]:
    """All tensors of an anchor."""
    with safe_open(ANCHORS / f"{name}.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping


@cache
def calls(name: str) -> dict[str, dict[str, Any]]:
    """The calls of an anchor, each with its parameters."""
    read: dict[str, dict[str, Any]] = json.loads(metadata(name)["calls"])
    return read


@cache
def kinds(name: str) -> list[str]:
    """What each row of scores is."""
    return metadata(name)["note"].removeprefix("rows: ").split(". ")[0].split("; ")


def members(row: Tensor) -> set[int]:
    """The numbers a row holds, pads aside; none stands in it twice."""
    held = row[row != topk.PAD].tolist()
    assert len(held) == len(set(held)), held
    return set(held)


def admits(legal: topk.LegalSet, held: set[int]) -> bool:
    """Whether a row may hold these."""
    must, tied = (set(x.nonzero().flatten().tolist()) for x in (legal.must, legal.ties))
    return must <= held <= must | tied and len(held) == legal.need


def published(call: str) -> tuple[dict[str, Any], Tensor, Tensor, Tensor]:
    """Windows, block scores and block counts of a recorded call, and the engine's ids."""
    asked, held = calls("publish-blocks")[call], tensors("publish-blocks")
    scores, end = held[f"{asked['inputs']}.scores"], held[f"{asked['inputs']}.row_end"]
    given: dict[str, Any] = {"scores": scores, "row_start": torch.zeros_like(end), "row_end": end}
    best = blocks.block_scores(**given, block_size=asked["block_size"])
    counts = blocks.block_counts(visible=end, block_size=asked["block_size"])
    return given, best, counts, held[f"{call}.block_ids"]


def crowded(call: str) -> list[bool]:
    """Rows in which NaN and +inf blocks beside the newest fill every place."""
    _, best, counts, _ = published(call)
    return [
        int(
            (row[: max(0, int(count) - 1)].isnan() | row[: max(0, int(count) - 1)].isposinf()).sum()
        )
        >= calls("publish-blocks")[call]["topk_blocks"]
        for row, count in zip(best, counts, strict=True)
    ]


def illegal(call: str, **rules: Any) -> list[int]:  # noqa: ANN401 - the settings of legal_blocks
    """Rows, crowded ones aside, that hold blocks which the reference forbids."""
    _, best, counts, ids = published(call)
    limit = calls("publish-blocks")[call]["topk_blocks"]
    return [
        row
        for row, full in enumerate(crowded(call))
        if not full
        and not admits(
            blocks.legal_blocks(
                block_scores=best[row, : counts[row]], topk_blocks=limit, **ENGINE | rules
            ),
            members(ids[row]),
        )
    ]


@pytest.mark.parametrize("name", sorted(path.stem for path in ANCHORS.glob("*.safetensors")))
def test_an_anchor_is_small_and_names_its_source(name: str) -> None:
    """It is below a megabyte and says which file of which wheel ran, and with what."""
    words = metadata(name)
    assert {key: len(words[key]) for key in words if "sha256" in key} == {
        "wheel_sha256": 64,
        "file_sha256": 64,
    }
    assert words.keys() - {"also", "triton"} == KEYS
    assert (ANCHORS / f"{name}.safetensors").stat().st_size < 1_000_000
    assert name in (ANCHORS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("call", calls("publish-blocks"))
def test_sglang_publishes_blocks_that_the_reference_admits(call: str) -> None:
    """Every row that is not crowded holds the blocks above the cutoff, and tied ones to fill."""
    assert illegal(call) == []


@pytest.mark.parametrize("call", calls("publish-blocks"))
def test_without_a_choice_the_reference_publishes_the_same_blocks(call: str) -> None:
    """Rows that are not crowded and owe all their tied blocks are equal as sets."""
    asked = calls("publish-blocks")[call]
    given, best, counts, ids = published(call)
    shape = {name: asked[name] for name in ("topk_blocks", "block_size")}
    mine = masks.publish(**given, form="unordered", **shape, **ENGINE)
    legal = blocks.legal_rows(
        block_scores=best, blocks=counts, topk_blocks=asked["topk_blocks"], **ENGINE
    )
    open_rows = legal.need < (legal.must | legal.ties).sum(1)
    settled = ~open_rows & ~torch.tensor(crowded(call))
    rows = settled.nonzero().flatten().tolist()
    assert len(rows) > 30
    assert [members(mine[row]) for row in rows] == [members(ids[row]) for row in rows]


@pytest.mark.parametrize("call", calls("publish-blocks"))
def test_sglang_loses_the_newest_block_of_a_crowded_row(call: str) -> None:
    """There its pin of +inf ties with +inf blocks and stands below NaN, which is then dropped."""
    _, best, counts, ids = published(call)
    limit = calls("publish-blocks")[call]["topk_blocks"]
    for row, full in enumerate(crowded(call)):
        if not full:
            continue
        pinned = best[row, : counts[row]].clone()
        pinned[-1] = torch.inf
        plain = topk.legal_set(
            scores=pinned, k=limit, minus_inf="pad", nan="first", zero_sign="equal"
        )
        held, lost = members(ids[row]), set(pinned.isnan().nonzero().flatten().tolist())
        must, tied = (set(x.nonzero().flatten().tolist()) - lost for x in (plain.must, plain.ties))
        assert must <= held <= must | tied
        assert len(held) == plain.need - min(plain.need, len(lost))


def test_the_newest_block_is_lost_to_infinity_too() -> None:
    """Of 57 rows, these hold no newest block where one place is published."""
    _, _, counts, ids = published("fp32.top1of8")
    lost = [
        kind
        for kind, row, count in zip(kinds("publish-blocks"), ids, counts.tolist(), strict=True)
        if count and count - 1 not in members(row)
    ]
    assert lost == [
        "+inf in three blocks",
        "+inf in ten blocks",
        "NaN cell",
        "NaN cell",
        "NaN block",
        "NaN in two blocks",
        "NaN and -inf",
        "NaN in nine blocks",
        "NaN everywhere",
        "NaN everywhere",
        "short, NaN block",
    ]


NAN_CELLS = {"NaN cell", "NaN block", "NaN in two blocks"}
EQUAL_CELLS = {"few values", "plateau", "signed zeros", "blocks of one zero"}
SHORT = {"short, -inf block", "short, NaN block"}


@pytest.mark.parametrize(
    ("rules", "rows"),
    [
        ({}, set()),
        ({"nan": "propagate"}, {*NAN_CELLS, "NaN and -inf", "short, NaN block"}),
        ({"nan": "ignore"}, NAN_CELLS),
        ({"short_rows": "identity"}, SHORT),
        ({"zero_sign": "distinct"}, {"blocks of one zero"}),
        ({"ties": "all"}, {*EQUAL_CELLS, "-inf blocks", "NaN cell", "largest finite"}),
    ],
)
def test_every_other_rule_of_the_reference_is_refused(
    rules: dict[str, str], rows: set[str]
) -> None:
    """One setting other than SGLang's makes just these rows illegal."""
    found = {kinds("publish-blocks")[row] for row in illegal("fp32.top3of8", **rules)}
    assert found == rows


def consumed(call: str, **rules: Any) -> list[tuple[topk.LegalSet, set[int], set[int]]]:  # noqa: ANN401 - of legal_set
    """What each row may pick, what the engine picked and what the reference does."""
    asked, held = calls("topk-among-blocks")[call], tensors("topk-among-blocks")
    scores, end = held[f"{asked['inputs']}.scores"], held[f"{asked['inputs']}.row_end"]
    mask = held[f"{asked['block_ids']}.block_ids"]
    given: dict[str, Any] = {"scores": scores, "mask": mask, "row_end": end}
    given["row_start"] = torch.zeros_like(end)
    applied = masks.apply(**given)
    how: dict[str, Any] = {"nan": "first", "zero_sign": "equal"} | rules
    mine = masks.masked_topk(**given, k=asked["k"], short_rows="any", **how)
    legal = [
        topk.legal_set(scores=row[:last], k=asked["k"], minus_inf="pad", **how)
        for row, last in zip(applied, end, strict=True)
    ]
    sides = (map(members, held[f"{call}.raw_indices"]), map(members, mine))
    return list(zip(legal, *sides, strict=True))


SOUND = [
    call for call in calls("topk-among-blocks") if ".stale." not in call if ".twice." not in call
]


@pytest.mark.parametrize("call", SOUND)
def test_sglang_picks_what_the_reference_admits(call: str) -> None:
    """Engine and reference pick legally in every row, and the same where there is no choice."""
    for legal, theirs, mine in consumed(call):
        assert admits(legal, theirs)
        assert admits(legal, mine)
        assert theirs == mine or int(legal.ties.sum()) > legal.free


@pytest.mark.parametrize("rules", [{"nan": "last"}, {"zero_sign": "distinct"}])
def test_another_order_than_sglangs_is_told_apart(rules: dict[str, str]) -> None:
    """Its picks take NaN first and do not tell zeros apart."""
    rows = consumed("fp32.holes.k6", **rules)
    assert not all(admits(legal, theirs) for legal, theirs, _ in rows)


def test_sglang_passes_over_blocks_that_no_row_has() -> None:
    """It picks as if stale ids were pads; the reference refuses the mask and names the block."""
    held, asked = tensors("topk-among-blocks"), calls("topk-among-blocks")["fp32.stale.k6"]
    scores, end, ids = (held[f"fp32.{name}"] for name in ("scores", "row_end", "stale.block_ids"))
    start = torch.zeros_like(end)
    with pytest.raises(ValueError, match="mask row 0 has block 27 in slot 0: its 203 columns"):
        masks.apply(scores=scores, mask=ids, row_start=start, row_end=end)
    there = ids < blocks.block_counts(visible=end)[:, None]
    applied = masks.apply(
        scores=scores, mask=torch.where(there, ids, -1), row_start=start, row_end=end
    )
    for row, last, picks in zip(applied, end, held["fp32.stale.k6.raw_indices"], strict=True):
        legal = topk.legal_set(
            scores=row[:last], k=asked["k"], minus_inf="pad", nan="first", zero_sign="equal"
        )
        assert admits(legal, members(picks))


def test_sglang_picks_twice_from_a_block_that_is_there_twice() -> None:
    """Its picks then repeat; the reference refuses the mask and names both slots."""
    held = tensors("topk-among-blocks")
    scores, end, ids = (held[f"fp32.{name}"] for name in ("scores", "row_end", "twice.block_ids"))
    picks = held["fp32.twice.k6.raw_indices"]
    repeats = [len(row) > len(row.unique()) for row in (r[r != topk.PAD] for r in picks)]
    assert sum(repeats) == 9
    with pytest.raises(ValueError, match="mask row 0 has block 2 in slots 1 and 2"):
        masks.apply(scores=scores, mask=ids, row_start=torch.zeros_like(end), row_end=end)


@pytest.mark.parametrize("call", calls("qsa-metadata"))
def test_vllm_counts_the_blocks_that_a_row_sees_alike(call: str) -> None:
    """Visible blocks of prefill, decode, draft and padding rows are equal."""
    held, ratio = tensors("qsa-metadata"), calls("qsa-metadata")[call]["compress_ratio"]
    seq_lens = held[f"{call}.seq_lens"][held[f"{call}.token_to_req"].long()]
    want = geometry.qsa_visible_blocks(
        positions=held[f"{call}.positions"], seq_lens=seq_lens, block_size=ratio
    )
    assert torch.equal(want, held[f"{call}.visible_blocks"])


@pytest.mark.parametrize(
    "call", [name for name in calls("qsa-metadata") if name[:5] not in {"given", "behin"}]
)
def test_the_windows_of_a_batch_hold_vllms_visible_blocks(call: str) -> None:
    """The windows made from lengths alone have the owners and the widths that vLLM has."""
    held, ratio = tensors("qsa-metadata"), calls("qsa-metadata")[call]["compress_ratio"]
    start, end, owner = geometry.ragged_windows(
        extend_lens=held[f"{call}.query_start_loc"].diff(),
        seq_lens=held[f"{call}.seq_lens"],
        ratio=ratio,
    )
    mapped = len(owner)
    assert torch.equal(owner, held[f"{call}.token_to_req"][:mapped])
    assert torch.equal(end - start, held[f"{call}.visible_blocks"][:mapped])
    assert not held[f"{call}.visible_blocks"][mapped:].any()


@pytest.mark.parametrize(
    "call", [n for n, c in calls("qsa-metadata").items() if c["compress_ratio"] == 4]
)
def test_vllm_stores_a_compressed_key_in_the_slot_of_its_page(call: str) -> None:
    """Key j of a request lies in slot table[j // page] * page + j % page, if its group is full."""
    held, asked = tensors("qsa-metadata"), calls("qsa-metadata")[call]
    position, ratio = held[f"{call}.positions"], asked["compress_ratio"]
    done = (position >= 0) & ((position + 1) % ratio == 0)
    slots = pages.translate_pages(
        raw_indices=torch.where(done, position // ratio, topk.PAD)[:, None],
        page_table=held[f"{call}.block_table"],
        page_size=asked["storage_block_size"],
        row_to_request=held[f"{call}.token_to_req"],
    )[:, 0]
    want = torch.where(held[f"{call}.common_slot_mapping"] < 0, -1, slots).long()
    assert torch.equal(want, held[f"{call}.slot_mapping"])


@pytest.mark.parametrize("call", calls("qsa-expand"))
def test_vllm_packs_rows_bit_for_bit_alike(call: str) -> None:
    """Packed rows are equal: blocks as they stand, holes, the open group's tail, the count."""
    names = ("block_ids", "positions", "visible_blocks")
    given: dict[str, Any] = {n: tensors("qsa-expand")[f"{call}.{n}"] for n in names}
    assert torch.equal(qsa.expand_blocks(**given), tensors("qsa-expand")[f"{call}.packed"])


def codes(payload: Tensor) -> Tensor:
    """The e2m1 codes of a payload, the low nibble first."""
    held = payload.view(torch.uint8)
    return torch.stack((held & 0xF, held >> 4), -1).flatten(-2)


@pytest.mark.parametrize("call", ["fp32", "bf16"])
def test_the_fake_quantiser_gives_the_same_bits(call: str) -> None:
    """Values and scales are equal; what comes in as -0 goes out as +0."""
    x, values, scale = (tensors("fp4-fake-quant")[f"{call}.{n}"] for n in ("x", "values", "scale"))
    assert torch.equal(mx.decode_ue8m0(mx.quantize(x)[1]), scale)
    assert int(((x == 0) & x.signbit()).sum()) > 200
    whole = torch.int32 if x.dtype is torch.float32 else torch.int16
    want = mx.fake_quantize(x, zero_sign="rounded")
    assert torch.equal(want.view(whole), values.view(whole))


def test_the_fake_quantiser_rounds_the_grid_alike() -> None:
    """From -6 to 6, every midpoint and its neighbours round the same way, zeros apart."""
    x, values = (tensors("fp4-fake-quant")[f"grid.{name}"] for name in ("x", "values"))
    padded = torch.nn.functional.pad(x, (0, len(x) % 2))
    assert torch.equal(mx.decode_e2m1(mx.encode_e2m1(padded))[: len(x)], values)


def test_infinities_and_nan_have_no_fp4() -> None:
    """SGLang makes scales inf and 0 and values NaN of them; the reference refuses them."""
    held = tensors("fp4-fake-quant")
    assert held["nonfinite.values"].isnan().sum() == 32 + 32 + 10 + 32
    with pytest.raises(ValueError, match="values that are not finite"):
        mx.quantize(held["nonfinite.x"])


@pytest.mark.parametrize("how", ["even", "down"])
@pytest.mark.parametrize("call", ["fp32", "bf16"])
def test_the_index_packer_writes_the_same_bytes(call: str, how: str) -> None:
    """Both ways of rounding a tie; no zero has a sign, and scales are at least 1e-4."""
    held = tensors("fp4-index-pack")
    payload, scales = mx.quantize(
        held[f"{call}.x"],
        floor=mx.PACKER,
        ties="even" if how == "even" else "zero",
        zero_sign="drop",
    )
    assert torch.equal(scales, mx.scale_bytes(held[f"{call}.{how}.scales"][:, None]))
    assert torch.equal(codes(payload), codes(held[f"{call}.{how}.payload"]))


def test_every_byte_under_every_scale_reads_alike_but_for_the_last() -> None:
    """256 payload bytes times 256 scales give equal bf16 bits; 255 is inf there and NaN here."""
    cache, values = (tensors("fp4-index-read")[f"all.{name}"] for name in ("kv_cache", "values"))
    payload, scales = mx.split_fp4_pages(cache, head_dim=128, page_size=64)
    mine = mx.dequantize(payload, scales).bfloat16().view(-1, 128)
    last = mx.spread(scales).view(-1, 128) == mx.UE8M0_NAN
    assert torch.equal(mine.view(torch.int16)[~last], values.view(torch.int16)[~last])
    assert mine[last].isnan().all()
    zero = codes(payload).view(-1, 128)[last] % 8 == 0
    assert torch.equal(values[last].isnan(), zero)
    assert torch.equal(values[last].isinf(), ~zero)


@pytest.mark.parametrize("page_size", [64, 128])
def test_slots_of_fp4_pages_read_alike(page_size: int) -> None:
    """Payload, scales and values of slots across pages are equal, whatever their order."""
    held = {
        name: tensors("fp4-index-read")[f"page{page_size}.{name}"]
        for name in ("kv_cache", "slots", "payload", "scales", "values")
    }
    pages_of = mx.split_fp4_pages(held["kv_cache"], head_dim=128, page_size=page_size)
    payload, scales = (plane.flatten(0, 1)[held["slots"].long()] for plane in pages_of)
    assert torch.equal(payload, held["payload"].view(torch.uint8))
    assert torch.equal(scales, mx.scale_bytes(held["scales"][:, None]))
    known = mx.spread(scales) != mx.UE8M0_NAN
    mine = mx.dequantize(payload, scales).bfloat16().view(torch.int16)
    assert torch.equal(mine[known], held["values"].view(torch.int16)[known])


def publish_case(call: str, rows: Tensor) -> Case:
    """Rows of a recorded call as a case."""
    given, _, _, ids = published(call)
    asked = calls("publish-blocks")[call]
    return Case(
        op="publish_mask",
        inputs={name: tensor[rows] for name, tensor in given.items()},
        params={name: asked[name] for name in ("topk_blocks", "block_size")},
        recorded=({"block_ids": ids[rows]},),
        contract=FREE,
    )


@pytest.mark.parametrize("call", calls("publish-blocks"))
def test_published_blocks_are_judged_equal(call: str) -> None:
    """As a case, rows are EQUAL but for crowded ones and those with a NaN; 26 of 26 say nothing."""
    _, best, _, _ = published(call)
    rows = ~torch.tensor(crowded(call)) & ~best.isnan().any(1)
    everything = calls("publish-blocks")[call]["topk_blocks"] >= best.shape[1]
    want = Status.UNDECIDED if everything else Status.EQUAL
    assert check(publish_case(call, rows.nonzero().flatten())).status is want


def test_a_crowded_row_is_judged_different() -> None:
    """Where +inf blocks fill every place, the newest block is missing."""
    _, best, _, _ = published("fp32.top3of8")
    rows = torch.tensor(crowded("fp32.top3of8")) & ~best.isnan().any(1)
    verdict = check(publish_case("fp32.top3of8", rows.nonzero().flatten()))
    assert (verdict.status, verdict.stages["block_ids"].rules) == (
        Status.DIFFERENT,
        {"mask-missing": 2},
    )


@pytest.mark.parametrize("call", [call for call in SOUND if call.endswith(("k1", "k6"))])
def test_picks_among_blocks_are_judged_equal(call: str) -> None:
    """As a case, rows are EQUAL where no pick stands in a slot past the columns they see."""
    asked, held = calls("topk-among-blocks")[call], tensors("topk-among-blocks")
    scores, end = held[f"{asked['inputs']}.scores"], held[f"{asked['inputs']}.row_end"]
    picks = held[f"{call}.raw_indices"].int()
    late = ((picks != topk.PAD) & (torch.arange(asked["k"]) >= end[:, None])).any(1)
    rows = (~late).nonzero().flatten()
    assert len(rows) > 50
    mask = held[f"{asked['block_ids']}.block_ids"]
    case = Case(
        op="ragged_topk",
        inputs={
            "scores": scores[rows],
            "row_start": torch.zeros_like(end)[rows],
            "row_end": end[rows],
            "block_ids": mask[rows],
        },
        params={"k": asked["k"]},
        recorded=({"raw_indices": picks[rows]},),
        contract=f"{FREE},nan=first",
    )
    assert check(case).status is Status.EQUAL
