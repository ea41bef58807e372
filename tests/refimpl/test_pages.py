"""From picks to slots."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from refimpl.pages import gather_keys, map_slots, offset_indices, translate_pages

RAW = torch.tensor([[0, 5, -1], [3, -1, -1]], dtype=torch.int32)


def test_a_page_table_maps_positions_page_by_page_and_keeps_pads() -> None:
    """Position 5 of pages of 4 is place 1 of the second page."""
    table = torch.tensor([[7, 2], [3, 9]], dtype=torch.int32)
    got = translate_pages(raw_indices=RAW, page_table=table, page_size=4)
    assert got.tolist() == [[28, 9, -1], [15, -1, -1]]


def test_rows_find_their_request() -> None:
    """Two rows of one request read the same table row."""
    table = torch.tensor([[7, 2], [3, 9]], dtype=torch.int32)
    one = torch.tensor([1, 1], dtype=torch.int32)
    got = translate_pages(raw_indices=RAW, page_table=table, page_size=4, row_to_request=one)
    assert got.tolist() == [[12, 37, -1], [15, -1, -1]]


def test_slots_above_two_to_the_24_are_exact() -> None:
    """Integers never pass through a float."""
    table = torch.tensor([[(1 << 19) + 1]], dtype=torch.int32)
    raw = torch.tensor([[62, 63]], dtype=torch.int32)
    got = translate_pages(raw_indices=raw, page_table=table, page_size=64)
    assert got.tolist() == [[(1 << 25) + 126, (1 << 25) + 127]]


def test_a_slot_map_starts_at_the_row_and_an_offset_is_its_own_tensor() -> None:
    """Both keep pads."""
    start = torch.tensor([0, 6], dtype=torch.int32)
    slots = torch.arange(100, 112)
    got = map_slots(raw_indices=RAW, row_start=start, slot_map=slots)
    assert got.tolist() == [[100, 105, -1], [109, -1, -1]]
    offset = torch.tensor([10, 20], dtype=torch.int32)
    moved = offset_indices(raw_indices=RAW, topk_indices_offset=offset)
    assert moved.tolist() == [[10, 15, -1], [23, -1, -1]]


@given(st.integers(0, 12))
def test_keys_are_gathered_out_of_planar_pages(length: int) -> None:
    """Token t of a page has its bytes among the values and its scale among the scales."""
    size, dim = 4, 8
    values = torch.arange(4 * size * dim, dtype=torch.uint8).reshape(4, size * dim)
    scales = torch.arange(4.0 * size).reshape(4, size)
    cache = torch.cat([values, scales.view(torch.uint8).reshape(4, -1)], 1)
    keys, got = gather_keys(
        kv_cache=cache,
        block_table=torch.tensor([2, 0, 3], dtype=torch.int32),
        length=length,
        page_size=size,
        head_dim=dim,
    )
    order = [page * size + t for page in (2, 0, 3) for t in range(size)][:length]
    assert got.tolist() == [float(token) for token in order]
    want = values.reshape(-1, dim)[order].tolist()
    assert keys.view(torch.uint8).tolist() == want
