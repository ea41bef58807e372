"""The dense buffer of one process, against bytes put in place one by one."""

from typing import Any

import pytest
import torch
import twin_compose
from drawn_steps import FP8, Step, step, steps
from hypothesis import given, settings
from torch import Tensor

from refimpl import compose
from refimpl.compose import compose_pages, planes, write_rows

ONE = step([(4, 5)], cp=2, layers=1, kinds=["token"], padding=0)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_dense_buffer_is_what_bytes_put_one_by_one_make(drawn: Step) -> None:
    """Prefix pages, carried pages, current rows, zeros; every layer and kind."""
    twin = twin_compose.composed(drawn.case)
    for kind, pages in drawn.want().items():
        assert pages.tolist() == [list(map(list, layer)) for layer in twin[f"{kind}_pages"]]


def composed(drawn: Step, **change: Any) -> Tensor:  # noqa: ANN401 - as the reference
    """The token pages."""
    pools, rows = drawn.inputs["token_pools"], drawn.inputs["token_rows"]
    return compose_pages(**{"pools": pools, "rows": rows, "kind": "token", **drawn.call, **change})


def test_fp8_pages_keep_every_byte() -> None:
    """NaN payloads and the sign of a zero included: 0x7f 0xff 0x80 0x00."""
    rows = torch.tensor([0x7F, 0xFF, 0x80, 0x00], dtype=torch.uint8)
    rows = rows.repeat(ONE.inputs["token_rows"].numel() // 4 + 1)
    rows = rows[: ONE.inputs["token_rows"].numel()].view(1, -1, 6).view(FP8)
    got = composed(ONE, rows=rows)
    assert got.dtype is FP8
    assert got.view(torch.uint8)[0, 1].tolist() == rows.view(torch.uint8)[0, :4].flatten().tolist()


def test_it_composes_in_memory_that_is_given() -> None:
    """Whatever it held; memory of another size is refused."""
    want = composed(ONE).view(torch.uint8)
    out = torch.full_like(want, 0x53)
    assert composed(ONE, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match=r"out is \[1, 2, 24\]: the dense buffer is \[1, 3, 24\]"):
        composed(ONE, out=out[:, :2])


def test_pools_may_begin_at_any_byte() -> None:
    """Also where pages are whole words."""
    pools = ONE.inputs["token_pools"].view(torch.uint8)
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), pools.flatten()])[3:].view(pools.shape)
    assert (moved.storage_offset(), pools.shape[-1] % 8) == (3, 0)
    assert torch.equal(composed(ONE, pools=moved.view(FP8)).view(torch.uint8), ONE.want()["token"])


def test_an_index_page_has_its_keys_then_its_scales() -> None:
    """A token of 132 bytes is 128 and 4; a token page has whole tokens."""
    assert (planes("index", 132), planes("token", 656)) == ((128, 4), (656,))
    pages = torch.zeros(1, 2 * 6, dtype=torch.uint8)
    rows = torch.tensor([[1, 2, 3, 4, 5, 6]], dtype=torch.uint8)
    write_rows(pages, rows=rows, locations=torch.tensor([1]), kind="index", page_size=2)
    assert pages.tolist() == [[0, 0, 1, 2, 0, 0, 0, 0, 3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "value"}, "kind is 'value': it is token or index"),
        ({"rows": torch.zeros(1, 5, 4, dtype=FP8), "kind": "index"}, "no key beside its scale"),
        ({"rows": torch.zeros(1, 5, 6)}, "both are bytes of one dtype"),
        ({"rows": torch.zeros(1, 5, 6, dtype=torch.uint8)}, "both are bytes of one dtype"),
        (
            {"pools": torch.zeros(1, 2, 9, 24).int(), "rows": torch.zeros(1, 5, 6).int()},
            "both are bytes of one dtype",
        ),
        ({"local_page": torch.full((7,), 9).int()}, "which has 9"),
        ({"cp": 3}, "pools are those of 2 ranks; cp is 3"),
        ({"rows": torch.zeros(1, 5, 5, dtype=FP8)}, "4 tokens of 5 bytes make 20"),
        ({"rows": torch.zeros(2, 5, 6, dtype=FP8)}, "rows are [2, 5] layers and tokens"),
        ({"rows": torch.zeros(1, 4, 6, dtype=FP8)}, "rows are [1, 4] layers and tokens"),
        ({"staging_pages": 1}, "2 current pages do not fit into 1 staging pages"),
        ({"slot_pages": torch.tensor([1, 2])}, "the requests have 3 pages; slot_pages lists 2"),
    ],
)
def test_what_cannot_be_composed_is_refused(change: dict[str, Any], says: str) -> None:
    """In one sentence that has both sides."""
    with pytest.raises(ValueError, match=r".") as caught:
        composed(ONE, **change)
    assert says in str(caught.value)


def test_padding_alone_is_zero_also_where_there_is_no_page() -> None:
    """A step without requests may know of no logical page at all."""
    call: dict[str, Any] = {}
    none, padding = torch.empty(0, dtype=torch.int32), torch.tensor([0, -1], dtype=torch.int32)
    call |= dict.fromkeys(("owner", "local_page", "writer", "prefix_lens", "extend_lens"), none)
    got = compose_pages(
        pools=torch.ones(2, 1, 3, 16, dtype=torch.uint8),
        rows=torch.ones(2, 0, 4, dtype=torch.uint8),
        slot_pages=padding,
        **call,
        cp=1,
        kind="token",
        page_size=4,
    )
    assert torch.equal(got, torch.zeros(2, 2, 16, dtype=torch.uint8))


@settings(max_examples=20, deadline=None)
@given(steps())
def test_a_batch_that_was_checked_is_composed_as_it_is(drawn: Step) -> None:
    """Without being built or refused again, to the same bytes."""
    for kind, pages in drawn.want().items():
        pools, rows = drawn.inputs[f"{kind}_pools"], drawn.inputs[f"{kind}_rows"]
        got = compose.composed(drawn.batch, pools=pools, rows=rows, kind=kind)
        assert torch.equal(got.view(torch.uint8), pages)
