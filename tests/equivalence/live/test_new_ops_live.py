"""Live calls that publish masks, quantise, expand, gather or move: recorded, and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny import call_of

from equivalence import ab, generate, judge, layout, store
from equivalence.capture import record
from equivalence.case import held
from equivalence.live import clones
from equivalence.verdict import Status
from refimpl import masks, pages, qsa, quant, ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from equivalence.case import Case
    from equivalence.versus.forwards import Comparison

Call = Any
"""Arguments of an engine's function."""


def publish(logits: Tensor, starts: Tensor, ends: Tensor, out: Tensor, *, topk_blocks: int) -> None:
    """An engine's publisher: every row, bool, into a buffer wider than the rows see."""
    mask = masks.publish(scores=logits, row_start=starts, row_end=ends, topk_blocks=topk_blocks)
    out.zero_()
    out[:, : mask.shape[1]] = mask


def loses_a_block(
    logits: Tensor, starts: Tensor, ends: Tensor, out: Tensor, *, topk_blocks: int
) -> None:
    """The first block of the last row is turned round."""
    publish(logits, starts, ends, out, topk_blocks=topk_blocks)
    out[-1, :8] ^= True


PUBLISHER: dict[str, Any] = {
    "op": "publish_mask",
    "names": {"scores": "logits", "row_start": "starts", "row_end": "ends"},
    "inplace": {"mask": "out"},
}


def publisher_call(out: Tensor) -> dict[str, Any]:
    """The arguments of a publisher."""
    call = call_of(generate.publish_mask(3))
    return {
        "logits": call["scores"].clone(),
        "starts": call["row_start"],
        "ends": call["row_end"],
        "out": out,
        "topk_blocks": call["topk_blocks"],
    }


def of_tail(form: str) -> Callable[..., Tensor]:
    """A publisher of the rows it is told, that returns its mask."""

    def tail(scores: Tensor, row_start: Tensor, row_end: Tensor, **call: Call) -> Tensor:
        return masks.publish(
            scores=scores, row_start=row_start, row_end=row_end, **{**call, "form": form}
        )

    return tail


def apply_in_place(scores: Tensor, row_start: Tensor, row_end: Tensor, mask: Tensor) -> None:
    """The columns outside the mask become -inf in the caller's scores."""
    masks.apply(scores=scores, row_start=row_start, row_end=row_end, mask=mask, out=scores)


def pick(mask: Tensor | None = None, block_ids: Tensor | None = None, **call: Call) -> Tensor:
    """A consumer of either form."""
    given = block_ids if mask is None else mask
    assert given is not None
    return masks.masked_topk(mask=given, **call)


def quantise(x: Tensor, q8: Tensor, scales: Tensor, *, style: str) -> tuple[Tensor, Tensor]:
    """Keys into the caller's buffers, which it also returns."""
    found = quant.quantize_k(x=x, style=style)
    layout.as_bytes(q8).copy_(layout.as_bytes(found["values"]))
    scales.copy_(found["scale"])
    return q8, scales


def pair(result: tuple[Tensor, Tensor], _arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a quantiser returns."""
    return {"values": result[0], "scale": result[1]}


def packs(packed: Tensor, **call: Call) -> dict[str, Tensor]:
    """A QSA layer that writes its rows and returns its logits."""
    found = qsa.qsa_indexer(**call)
    packed.copy_(found["packed"])
    return {"logits": found["logits"]}


def keys(kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, rows: int) -> dict[str, Tensor]:
    """Keys of all requests."""
    del rows
    return pages.gather_batch(
        kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens, page_size=4
    )


def move(tgt_loc: Tensor, src_loc: Tensor, buffer: Tensor) -> None:
    """Tokens of an engine's own buffer."""
    buffer.copy_(
        pages.move_tokens(kv_cache=buffer, source=src_loc, destination=tgt_loc, page_size=4)
    )


def buffers(case: Case) -> dict[str, Tensor]:
    """Where a quantiser of keys writes."""
    x = case.inputs["x"]
    return {
        "q8": torch.zeros(x.shape, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "scales": torch.zeros(len(x)),
    }


def packed_buffer(case: Case) -> dict[str, Tensor]:
    """Where a QSA layer writes its rows."""
    width = 4 * int(str(case.params["topk"])) + 4
    return {"packed": torch.zeros(len(case.inputs["q"]), width, dtype=torch.int32)}


QSA, KEYS = generate.qsa_indexer(0), generate.quantize_k(0)
CALLS: dict[str, tuple[Case, Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "publishes all rows, packed": (generate.publish_mask(3), of_tail("packed"), {}, {}),
    "publishes a tail, bool": (generate.publish_mask(3, tail=2), of_tail("bool"), {}, {}),
    "publishes a tail, ids": (
        generate.publish_mask(3, tail=2),
        of_tail("ascending"),
        {"give": lambda result, _: {"block_ids": result}},
        {},
    ),
    "applies in place": (
        generate.apply_mask(1),
        apply_in_place,
        {"inplace": {"scores": "scores"}, "contract": "writes=scores"},
        {},
    ),
    "picks under a mask": (generate.consumer(1, form="packed"), pick, {}, {}),
    "picks under ids": (generate.consumer(1, form="unordered"), pick, {}, {}),
    "quantises in place": (
        KEYS,
        quantise,
        {"inplace": {"values": "q8", "scale": "scales"}, "give": lambda *_: {}},
        buffers(KEYS),
    ),
    "quantises and returns": (KEYS, quantise, {"give": pair}, buffers(KEYS)),
    "quantises queries": (generate.quantize_q(0), quant.quantize_q, {}, {}),
    "packs in place": (
        QSA,
        packs,
        {"inplace": {"packed": "packed"}, "arithmetic": QSA.arithmetic},
        packed_buffer(QSA),
    ),
    "expands": (generate.expand_blocks(0), qsa.expand_blocks, {}, {}),
    "gathers rows": (generate.gather_rows(0), ranks.gather_rows, {}, {}),
    "gathers keys": (generate.gather_keys(0), keys, {"params": {"page_size": 4}}, {}),
    "moves in place": (
        generate.move_tokens(0),
        move,
        {
            "names": {"kv_cache": "buffer", "source": "src_loc", "destination": "tgt_loc"},
            "inplace": {"moved": "buffer"},
            "params": {"page_size": 4},
            "contract": "sglang.srt.mem_cache.index_key_cache.IndexKeyCache.move",
        },
        {},
    ),
    "merges": (generate.merge_topk(0), ranks.merge_topk, {}, {}),
}


def arguments(case: Case, more: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Fresh arguments of one call."""
    call = {**call_of(case), **more}
    if function in (keys, move):
        del call["page_size"]
    if function is move:
        del call["pad"]
        names = {"kv_cache": "buffer", "source": "src_loc", "destination": "tgt_loc"}
        call = {names[name]: tensor for name, tensor in call.items()}
    return {n: layout.clone(x) if isinstance(x, torch.Tensor) else x for n, x in call.items()}


@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_call_is_equal(name: str, tmp_path: Path) -> None:
    """Inputs are those from before the call, outputs those after it, written or returned."""
    case, function, options, more = CALLS[name]
    recorded = record(function, op=case.op, to=tmp_path, **options)
    recorded(**arguments(case, more, function))
    assert (recorded.counts.written, recorded.counts.left_out) == (1, {})
    (found,) = store.load_cases(tmp_path)
    kept = held(found)
    assert {n: t.tolist() for n, t in kept.inputs.items() if n != "q"} == {
        n: t.tolist() for n, t in case.inputs.items() if n != "q"
    }
    assert judge.check(found).status is Status.EQUAL


def test_a_mask_in_a_wider_buffer_is_recorded_with_its_strides(tmp_path: Path) -> None:
    """Rows that lie apart are those of the mask; a block that is lost is told."""
    for function, status in ((publish, Status.EQUAL), (loses_a_block, Status.DIFFERENT)):
        buffer = torch.ones(9, 512, dtype=torch.bool)
        recorded = record(function, to=tmp_path / function.__name__, **PUBLISHER)
        recorded(**publisher_call(buffer[:, :400]))
        (found,) = store.load_cases(tmp_path / function.__name__)
        assert found.recorded[0]["mask"].stride() == (512, 1)
        assert judge.check(found).status is status


def test_every_byte_of_a_bool_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that holds 255, as after an unwritten buffer, is handed to the file as 255."""
    saved: list[Case] = []

    def save(case: Case, path: Path) -> None:
        saved.append(case)
        path.write_bytes(b"")

    monkeypatch.setattr(store, "save", save)

    def odd(out: Tensor, **call: Call) -> None:
        publish(out=out, **call)
        out.view(torch.uint8)[3, 5] = 255

    buffer = torch.zeros(9, 1 << 14, dtype=torch.bool)
    for out in (torch.zeros(9, 400, dtype=torch.bool), buffer[:, :400]):
        recorded = record(odd, to=tmp_path, **{**PUBLISHER, "read": by_names})
        recorded(**publisher_call(out))
        assert recorded.counts.left_out == {}
    assert [int(case.recorded[0]["mask"].view(torch.uint8)[3, 5]) for case in saved] == [255, 255]


def by_names(logits: Tensor, starts: Tensor, ends: Tensor, **call: Call) -> dict[str, Any]:
    """A publisher's call by the op's names."""
    return {
        "scores": logits,
        "row_start": starts,
        "row_end": ends,
        "topk_blocks": call["topk_blocks"],
    }


def test_a_mask_is_given_back_byte_for_byte() -> None:
    """Copies hold every byte, and what a later arm changed is restored."""
    mask = torch.tensor([[0, 1, 255]], dtype=torch.uint8).view(torch.bool)
    (copy,), _ = clones.cloned([mask], {})
    assert clones.on_host(mask).view(torch.uint8).tolist() == [[0, 1, 255]]
    mask.fill_(value=True)
    clones.overwrite(mask, copy)
    assert mask.view(torch.uint8).tolist() == [[0, 1, 255]]
    far = torch.zeros(2, 1 << 25, dtype=torch.uint8)
    far[:, 0] = 255
    packed = clones.storable(far.view(torch.bool)[:, :1])
    assert (packed.stride(), packed.view(torch.uint8).tolist()) == ((1, 1), [[255], [255]])


def watched(name: str, candidate: Callable[..., Any]) -> Comparison:
    """The comparison of one call with a candidate's."""
    case, function, options, more = CALLS[name]
    live = ab.shadow(function, candidate, op=case.op, **options)
    want = function(**arguments(case, more, function))
    got = live(**arguments(case, more, function))
    tensors = [t for t in (want, got) if isinstance(t, torch.Tensor)]
    assert len(tensors) < 2 or torch.equal(*map(layout.as_bytes, tensors))
    return live.result()


@pytest.mark.parametrize("name", CALLS)
def test_an_original_beside_itself_is_equal(name: str) -> None:
    """In place and returned: masks, bytes, packed rows; the caller gets what it always got."""
    result = watched(name, CALLS[name][1])
    assert (result.status, result.failed) == (Status.EQUAL, {})
    assert result.left_out == {}


def test_a_call_that_differs_is_saved_with_every_arm(tmp_path: Path) -> None:
    """Its file holds the tail that each arm published, and is judged as it was."""
    case, function, options, more = CALLS["publishes a tail, bool"]

    def other(*args: Call, **call: Call) -> Tensor:
        mask = function(*args, **call)
        assert isinstance(mask, torch.Tensor)
        mask[-1, :8] ^= True
        return mask

    live = ab.shadow(function, other, op=case.op, save=tmp_path, **options)
    live(**arguments(case, more, function))
    assert live.result().status is Status.DIFFERENT
    (found,) = store.load_cases(tmp_path)
    assert [list(entry) for entry in found.recorded] == [["mask"]] * 3
    assert found.inputs["rows"].tolist() == case.inputs["rows"].tolist()
    failing = [run.stages["mask"].failing for run in judge.check(found).runs if run.stages]
    assert sorted(map(list, failing)) == [[], [], [8]]


def wrong(name: str) -> Callable[..., Any]:
    """The original, with one row of its output another."""
    function = CALLS[name][1]

    def candidate(**call: Call) -> Any:  # noqa: ANN401 - the original's own result
        result = function(**call)
        written = [call[key] for key in ("q8", "packed", "scores", "buffer") if key in call]
        given = written if name.endswith("in place") else [result]
        if isinstance(result, dict) and given[0] is result:
            given = list(result.values())
        spoil(given[0])
        return result

    return candidate


def spoil(tensor: Tensor) -> None:
    """Row 3 becomes row 4 turned round."""
    cells = layout.as_bytes(tensor)
    cells[3] = cells[4].flip(-1) if cells.dim() > 1 else cells[4]


SPOILT = [
    name
    for name in CALLS
    if name not in ("publishes a tail, bool", "publishes a tail, ids", "quantises and returns")
]


@pytest.mark.parametrize("name", SPOILT)
def test_a_wrong_row_of_the_candidate_is_told(name: str) -> None:
    """The comparison differs, and the caller's own result does not."""
    result = watched(name, wrong(name))
    assert (result.status, result.failed) == (Status.DIFFERENT, {})
