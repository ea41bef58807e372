"""Each fault on demand shows where it must, and what is no fault stays equal."""

from typing import Any

import pytest
import torch
from drawn_steps import Step, differing, run, step

from equivalence.checks.composed.strayed import REGIONS
from equivalence.paths.ipc import candidate, exported, faulty, known
from equivalence.paths.ipc.candidate import RanksFailed
from equivalence.paths.ipc.faulty import FAULTS, Fault
from equivalence.paths.ipc.step import compose
from equivalence.world.threads import Threads

KINDS = ("token", "index")
STEP = step([(8, 9), (4, 0), (0, 14)], cp=3, layers=4)
ONE_KIND = step([(8, 9), (4, 0), (0, 14)], cp=3, layers=4, kinds=["index"])
ANOTHER = step([(8, 9), (4, 0), (0, 14)], cp=3, layers=4, seed=1)
EVERY = [(name, way) for name, told in FAULTS.items() for way in told.ways]
LEGAL = [(name, way) for name, way in EVERY if not FAULTS[name].rules]
ENDING = [(name, way) for name, way in EVERY if FAULTS[name].rules == ("crash", "timeout")]
WRONG = [pair for pair in EVERY if pair not in LEGAL + ENDING]


def fitting(name: str) -> Step:
    """A step that has what a fault needs."""
    return ONE_KIND if "one kind" in FAULTS[name].needs else STEP


def faulted(name: str, way: str, **more: Any) -> tuple[Step, dict[str, torch.Tensor]]:  # noqa: ANN401 - as Fault
    """What ranks hold after a step with a fault, the second one where it takes two."""
    ranks = candidate.local(way, fault=Fault(name=name, **more))
    wanted = fitting(name)
    if "two turns" in FAULTS[name].needs:
        assert differing(run(ranks, wanted), wanted) == []
        wanted = ANOTHER
    return wanted, run(ranks, wanted)


@pytest.mark.parametrize(("name", "way"), LEGAL)
def test_what_may_happen_changes_no_byte(name: str, way: str) -> None:
    """Late writers and late readers are no fault: barriers and halves are there for them."""
    wanted, got = faulted(name, way, delay=0.001)
    assert differing(got, wanted) == []


@pytest.mark.parametrize(("name", "way"), ENDING)
def test_a_rank_that_is_gone_or_silent_ends_all(name: str, way: str) -> None:
    """With one error that names a rank."""
    # A rank that waits elsewhere is seen by the limit alone; the others fail before it.
    limit = 3 if name == "own-capability" else None
    fault = Fault(name=name, rank=1, turn=2)
    ranks = candidate.local(way, fault=fault, timeout=limit)
    with pytest.raises(RanksFailed, match=r"rank \d") as caught:
        run(ranks, STEP)
    assert caught.value.rule in ("crash", "timeout")
    if name.startswith("killed"):
        assert caught.value.rank == 1
        assert str(caught.value).startswith("rank 1 raised Killed: rank 1 is killed")


@pytest.mark.parametrize(("name", "way"), WRONG)
def test_a_fault_shows(name: str, way: str) -> None:
    """In bytes, or in writes outside of what a step may write."""
    wanted, got = faulted(name, way)
    wrong = differing(got, wanted)
    assert wrong != []
    assert ("strays" in wrong) <= ("wrote-outside" in FAULTS[name].rules)
    assert wrong != ["strays"] or FAULTS[name].rules == ("wrote-outside",)


@pytest.mark.parametrize(("name", "way"), WRONG)
def test_a_fault_shows_alike_each_time(name: str, way: str) -> None:
    """No fault depends on how long anything takes."""
    first, second = (faulted(name, way)[1] for _ in range(2))
    for output, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[output].view(torch.uint8)), output


@pytest.mark.parametrize("way", known.STAGED)
def test_a_page_past_the_end_of_a_staging_is_a_stray_write(way: str) -> None:
    """All pages come out right; the reserved row of half 1 and the guard tell."""
    wanted, got = faulted("overflow-past", way)
    assert differing(got, wanted) == ["strays"]
    told = {
        (KINDS[kind], REGIONS[region], first, page)
        for first, kind, region, page, *_ in got["strays"].flatten(0, 1).tolist()
        if first >= 0
    }
    staging = REGIONS.index("staging")
    assert told == {
        *((kind, "staging", 1, 0) for kind in KINDS),
        *((kind, "guard", staging, 1) for kind in KINDS),
    }


@pytest.mark.parametrize("way", known.STAGED)
def test_the_reserved_row_of_a_staging_is_nobodys(way: str) -> None:
    """Whoever stages in row 0 is told, half by half and kind by kind."""
    _, got = faulted("row-zero", way)
    told = [row for row in got["strays"].flatten(0, 1).tolist() if row[0] >= 0]
    assert sorted(row[:4] for row in told) == [
        [half, kind, REGIONS.index("staging"), 0] for half in (0, 1) for kind in (0, 1)
    ]


def test_a_stray_write_is_told_once() -> None:
    """Guards are put right, and what was told is how the next step finds it."""
    ranks = faulty_then_right("overflow-past")
    with pytest.raises(AssertionError, match="strays"):
        assert differing(run(ranks[0], STEP), STEP) == []
    assert differing(run(ranks[1], STEP), STEP) == []


def faulty_then_right(name: str) -> list[Any]:
    """Two candidates over the same threads."""
    pool = Threads(3)
    fault = Fault(name=name)
    return [candidate.over(pool, "direct", fault=fault), candidate.over(pool, "direct")]


def test_the_late_page_of_a_missing_release_is_the_one_two_layers_before() -> None:
    """A reader sees its half as it was left."""
    wanted, got = faulted("no-release", "direct")
    pages = wanted.want()["token"]
    slot = 2
    assert torch.equal(got["token_pages"][1, 2:, slot].view(torch.uint8), pages[:2, slot])
    assert (got["token_pages"][1, :2, slot].view(torch.uint8) == exported.POISON).all()


def test_a_half_reused_holds_the_next_layer() -> None:
    """The late reader sees what the others have written since."""
    wanted, got = faulted("half-reused", "staging")
    pages = wanted.want()["index"]
    slot = 2
    rank = 1
    assert torch.equal(got["index_pages"][rank, 0, slot].view(torch.uint8), pages[1, slot])
    assert torch.equal(got["index_pages"][rank, 1:].view(torch.uint8), pages[1:])


def test_a_plan_by_address_is_the_first_batchs() -> None:
    """Prefix pages of the second batch are those of the first one's plan."""
    first, second = (step([(8, 0)], cp=2, seed=seed, padding=0, kinds=["token"]) for seed in (0, 0))
    second = Step(
        inputs={**second.inputs, "slot_pages": second.inputs["slot_pages"].flip(0)},
        params=second.params,
    )
    ranks = candidate.local("direct", fault=Fault(name="address-key"))
    assert differing(run(ranks, first), first) == []
    got = run(ranks, second)["token_pages"].view(torch.uint8)
    assert torch.equal(got[1], first.want()["token"])


@pytest.mark.parametrize("bits", [8, 9])
def test_an_offset_wraps_where_it_is_told_to(bits: int) -> None:
    """Of 24-byte pages, bytes 2**(bits - 1) on read as zeros, and 2**bits on as the first ones."""
    wanted, got = faulted("offset-wrap", "fused", wrap_bits=bits)
    batch = wanted.batch
    rows = batch.local_page.long()[batch.slot_pages[:2].long()]
    for slot, row in enumerate(rows.tolist()):
        offset = row * 24 % (1 << bits)
        pool = wanted.inputs["token_pools"].view(torch.uint8)
        flat = pool[0, int(batch.owner[int(batch.slot_pages[slot])])].flatten()
        want = flat[offset : offset + 24] if offset < 1 << (bits - 1) else torch.zeros(24)
        assert torch.equal(got["token_pages"][0, 0, slot].view(torch.uint8), want.byte())


@pytest.mark.parametrize(
    ("fault", "way", "says"),
    [
        ({"name": "none such"}, "direct", "no fault named 'none such': one of producer-delay"),
        ({"name": "row-zero"}, "legacy", "row-zero has no place in legacy: it is one of staging"),
        ({"name": "row-zero", "rang": 1}, "direct", "rang"),
        ({"rank": 1}, "direct", "name"),
        ({"name": "slow-reader", "rank": 3}, "direct", "rank 3: there are 3"),
        ({"name": "slow-reader", "delay": -1}, "direct", "slow-reader: delay is -1; rank is 0 to"),
    ],
)
def test_a_fault_that_is_none_is_refused(fault: dict[str, Any], way: str, says: str) -> None:
    """By the sentence that says what there is."""
    outcomes = Threads(3).run(compose, inputs=STEP.inputs, way=way, fault=fault, **STEP.params)
    assert all("UsageError" in outcome.message for outcome in outcomes)
    assert says in outcomes[0].message


def test_a_fault_is_data() -> None:
    """It comes back as it went."""
    fault = Fault(name="offset-wrap", rank=2, turn=3, delay=0.5, wrap_bits=16)
    assert faulty.read(fault.as_json(), way="fused") == fault


def test_what_a_fault_needs_is_told() -> None:
    """Each need has its words, and a step that lacks it."""
    assert {need for told in FAULTS.values() for need in told.needs} == set(known.NEEDS)
    bare = step([], cp=1).batch
    lacks = {
        name: faulty.lacking(Fault(name=name), batch=bare, kinds=2, layers=1) for name in FAULTS
    }
    for name, told in FAULTS.items():
        assert lacks[name] == [need for need in told.needs if need != "values"]
        fit = fitting(name)
        given: dict[str, Any] = {"batch": fit.batch, "kinds": len(fit.kinds), "layers": 4}
        assert faulty.lacking(Fault(name=name), earlier=[ANOTHER.batch], **given) == []
        again = faulty.lacking(Fault(name=name), earlier=[fit.batch], **given)
        assert again == [need for need in told.needs if need == "two turns"]


@pytest.mark.parametrize(
    ("fault", "lacks", "why"),
    [
        (Fault(name="row-zero"), [["two ranks", "current"], ["current"]], "a slot that is written"),
        (Fault(name="killed-after", turn=7), [[]], "a step that comes to round 7"),
        (Fault(name="added-by-value"), [[]], "a byte 0x80 or 0xff in it"),
    ],
)
def test_the_need_that_is_missing_is_told(fault: Fault, lacks: list[list[str]], why: str) -> None:
    """Of the step that lacks least."""
    assert faulty.unmet(fault, lacks) == f"it needs {why}"


def test_a_fault_that_lacks_nothing_is_hidden_by_bytes() -> None:
    """Another page may hold the same ones."""
    assert faulty.unmet(Fault(name="wrong-owner"), [[]]) == "the bytes of these steps hide it"
