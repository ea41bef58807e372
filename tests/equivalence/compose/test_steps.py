"""Steps of ranks: sizes of production, pages that earlier steps wrote, batches that may run."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence.case import Case
from equivalence.compose import requests, steps
from equivalence.errors import UsageError
from refimpl import batch as batches
from refimpl import compose
from refimpl.batch import Batch
from refimpl.bits import as_int

KINDS = ("token", "index")
NAMES = ("slot_pages", "owner", "local_page", "writer", "prefix_lens", "extend_lens")


def batch_of(case: Case) -> Batch:
    """The batch of a step."""
    tensors: dict[str, Any] = {name: case.inputs[name] for name in NAMES}
    return Batch(**tensors, cp=int(str(case.params["cp"])), page_size=requests.PAGE_SIZE)


def composed(case: Case, kind: str) -> Tensor:
    """The dense buffer of one kind, u8 [layers, S, page bytes]; raises where a rule is broken."""
    given: dict[str, Any] = {name: case.inputs[name] for name in NAMES}
    pools, rows = case.inputs[f"{kind}_pools"], case.inputs[f"{kind}_rows"]
    dense = compose.compose_pages(pools=pools, rows=rows, kind=kind, **given, **case.params)  # type: ignore[arg-type] # cp, page_size, staging_pages
    return as_int(dense)


@pytest.mark.parametrize("name", requests.NAMES)
@pytest.mark.parametrize(("cp", "scale"), [(8, 1), (1, 4), (3, 16)])
def test_every_step_may_run(name: str, cp: int, scale: int) -> None:
    """No rule of composition is broken, at any scale and on any number of ranks."""
    cases = steps.sequence(name, cp=cp, layers=1, kinds=("index",), scale=scale)
    assert len(cases) >= 3
    assert [case.op for case in cases] == ["compose_pages"] * len(cases)
    for case in cases:
        assert composed(case, "index").shape[2] == 64 * 132


@pytest.mark.parametrize("name", requests.NAMES)
def test_what_a_step_writes_is_what_later_ones_read(name: str) -> None:
    """A page that two steps hold has the bytes of its last writer, token by token."""
    cases = steps.sequence(name, layers=1)
    for kind in KINDS:
        known: dict[int, Tensor] = {}
        read = 0
        for case in cases:
            batch, dense = batch_of(case), composed(case, kind)
            now = set(batches.current_slots(batch).tolist())
            full = batches.row_locations(batch).long() // batch.page_size
            for slot, page in enumerate(batch.slot_pages.tolist()):
                if slot not in now and page in known:
                    assert torch.equal(dense[:, slot], known[page])
                    read += 1
                if slot in now and int((full == slot).sum()) == batch.page_size:
                    known[page] = dense[:, slot]
        assert read or name not in {"chunk", "cache-hits", "mixed", "page-tail", "bs-9-12"}


def test_old_data_would_show() -> None:
    """A page that a step writes has other bytes than its slot had, and than other layers have."""
    for before, after in pairwise(steps.sequence("bs-5-8", layers=3)):
        now = batches.current_slots(batch_of(after))
        for kind in KINDS:
            old, new = composed(before, kind), composed(after, kind)
            seen = now[now < old.shape[1]]
            assert bool((old[:, seen] != new[:, seen]).any(2).all())
            assert bool((new[:2, now] != new[1:, now]).any(2).all())


def test_the_sizes_are_those_of_production() -> None:
    """A chunk of 512 tokens after 2,048, in fp8: 656 and 132 bytes a token, 64 tokens a page."""
    first, *_ = steps.sequence("chunk")
    assert (first.inputs["prefix_lens"].tolist(), first.inputs["extend_lens"].tolist()) == (
        [2048],
        [512],
    )
    assert {
        name: (tuple(first.inputs[name].shape), first.inputs[name].dtype)
        for name in ("token_pools", "token_rows", "index_pools", "index_rows")
    } == {
        "token_pools": ((8, 8, 10, 41_984), torch.float8_e4m3fn),
        "token_rows": ((8, 512, 656), torch.float8_e4m3fn),
        "index_pools": ((8, 8, 10, 8_448), torch.float8_e4m3fn),
        "index_rows": ((8, 512, 132), torch.float8_e4m3fn),
    }


def test_each_scenario_has_what_its_name_says() -> None:
    """Cold, chunked, cached, mixed, cut inside a page, single tokens, 1 to 12 requests."""
    made = {name: steps.sequence(name, layers=1, kinds=("index",)) for name in requests.NAMES}

    def lens(name: str, which: str) -> list[list[int]]:
        return [case.inputs[f"{which}_lens"].tolist() for case in made[name]]

    assert not any(map(sum, lens("cold", "prefix")))
    assert lens("chunk", "prefix") == [[2048], [2560], [3072]]
    assert [len(each) for each in lens("cache-hits", "extend")] == [1, 5, 12]
    assert [each[0] for each in lens("mixed", "extend")] == [512, 512, 512]
    assert {len(each) for each in lens("mixed", "extend")} == {4}
    assert lens("page-tail", "prefix")[1] == [700]
    assert {extend for each in lens("decode", "extend") for extend in each} == {1}
    sizes = [len(each) for name in requests.NAMES[-3:] for each in lens(name, "extend")]
    assert sizes == list(range(1, 13))
    shared = made["cache-hits"][2].inputs["slot_pages"]
    assert len(set(shared.tolist())) < len(shared)
    carried = batch_of(made["page-tail"][1])
    page = int(carried.slot_pages[batches.current_slots(carried)[0]])
    assert int(carried.owner[page]) == int(carried.writer[0])


def test_a_prefix_keeps_a_page_at_any_scale() -> None:
    """And a request a new token."""
    (first,), *_ = requests.plan("chunk", scale=1 << 20)
    assert (first.prefix, first.extend) == (requests.PAGE_SIZE, 1)


def test_a_text_keeps_what_a_shorter_prefix_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads all of it afterwards reads all that was written."""
    whole = requests.Request(text="a", extend=128)
    part = requests.Request(text="b", of="a", prefix=64, extend=1)
    monkeypatch.setattr(steps, "plan", lambda _, *, scale: [[whole], [part], [whole]] * scale)
    cases = steps.sequence("cold", cp=2, layers=1, kinds=("index",))
    assert [case.inputs["prefix_lens"].tolist() for case in cases] == [[0], [64], [128]]


def test_ranks_take_turns_to_write_first() -> None:
    """From request to request, and from step to step."""
    told = []
    for case in steps.sequence("cold", layers=1, kinds=("index",)):
        lens = case.inputs["extend_lens"].long()
        told.append(case.inputs["writer"][lens.cumsum(0) - lens].tolist())
    assert told == [[0], [1], [2, 3]]


def test_the_same_seed_makes_the_same_bytes() -> None:
    """Another one makes others, and other owners."""
    one, same, other = (
        steps.sequence("bs-1-4", cp=4, layers=1, seed=seed, scale=4)[2] for seed in (1, 1, 2)
    )
    assert all(
        torch.equal(as_int(one.inputs[name]), as_int(same.inputs[name])) for name in one.inputs
    )
    assert not torch.equal(as_int(one.inputs["index_pools"]), as_int(other.inputs["index_pools"]))
    assert not torch.equal(one.inputs["owner"], other.inputs["owner"])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"name": "warm"}, "no scenario is named 'warm': there are cold, chunk, cache-hits, "),
        ({"scale": 0}, "scale is 0: it is 1 or more"),
        ({"cp": 0}, "cp is 0: it is 1 or more"),
        ({"layers": 0}, "layers is 0: it is 1 or more"),
        ({"seed": -1}, "seed is -1: it is 0 or more"),
        ({"seed": 2**63}, "seed is 9223372036854775808: it is 0 to 9223372036854775807"),
        ({"kinds": ()}, "kinds are none: token or index, or both"),
        ({"kinds": ("page",)}, "kinds are page: token or index, or both"),
        ({"kinds": ("token", "token")}, "kinds are token, token: token or index, or both"),
    ],
)
def test_what_makes_no_sequence_is_refused(wrong: dict[str, object], sentence: str) -> None:
    """The sentence says what there is."""
    given = {"name": "cold", **wrong}
    with pytest.raises(UsageError) as refused:
        steps.sequence(**given)  # type: ignore[arg-type] # wrong on purpose
    assert str(refused.value).startswith(sentence)
