"""Digests of pages by request and position: layouts do not matter, bytes do."""

from dataclasses import replace

import pytest
import torch
import xxhash
from torch import Tensor

from equivalence import generate
from equivalence.checks.composed import wanted, weighing
from equivalence.compose import digests
from equivalence.compose.digests import Difference
from refimpl import batch as batches
from refimpl.batch import Batch


def step(seed: int = 4) -> tuple[Batch, Tensor, Tensor]:
    """A step, its token pools and what every rank holds of them."""
    case = generate.compose_pages(seed, shape="shared")
    dense = weighing.reference(case)["token_pages"][0]
    return wanted.of_case(case).batch, case.inputs["token_pools"], dense


def moved(batch: Batch, pools: Tensor) -> tuple[Batch, Tensor]:
    """The same pages in other places of the same ranks, under other numbers."""
    random = torch.Generator().manual_seed(1)
    order = torch.cat(
        [torch.zeros(1).long(), 1 + torch.randperm(pools.shape[2] - 1, generator=random)]
    )
    names = torch.cat(
        [torch.zeros(1).long(), 1 + torch.randperm(len(batch.owner) - 1, generator=random)]
    )
    turned = torch.empty_like(pools)
    turned[:, :, order] = pools
    owner, local = torch.empty_like(batch.owner), torch.empty_like(batch.local_page)
    owner[names], local[names] = batch.owner, order[batch.local_page.long()].int()
    held = batch.slot_pages > 0
    pages = torch.where(held, names[batch.slot_pages.clamp(min=0).long()].int(), batch.slot_pages)
    return replace(batch, slot_pages=pages, owner=owner, local_page=local), turned


def test_a_digest_is_that_of_the_bytes() -> None:
    """XXH3-64 of a page, or of its layers one after another; padding has none."""
    batch, _, dense = step()
    one, all_layers = digests.of_dense(dense[0], batch), digests.of_dense(dense, batch)
    assert one[0, 0] == xxhash.xxh3_64_hexdigest(dense[0, 0].numpy().tobytes())
    assert all_layers[0, 0] == xxhash.xxh3_64_hexdigest(dense[:, 0].contiguous().numpy().tobytes())
    held = batches.slot_requests(batch) >= 0
    assert len(one) == int(held.sum())


def test_pools_of_other_layouts_compare_equal() -> None:
    """Places and page numbers do not matter."""
    batch, pools, _ = step()
    one = digests.of_pools(pools, batch)
    other, turned = moved(batch, pools)
    assert not torch.equal(other.local_page, batch.local_page)
    assert digests.compare(one, digests.of_pools(turned, other)) == ()
    assert digests.compare(one, digests.of_pools(turned, batch))


def test_ranks_compare_without_moving_their_pages() -> None:
    """The digests of each rank's own pages together are those of all."""
    batch, pools, dense = step()
    together: dict[tuple[int, int], str] = {}
    for rank in range(batch.cp):
        together |= digests.of_pools(pools, batch, ranks=[rank])
    assert together == digests.of_pools(pools, batch)
    now = set(batches.current_slots(batch).tolist())
    apart = digests.compare(together, digests.of_dense(dense, batch))
    assert {(d.request, d.position) for d in apart} == {
        (int(batches.slot_requests(batch)[slot]), slot - first)
        for slot in now
        for first in [
            batches.slot_requests(batch).tolist().index(int(batches.slot_requests(batch)[slot]))
        ]
    }


def test_a_changed_byte_and_a_missing_page_are_told() -> None:
    """With both digests, or None for the side that has no such page."""
    batch, _, dense = step()
    one = digests.of_dense(dense[0], batch)
    other = dense[0].clone()
    other[1, 7] ^= 1
    two = digests.of_dense(other, batch)
    del two[0, 0]
    assert digests.compare(one, two) == (
        Difference(request=0, position=0, one=one[0, 0], two=None),
        Difference(request=0, position=1, one=one[0, 1], two=two[0, 1]),
    )


def test_strided_and_fp8_pages_have_the_same_digests() -> None:
    """However the bytes lie in memory."""
    batch, _, dense = step()
    want = digests.of_dense(dense[0], batch)
    wide = torch.empty(len(dense[0]), 2 * dense.shape[-1], dtype=torch.uint8)
    wide[:, ::2] = dense[0]
    rows = torch.zeros(len(dense[0]), dense.shape[-1] + 5, dtype=torch.uint8)
    rows[:, :-5] = dense[0]
    assert digests.of_dense(wide[:, ::2], batch) == want
    assert digests.of_dense(rows[:, :-5], batch) == want
    assert digests.of_dense(dense[0].clone().view(torch.float8_e4m3fn), batch) == want


def test_what_has_no_place_is_refused() -> None:
    """A buffer of other slots, values that are no bytes, a page that no pool has."""
    batch, pools, dense = step()
    with pytest.raises(ValueError, match=r"3 pages are not 1[0-9] slots"):
        digests.of_dense(dense[0, :3], batch)
    with pytest.raises(ValueError, match="one byte a value, 2 dimensions"):
        digests.of_dense(dense[0].float(), batch)
    for empty in (dense[:0], dense[..., :0], dense[0, :, :0]):
        with pytest.raises(ValueError, match="layers and bytes of a page are 1 or more"):
            digests.of_dense(empty, batch)
    for ranks in ([9], [-1]):
        with pytest.raises(ValueError, match=rf"ranks are \[{ranks[0]}\]: .* of ranks 0 to 3"):
            digests.of_pools(pools, batch, ranks=ranks)
    with pytest.raises(ValueError, match="no such place"):
        digests.of_pools(pools[:, :, :1], batch)
    with pytest.raises(ValueError, match="is local page 0 of rank"):
        digests.of_pools(pools, replace(batch, local_page=torch.zeros_like(batch.local_page)))


def test_the_first_place_that_a_pool_has_not_is_refused() -> None:
    """The first page that the table has not, and the first row past a pool: no other rank's."""
    batch, pools, _ = step()
    held = batch.local_page.clone()
    held[batch.slot_pages[0]] = many = pools.shape[2]
    rank = int(batch.owner[batch.slot_pages[0]])
    with pytest.raises(ValueError, match=rf"is local page {many} of rank {rank}: no such place"):
        digests.of_pools(pools, replace(batch, local_page=held))
    pages = batch.slot_pages.clone()
    pages[0] = count = len(batch.owner)
    with pytest.raises(ValueError, match=rf"page {count} is local page -1 of rank -1: no such"):
        digests.of_pools(pools, replace(batch, slot_pages=pages))


def test_no_rank_has_no_page() -> None:
    """As a list that is empty says."""
    batch, pools, _ = step()
    assert digests.of_pools(pools, batch, ranks=[]) == {}


@pytest.mark.parametrize("page", [0, -1])
def test_a_request_has_a_page_in_every_slot(page: int) -> None:
    """Slots that name none, and requests of more pages than slots, are refused."""
    batch, pools, dense = step()
    pages = batch.slot_pages.clone()
    pages[1] = page
    with pytest.raises(ValueError, match=rf"slot 1 of request 0 is page {page}: no page"):
        digests.of_dense(dense, replace(batch, slot_pages=pages))
    short = replace(batch, slot_pages=batch.slot_pages[:2])
    with pytest.raises(ValueError, match=r"requests have \d+ pages; there are 2 slots"):
        digests.of_dense(dense[:, :2], short)
    with pytest.raises(ValueError, match=r"requests have \d+ pages; there are 2 slots"):
        digests.of_pools(pools, short)


def test_nothing_is_not_equal_to_nothing() -> None:
    """Two sides without a page were not compared; one without is told."""
    with pytest.raises(ValueError, match="nothing was compared"):
        digests.compare({}, {})
    lacks = Difference(request=0, position=0, one="a", two=None)
    assert digests.compare({(0, 0): "a"}, {}) == (lacks,)
