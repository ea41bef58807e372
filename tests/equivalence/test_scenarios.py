"""Scenarios are the prefills they name: windows, chunks, keys that are met again, real ties."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from equivalence import generate, ops, scenarios, texts
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.scenarios import SCENARIOS, Forward, Request, Scenario, count
from equivalence.verdict import Status
from refimpl import layer, topk
from refimpl.bits import as_int

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from equivalence.case import Case

SMALL = Scenario(
    name="small",
    steps=((Request(prompt=3), Request(prompt=3, stream=1)), (Request(prefix=4, prompt=2),)),
    chunk=4,
)
WINDOWS = {
    1: [([0, 0, 0, 3], [1, 2, 3, 4]), ([0, 0], [2, 3]), ([0, 0], [5, 6])],
    2: [([0, 0, 0, 1], [0, 1, 1, 1]), ([0, 0], [1, 1]), ([0, 0], [2, 3])],
    4: [([0, 0, 0, 0], [0, 0, 0, 0]), ([0, 0], [0, 0]), ([0, 0], [1, 1])],
}
# Rows and columns of each forward, in 512 tokens.
SIZES = {
    "cold-8k": [(16, 16)],
    "cold-60k": [(32, 32), (32, 64), (32, 96), (24, 120)],
    "cold-200k": [*((32, 32 * chunk) for chunk in range(1, 13)), (16, 400)],
    "batch-4x7k": [(32, 14 + 14 + 4), (10 + 14, 14 + 14)],
    "prefix-hit": [(32, 32), (24, 56), (2 + 4, 58 + 60)],
    "repeated-text": [(32, 32), (32, 64)],
    "tool-calls": [(16, 16), (4, 20), (4, 24), (4, 28), (4, 32), (4, 36), (4, 40)],
    "mixed-decode": [(8 + 8, 24 + 9 + 17 + 25 + 33 + 41 + 49 + 57 + 65)],
    "two-level": [*((32, 32 * chunk) for chunk in range(1, 5)), (4 + 2, 132 + 98)],
}
ROWS = ("q", "weights", "row_start", "row_end")
DRAWN = ("q", "k", "k_scale", "weights", "k_slots")


def small(scenario: str | Scenario, **given: Any) -> Iterator[Forward]:  # noqa: ANN401 - passed on
    """Few heads of few values."""
    return generate.forwards(scenario, **{"seed": 3, "heads": 16, "head_dim": 32, **given})


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same bytes."""
    return one.shape == other.shape and torch.equal(as_int(one), as_int(other))


def logits_of(case: Case) -> Tensor:
    """What the reference scores."""
    called: dict[str, Any] = {**case.inputs, **case.params}
    return layer.prefill_indexer(**called)["logits"]


def distinct(values: Tensor) -> int:
    """How many different rows there are."""
    return len(torch.unique(values, dim=0))


def cuts(forwards: Iterator[Forward]) -> tuple[float, float]:
    """Shares of the selecting rows that are cut inside a tie, and inside one of zeros."""
    rows = tied = zeros = 0
    for forward in forwards:
        case, k = forward.case, int(str(forward.case.params["topk"]))
        spans = zip(case.inputs["row_start"].tolist(), case.inputs["row_end"].tolist(), strict=True)
        for window, (start, end) in zip(logits_of(case), spans, strict=True):
            if end - start > k:
                legal = topk.legal_set(scores=window[start:end], k=k)
                cut = int(legal.ties.sum()) > legal.free
                rows, tied = rows + 1, tied + cut
                zeros += cut and bool((window[start:end][legal.ties] == 0).all())
    return tied / rows, zeros / rows


@pytest.mark.parametrize("ratio", WINDOWS)
def test_windows_are_those_of_the_requests(ratio: int) -> None:
    """A forward takes requests in order, cuts one at the chunk, and each row sees its own past."""
    got = [
        (f.case.inputs["row_start"].tolist(), f.case.inputs["row_end"].tolist())
        for f in small(SMALL, ratios=(ratio,))
    ]
    assert got == WINDOWS[ratio]
    owners = [f.case.inputs["row_to_request"].tolist() for f in small(SMALL, ratios=(ratio,))]
    assert owners == [[0, 0, 0, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_have_their_sizes(name: str) -> None:
    """Each forward has the rows and columns of its prompts, and every case is a valid one."""
    sizes = [ops.validate(f.case) for f in small(name, scale=512, ratios=(1,))]
    assert [(size["T"], size["L"]) for size in sizes] == SIZES[name]
    assert SIZES.keys() == SCENARIOS.keys()


def test_count_is_what_forwards_gives() -> None:
    """Layers go round the ratios, chunk after chunk, and count says how many there are."""
    given = list(small("batch-4x7k", scale=512, layers=2, ratios=(2, 4)))
    assert [(f.scenario, f.chunk, f.layer, f.ratio) for f in given] == [
        ("batch-4x7k", chunk, i, ratio) for chunk in (0, 1) for i, ratio in enumerate((2, 4, 2, 4))
    ]
    assert given[5].case.name == "batch-4x7k chunk 1 layer 1 ratio 4"
    assert count("batch-4x7k", scale=512, layers=2, ratios=(2, 4)) == len(given)
    assert {name: count(name) for name in SCENARIOS} == {
        name: 3 * len(sizes) for name, sizes in SIZES.items()
    }


def test_a_seed_is_its_bytes() -> None:
    """A seed gives the same bytes wherever it is used, another seed, layer or ratio other ones."""

    def four() -> list[dict[str, Tensor]]:
        given = small("tool-calls", scale=512, layers=2, ratios=(2, 4))
        return [dict(next(given).case.inputs) for _ in range(4)]

    given, again = four(), four()
    for one, two in zip(given, again, strict=True):
        assert [name for name in one if not same(one[name], two[name])] == []
    seeded = next(small("tool-calls", scale=512, seed=-4, ratios=(2,))).case.inputs
    for other in (seeded, given[1], given[2]):
        differ = {name for name in DRAWN if not same(given[0][name], other[name])}
        assert differ == set(DRAWN) - ({"k_slots"} if other is given[2] else set())
    assert same(given[0]["row_end"], seeded["row_end"])
    found = sha256()
    for name in DRAWN:
        found.update(as_int(given[0][name]).numpy().tobytes())
    assert found.hexdigest()[:16] == "3e7787ad7be935d9"


@pytest.mark.parametrize("name", ["cold-60k", "batch-4x7k", "prefix-hit"])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_chunks_are_one_prefill_cut(name: str, ratio: int) -> None:
    """Queries, weights and visible columns of the chunks together are those of one prefill."""
    whole = replace(SCENARIOS[name], chunk=1 << 20)
    assert count(whole, scale=256) < count(name, scale=256)
    cut, one = (
        [f.case.inputs for f in small(scenario, scale=256, ratios=(ratio,))]
        for scenario in (name, whole)
    )
    for field in ("q", "weights"):
        joined = [torch.cat([as_int(inputs[field]) for inputs in side]) for side in (cut, one)]
        assert torch.equal(*joined)
    visible = [torch.cat([i["row_end"] - i["row_start"] for i in side]) for side in (cut, one)]
    assert torch.equal(*visible)
    assert any(bool(inputs["row_start"].any()) for inputs in one) is (name != "cold-60k")


def test_a_chunk_meets_the_keys_of_the_chunks_before() -> None:
    """Keys, scales and slots of a chunk begin with those of the chunk before it."""
    for ratio in (1, 2, 4):
        chunks = [f.case.inputs for f in small("cold-60k", scale=256, ratios=(ratio,))]
        for before, after in pairwise(chunks):
            for name in ("k", "k_scale", "k_slots"):
                old = as_int(before[name])
                assert torch.equal(as_int(after[name])[: len(old)], old)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_a_prefix_hit_meets_the_keys_of_the_prefix(ratio: int) -> None:
    """Two requests hold the keys and slots that the prefix left, then each its own."""
    given = [f.case.inputs for f in small("prefix-hit", scale=256, ratios=(ratio,))]
    left, hit = given[1], given[2]
    held, one = 112 // ratio, (112 + 4) // ratio
    for name in ("k", "k_scale", "k_slots"):
        prefix, both = as_int(left[name]), as_int(hit[name])
        assert len(prefix) == held
        assert torch.equal(both[:held], prefix)
        assert torch.equal(both[one : one + held], prefix)
    own = {
        name: torch.cat([as_int(hit[name])[held:one], as_int(hit[name])[one + held :]])
        for name in ("k", "k_slots")
    }
    taken = torch.cat([left["k_slots"], own["k_slots"]])
    assert distinct(taken) == len(taken)
    assert int(taken.min()) >= 1
    assert distinct(own["k"]) == len(own["k"]) == 12 // ratio


def test_a_column_that_reaches_past_the_prefix_is_its_own() -> None:
    """Where a shared prefix ends inside a column, that column has another key and slot."""
    steps = ((Request(prompt=6),), (Request(prefix=3, prompt=3, stream=1, shared=3),))
    left, hit = (f.case.inputs for f in small(Scenario(name="fork", steps=steps), ratios=(2,)))
    met = [(as_int(hit[name])[:, None] == as_int(left[name])) for name in ("k", "k_slots")]
    assert met[0].all(2).tolist() == met[1].tolist() == [[True, False, False], *2 * [3 * [False]]]


@pytest.mark.parametrize(("name", "scale"), [*((n, 512) for n in SCENARIOS), ("cold-8k", 64)])
def test_the_reference_is_equal(name: str, scale: int) -> None:
    """The last forwards are EQUAL for the reference, and select where a window passes topk."""
    power = 0
    for forward in list(small(name, scale=scale, ratios=(1, 2, 4) if scale == 64 else (2,)))[-3:]:
        case = forward.case
        verdict = check(case, layer.prefill_indexer)
        longest = int((case.inputs["row_end"] - case.inputs["row_start"]).max())
        selects = longest > int(str(case.params["topk"]))
        assert verdict.findings == ()
        assert (verdict.status, bool(verdict.selecting)) == (Status.EQUAL, selects)
        power += selects
    assert power


def test_repeated_text_may_be_cut_another_way() -> None:
    """The highest of tied columns are legal picks of repeated text, and not those of lowest."""
    last = list(small("repeated-text", scale=256, ratios=(2,)))[-1]
    highest = partial(layer.prefill_indexer, ties="highest")
    assert check(last.case, highest, contract="ties=any").status is Status.EQUAL
    assert check(last.case, highest).status is Status.DIFFERENT


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_only_repeated_text_ties(ratio: int) -> None:
    """Most rows of repeated text are cut inside a tie, some of tools in zeros, few of cold text."""
    scaled = {"scale": 64, "topk": 512, "ratios": (ratio,)}
    cold, _ = cuts(small("cold-8k", **scaled))
    repeated, _ = cuts(small("repeated-text", **{**scaled, "scale": 128}))
    tools, zeros = cuts(small("tool-calls", **scaled))
    assert cold < 0.03
    assert repeated > 0.9
    assert tools > 0.4
    # No token that ends a column of 4 is dull in so short a period of this seed.
    assert (zeros > 0.1) is (ratio != 4)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_a_key_follows_from_all_its_tokens(ratio: int) -> None:
    """Another token anywhere in a column gives that column, and no other, another key."""
    text = texts.tokens("cold", end=11, seed=5)
    for at in range(8):
        other = text.clone()
        other[at] += 2
        one, two = (texts.keys(t, ratio=ratio, salted=7, head_dim=32)[0] for t in (text, other))
        moved = (as_int(one) != as_int(two)).any(1).nonzero().flatten().tolist()
        assert (len(one), moved) == (11 // ratio, [at // ratio])


def test_repeated_keys_are_few_and_some_score_zero() -> None:
    """A quarter of the repeated keys score 0 in each row; rows of the same tokens like no key."""
    case = next(small("repeated-text", scale=32, ratios=(1,), heads=64, head_dim=128)).case
    keys = as_int(case.inputs["k"])
    assert (len(keys), distinct(keys)) == (512, 32)
    rows = {name: case.inputs[name][-32:] for name in ROWS}
    logits = logits_of(replace(case, inputs={**case.inputs, **rows}))[:, :32]
    disliked = (logits == 0).all(0)
    assert torch.equal(disliked, (rows["weights"] <= 0).all(1))
    assert torch.equal((logits <= 0).all(1), disliked)
    assert int(disliked.sum()) == 8


def two_level(**given: Any) -> list[Forward]:  # noqa: ANN401 - passed on
    """Both steps of two-level, scaled down."""
    return list(small("two-level", **{"scale": 256, "ratios": (1, 2), "layers": 2, **given}))


def published(case: Case) -> Tensor:
    """What the reference publishes of a source layer."""
    called: dict[str, Any] = {**case.inputs, **case.params}
    return layer.prefill_indexer(**called)["mask"]


def test_consumers_pick_inside_the_mask_of_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of a ratio publishes; the others hold its mask of the same forward."""
    monkeypatch.setattr(scenarios, "_CELLS", 5 * 256)
    given = two_level(layers=3)
    assert [f.role for f in given[:6]] == 2 * ["source"] + 4 * ["consumer"]
    assert given[0].case.params == {"topk": 8, "topk_blocks": 8}
    assert given[2].case.params == {"topk": 8}
    names = [given[0].case.name, given[4].case.name]
    assert names == [
        "two-level chunk 0 layer 0 ratio 1 source",
        "two-level chunk 0 layer 4 ratio 1 consumer",
    ]
    some = [f for f in given if f.chunk in {2, 4}]
    sources = {(f.chunk, f.ratio): published(f.case) for f in some if f.role == "source"}
    for forward in some:
        if forward.role == "consumer":
            mask = forward.case.inputs["mask"]
            assert torch.equal(mask, sources[forward.chunk, forward.ratio])
    assert not any("mask" in f.case.inputs for f in small("repeated-text", scale=512, layers=2))


def test_sources_leave_blocks_out_at_ties() -> None:
    """On both ratios rows have more blocks than they publish, and blocks tie at the cutoff."""
    for source in (f for f in two_level(layers=1) if f.chunk == 4):
        case, mask = source.case, published(source.case)
        visible = case.inputs["row_end"] - case.inputs["row_start"]
        assert bool((mask.sum(1) < visible).all())
        called: dict[str, Any] = {**case.inputs, **case.params}
        assert not torch.equal(mask, layer.prefill_indexer(**called, ties="highest")["mask"])


def test_both_roles_are_judged() -> None:
    """The reference is EQUAL as either; a consumer that forgets its mask picks outside it."""
    last = two_level()[-4:]
    for forward in last:
        verdict = check(forward.case, layer.prefill_indexer)
        assert (verdict.status, verdict.findings) == (Status.EQUAL, ())

    def forgets(mask: Tensor, **called: Any) -> Any:  # noqa: ANN401 - a candidate
        return layer.prefill_indexer(**called, mask=torch.ones_like(mask))

    for consumer in last[2:]:
        found = check(consumer.case, forgets).findings
        assert {each.rule for each in found if each.stage == "raw_indices"} == {"mask-extra"}


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "name": (
        lambda: small("cold"),
        f"no scenario is named 'cold': one of {', '.join(SIZES)}",
    ),
    "count": (lambda: count("cold-8k", ratios=(2, 3)), "ratio 3: it is 1, 2 or 4"),
    "ratio": (lambda: small("cold-8k", ratios=(8,)), "ratio 8: it is 1, 2 or 4"),
    "no ratio": (lambda: small("cold-8k", ratios=()), "no ratio is given"),
    "layers": (lambda: small("cold-8k", layers=0), "layers is 0; each ratio has 1 or more"),
    "scale": (lambda: small("cold-8k", scale=0), "scale is 0; it is 1 to the chunk, 16,384"),
    "no chunk": (lambda: small(SMALL, scale=5), "scale is 5; it is 1 to the chunk, 4"),
    "topk": (
        lambda: small("cold-8k", scale=1024),
        "topk 2048 at scale 1024 is 2; it stays 4 or more",
    ),
    "heads": (
        lambda: small("cold-8k", heads=12),
        "heads is 12 and head_dim 32; multiples of 8, from 16 on, and of 32",
    ),
    "head_dim": (
        lambda: small("cold-8k", head_dim=48),
        "heads is 16 and head_dim 48; multiples of 8, from 16 on, and of 32",
    ),
    "blocks": (
        lambda: replace(SMALL, topk_blocks=-1),
        "topk_blocks is -1: it is 0 or more",
    ),
    "text": (
        lambda: Request(prompt=1, text="warm"),
        "no text is named 'warm': one of cold, repeated, tools",
    ),
    "request": (
        lambda: Request(prompt=1, shared=2),
        (
            "a request has prompt 1, prefix 0, shared 2, stream 0: prompt >= 1, stream >= 0,"
            " 0 <= shared <= prefix"
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_told_at_once(name: str) -> None:
    """What cannot be is refused in one sentence, before a tensor is made."""
    call, message = WRONG[name]
    with pytest.raises(UsageError) as told:
        call()
    assert str(told.value) == message
