"""A/B: what is compared, what is judged, what the caller still gets whatever arms do."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import pytest
import tied
import tiny
import torch
from torch import Tensor

from equivalence import ab, ops, receipt, scenarios, store
from equivalence.case import Case
from equivalence.errors import UsageError
from equivalence.live.watch import Shadow
from equivalence.paths.chunked import chunked, original
from equivalence.verdict import Status
from equivalence.versus import ledger, turns
from equivalence.versus.forwards import (
    AGAIN,
    ALL,
    CANDIDATE,
    ORIGINAL,
    Agreement,
    Arm,
    Comparison,
    Difference,
    Forward,
)
from equivalence.versus.ledger import About, Ledger
from refimpl import fast, scoring
from refimpl.topk import ragged_topk

Call = dict[str, Any]


def sets(comparison: Comparison, stage: str = ALL) -> Agreement:
    """How often an output held the same sets."""
    return comparison.total.agreement["sets"][stage]


def p_of(comparison: Comparison) -> list[float | None]:
    """Every p-value."""
    return [test.p for test in comparison.evidence]


def compare(first: Any, second: Any, count: int = 4, **options: Any) -> Comparison:  # noqa: ANN401 - callables and options
    """Two selectors over layer-forwards of fifty rows, both free in order and ties."""
    return ab.compare(first, second, tied.forwards(count), **{"contract": tied.FREE, **options})


def shadow(first: Any, second: Any, **options: Any) -> Shadow:  # noqa: ANN401 - callables and options
    """A selector that is watched."""
    return ab.shadow(first, second, **{"op": "ragged_topk", "contract": tied.FREE, **options})


# What is compared and judged


def test_an_honest_random_selector_is_never_called_wrong() -> None:
    """Two runs that break ties at random differ as often as one differs from itself."""
    got = compare(tied.honest, tied.honest, 48)
    assert (got.status, got.why) == (Status.EQUAL, ())
    assert got.arms == dict.fromkeys((ORIGINAL, AGAIN, CANDIDATE), Status.EQUAL)
    assert min(p or 0 for p in p_of(got)) > 0.01
    assert sets(got).only_new > 0
    assert 12 < sets(got).forwards - sets(got).control_equal < 36


def test_one_winner_lost_in_one_row_of_fifty_is_told() -> None:
    """The test is sure, the candidate alone is wrong, and the row is named."""
    got = compare(tied.honest, tied.loses, 48)
    assert max(p if p is not None else 1 for p in p_of(got)) < 1e-6
    assert got.arms == {
        ORIGINAL: Status.EQUAL,
        AGAIN: Status.EQUAL,
        CANDIDATE: Status.DIFFERENT,
    }
    assert got.status is Status.DIFFERENT
    assert got.why == ("the candidate breaks the contract in 48 layer-forwards",)
    assert {one.arms[CANDIDATE].failing for one in got.forwards} == {(17,)}
    assert [f.row for f in got.failing[0].verdicts[0].findings] == [17]


def test_the_p_value_makes_nothing_illegal() -> None:
    """A candidate that always differs from a deterministic original, legally, is EQUAL."""
    got = compare(tied.fixed, tied.last, 48)
    assert sets(got).new_equal == 24
    assert max(p if p is not None else 1 for p in p_of(got)) < 1e-6
    assert (got.status, got.why) == (Status.EQUAL, ())
    assert got.control == "deterministic original: 48 runs again, no difference"


def test_the_p_value_makes_nothing_legal() -> None:
    """One row wrong in one layer-forward is DIFFERENT, and p is far from small."""
    got = compare(tied.fixed, tied.loses, 1)
    assert got.status is Status.DIFFERENT
    assert min(p or 0 for p in p_of(got)) == 0.5


def test_an_illegal_original_is_said_to_be_one() -> None:
    """The candidate is not blamed for what the original does."""
    got = compare(tied.loses, tied.honest)
    assert got.arms == {
        ORIGINAL: Status.DIFFERENT,
        AGAIN: Status.DIFFERENT,
        CANDIDATE: Status.EQUAL,
    }
    assert got.why == tuple(
        f"the {arm} breaks the contract in 4 layer-forwards, whatever the candidate does"
        for arm in (ORIGINAL, AGAIN)
    )


def test_without_a_control_nothing_is_equal() -> None:
    """A control that was not asked for leaves the status undecided, but never hides a fault."""
    got = compare(tied.honest, tied.honest, control=False)
    assert (got.status, got.why) == (Status.UNDECIDED, ("the control arm was not run",))
    assert (got.control, set(got.arms)) == (got.why[0], {ORIGINAL, CANDIDATE})
    assert {test.note for test in got.evidence} == {"no pair: the original was never run again"}
    assert compare(tied.honest, tied.loses, control=False).status is Status.DIFFERENT


def test_nothing_compared_is_undecided() -> None:
    """No layer-forward at all concludes nothing."""
    got = compare(tied.honest, tied.honest, 0)
    assert (got.status, got.why) == (Status.UNDECIDED, ("no layer-forward was compared",))


def test_windows_that_fit_into_k_have_no_power() -> None:
    """Where no row selects, equal outputs conclude nothing."""
    short = [replace(tiny.topk(), params={"k": 32}, recorded=())]
    got = ab.compare(tied.fixed, tied.fixed, short)
    assert got.status is Status.UNDECIDED
    assert got.why == ("no row selects: every window fits into k",)


def test_masks_of_chunks_are_those_of_one_call() -> None:
    """Sources publish bit for bit what one call publishes, and their consumers pick inside it."""
    two = scenarios.SCENARIOS["two-level"]
    made = scenarios.forwards(
        replace(two, steps=two.steps[1:]),
        seed=1,
        scale=128,
        layers=2,
        ratios=(1, 2),
        heads=16,
        head_dim=32,
    )
    got = ab.compare(original, partial(chunked, budget_bytes=1 << 13), made, sample=8)
    assert (got.status, got.why) == (Status.EQUAL, ())
    published = Agreement(
        forwards=2, new_equal=2, controls=2, control_equal=2, pairs=2, rows=2 * 24
    )
    assert got.total.masks == {ALL: published, "mask": published}
    assert [one.masks for one in got.forwards] == 2 * [("mask",)] + 2 * [()]
    assert sets(got).new_equal == sets(got).forwards == 4
    assert got.paths[CANDIDATE][0].calls > got.paths[ORIGINAL][0].calls


@pytest.mark.parametrize("name", ["batch-4x7k", "prefix-hit"])
def test_chunks_give_what_one_call_gives(name: str) -> None:
    """Every table of a scaled scenario is full: logits, picks and pages, in order and as sets."""
    made = scenarios.forwards(name, seed=1, scale=256, heads=16, head_dim=32, ratios=(1, 2))
    got = ab.compare(
        partial(original, keep_logits=True),
        partial(chunked, keep_logits=True, budget_bytes=1024),
        made,
        sample=8,
    )
    assert (got.status, got.why) == (Status.EQUAL, ())
    count = scenarios.count(name, scale=256, ratios=(1, 2))
    for stages in got.total.agreement.values():
        assert set(stages) == {ALL, "logits", "raw_indices", "page_indices"}
        assert {(s.forwards, s.new_equal, s.control_equal) for s in stages.values()} == {
            (count, count, count)
        }
    assert {group.place["ratio"] for group in got.groups} == {1, 2}
    assert got.paths[CANDIDATE][0].calls > got.paths[ORIGINAL][0].calls


def test_arms_get_what_they_need_to_be_compared(tmp_path: Path) -> None:
    """Files of cases are compared as cases in memory are, and what they recorded is not read."""
    wrong = ({"raw_indices": torch.full((4, 8), 3, dtype=torch.int32)},)
    tiny.put(tmp_path, tiny.topk(recorded=wrong))
    got = ab.compare(tied.fixed, tied.fixed, store.load_cases(tmp_path))
    assert (got.status, got.total.forwards) == (Status.EQUAL, 1)


def test_a_buffer_that_is_handed_out_unwritten_shows() -> None:
    """A candidate that leaves the original's own buffer as it is gives nothing right."""

    def idle(**_: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        return BUFFER

    for seed in range(4):
        got = compare(reuses, idle, 2, seed=seed)
        assert got.arms[CANDIDATE] is Status.DIFFERENT
        assert (got.arms[ORIGINAL], got.arms[AGAIN]) == (Status.EQUAL, Status.EQUAL)
    assert compare(reuses, reuses, 2).status is Status.EQUAL


# Rows outside the sample


def layer(**changes: Any) -> Case:  # noqa: ANN401 - fields of a Case
    """Sixty rows over 80 keys, 16 heads of 32, four picks a row."""
    random = torch.Generator().manual_seed(3)
    rows, columns = 60, 80
    case = Case(
        op="prefill_indexer",
        inputs={
            "q": torch.randn(rows, 16, 32, generator=random).to(torch.float8_e4m3fn),
            "k": torch.randn(columns, 32, generator=random).to(torch.float8_e4m3fn),
            "k_scale": torch.rand(columns, generator=random) + 0.5,
            "weights": torch.rand(rows, 16, generator=random),
            "row_start": torch.zeros(rows, dtype=torch.int32),
            "row_end": torch.full((rows,), columns, dtype=torch.int32),
        },
        params={"topk": 4},
        arithmetic="deep_gemm.sm90",
        name="layer",
    )
    return replace(case, **changes)


def picks(
    case_rows: slice = slice(0, 0), *, logits: bool = True
) -> Callable[..., dict[str, Tensor]]:
    """The layer itself, but these rows pick a column of no merit in their last slot."""

    def call(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a candidate's keywords
        outputs = original(**inputs, keep_logits=True)
        worst = outputs["logits"].argmin(1).int()
        outputs["raw_indices"][case_rows, 3] = worst[case_rows]
        return outputs if logits else {"raw_indices": outputs["raw_indices"]}

    return call


SOME = slice(5, 55)


def test_rows_outside_the_sample_are_judged_by_the_originals_logits() -> None:
    """Every row where the sets differ is judged, and all wrong ones are counted."""
    got = ab.compare(picks(), picks(SOME), [layer()], sample=8)
    (one,) = got.forwards
    assert (one.sampled, one.further, one.unclassified) == (8, one.further, ())
    assert one.arms[CANDIDATE].wrong == 50
    assert [v.scores for v in got.failing[0].verdicts] == ["reference deep_gemm.sm90", "baseline"]
    assert got.arms[ORIGINAL] is Status.EQUAL


def test_without_logits_the_reference_judges_as_many_rows_again() -> None:
    """What is left is unclassified, by number, and the whole is not EQUAL."""
    legal = ab.compare(picks(logits=False), picks(logits=False), [layer()], sample=8)
    assert legal.status is Status.EQUAL
    got = ab.compare(picks(logits=False), picks(SOME, logits=False), [layer()], sample=8)
    (one,) = got.forwards
    assert (one.sampled, one.further) == (8, 8)
    assert one.arms[CANDIDATE].wrong + len(one.unclassified) == 50
    assert "rows unclassified: arms differ there, and no logits or scores judge them" in got.why[1]


def test_rows_where_arms_differ_come_first_into_the_sample() -> None:
    """Two wrong rows of sixty are in a sample of eight."""
    got = ab.compare(picks(), picks(slice(20, 22)), [layer()], sample=8)
    (one,) = got.forwards
    assert (one.sampled, one.further, one.arms[CANDIDATE].failing) == (8, 0, (20, 21))


def test_unclassified_rows_are_undecided_though_every_judged_row_is_legal() -> None:
    """Two legal ways through ties differ in every row; those that nothing judged count."""
    case = layer()
    twice = {
        name: case.inputs[name][:40].repeat(2, *[1] * (case.inputs[name].dim() - 1))
        for name in ("k", "k_scale")
    }
    case = tiny.swap(replace(case, params={"topk": 3}), **twice)

    def ties(which: Literal["lowest", "highest"]) -> Callable[..., Tensor]:
        def call(*, topk: int, **inputs: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
            rows = {name: inputs[name] for name in ("row_start", "row_end")}
            return ragged_topk(
                scores=scoring.mqa_logits(**inputs), **rows, k=topk, order="any", ties=which
            )

        return call

    for sample, status, left in ((30, Status.EQUAL, 0), (8, Status.UNDECIDED, 44)):
        got = ab.compare(ties("lowest"), ties("highest"), [case], contract=tied.FREE, sample=sample)
        (one,) = got.forwards
        assert {arm.status for arm in one.arms.values()} == {Status.EQUAL}
        assert (one.status, got.status, len(one.unclassified)) == (status, status, left)
        assert one.new["raw_indices"] == Difference(rows=60, slots=60, sets=60)


def test_rows_that_nothing_can_judge_are_undecided() -> None:
    """Without a bit model, logits or scores even equal picks conclude nothing."""
    case = layer(arithmetic=None)
    got = ab.compare(picks(logits=False), picks(SOME, logits=False), [case], sample=8)
    assert got.status is Status.UNDECIDED
    assert got.forwards[0].arms[CANDIDATE].status is Status.UNDECIDED
    assert len(got.forwards[0].unclassified) > 40


def test_the_originals_logits_judge_where_there_is_no_bit_model() -> None:
    """Its own picks are judged by them as well."""
    case = layer(arithmetic=None)
    assert ab.compare(picks(), picks(), [case], sample=8).status is Status.EQUAL
    got = ab.compare(picks(SOME), picks(), [case], sample=8)
    assert (got.arms[ORIGINAL], got.arms[CANDIDATE]) == (Status.DIFFERENT, Status.EQUAL)


def test_logits_that_are_wrong_do_not_judge() -> None:
    """An original whose scores are not the reference's cannot make the candidate wrong."""

    def astray(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a candidate's keywords
        outputs = picks(SOME)(**inputs)
        outputs["logits"] = outputs["logits"] * 2
        return outputs

    got = ab.compare(astray, picks(), [layer()], sample=8)
    assert "nondeterminism" not in str(got.failing)
    assert got.arms[ORIGINAL] is Status.DIFFERENT
    assert got.arms[CANDIDATE] is Status.EQUAL


def test_logits_that_are_wrong_outside_the_sample_do_not_judge_either() -> None:
    """Where they find fault the reference is asked, and the original is what it finds wrong."""
    case, astray = layer(params={"topk": 3}), 30
    twice = {
        name: case.inputs[name][:40].repeat(2, *[1] * (case.inputs[name].dim() - 1))
        for name in ("k", "k_scale")
    }

    def ties(which: Literal["lowest", "highest"], spoilt: int = 0) -> Callable[..., Any]:
        def call(*, topk: int, **inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a candidate's keywords
            rows = {name: inputs[name] for name in ("row_start", "row_end")}
            logits = scoring.mqa_logits(**inputs)
            logits[astray, :spoilt] = logits[astray, :spoilt].flip(0)
            raw = ragged_topk(scores=logits, **rows, k=topk, order="any", ties=which)
            return {"logits": logits, "raw_indices": raw} if spoilt else {"raw_indices": raw}

        return call

    got = ab.compare(
        ties("lowest", 80),
        ties("highest"),
        [tiny.swap(case, **twice)],
        contract=tied.FREE,
        sample=8,
    )
    (one,) = got.forwards
    assert {name: arm.failing for name, arm in one.arms.items()} == {
        ORIGINAL: (astray,),
        AGAIN: (astray,),
        CANDIDATE: (),
    }
    assert one.arms[CANDIDATE].status is Status.EQUAL
    assert (one.sampled, one.further, len(one.unclassified)) == (8, 1, 51)


def test_a_baseline_judges_where_there_is_no_bit_model() -> None:
    """Its logits stand for the reference, for every arm."""
    case = layer(arithmetic=None)
    mute = picks(logits=False)
    assert ab.compare(mute, mute, [case], baseline=picks()).status is Status.EQUAL
    got = ab.compare(mute, picks(SOME, logits=False), [case], baseline=picks())
    assert got.forwards[0].arms[CANDIDATE].wrong == 50
    assert {v.scores for v in got.failing[0].verdicts} == {"baseline"}


def test_an_order_that_the_contract_fixes_is_judged_outside_the_sample() -> None:
    """Rows of the same set in another order are among the rows to judge."""

    def turned(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        return tied.fixed(**call).flip(1)

    strict = compare(tied.fixed, turned, 2, contract="ties=any", sample=4)
    assert strict.forwards[1].arms[CANDIDATE].wrong == 50
    assert compare(tied.fixed, turned, 2, sample=4).status is Status.EQUAL


# The caller's own call


def test_the_caller_gets_the_originals_own_result() -> None:
    """The same object, and torch's random numbers go on as if nothing else had run."""
    call = tied.arguments(0)
    torch.manual_seed(4)
    want, after = tied.honest(**call), torch.get_rng_state()
    given: list[Tensor] = []

    def keeps(**inputs: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        given.append(tied.honest(**inputs))
        return given[-1]

    for seed in range(6):
        given.clear()
        watched = shadow(keeps, tied.honest, seed=seed)
        torch.manual_seed(4)
        got = watched(**call)
        assert any(got is each for each in given)
        assert torch.equal(got, want)
        assert torch.equal(torch.get_rng_state(), after)
        assert watched.result().status is Status.EQUAL


def test_arms_run_in_random_order() -> None:
    """Over some calls the caller's own run comes first, second and last."""
    seen: list[str] = []

    def named(name: str) -> Callable[..., Tensor]:
        def call(**inputs: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
            seen.append(name)
            return tied.fixed(**inputs)

        return call

    watched = shadow(named("original"), named("candidate"), seed=1)
    for _ in range(12):
        watched(**tied.arguments(1))
    orders = {tuple(seen[i : i + 3]) for i in range(0, len(seen), 3)}
    assert {order.index("candidate") for order in orders} == {0, 1, 2}


def raises(**_: Any) -> NoReturn:  # noqa: ANN401 - a candidate's keywords
    """Raise."""
    raise RuntimeError("lost it")


def exits(**_: Any) -> NoReturn:  # noqa: ANN401 - likewise
    """End the process."""
    sys.exit(0)


def starves(**_: Any) -> NoReturn:  # noqa: ANN401 - likewise
    """Run out of memory."""
    raise MemoryError


def nothing(**_: Any) -> None:  # noqa: ANN401 - likewise
    """Return nothing."""


def narrow(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return too few slots."""
    return tied.fixed(**call)[:, :5]


def long(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return int64."""
    return tied.fixed(**call).long()


def spoils(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Write into the scores."""
    picks = tied.fixed(**call)
    call["scores"].zero_()
    return picks


def gambles(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Consume random numbers."""
    torch.rand(7)
    return tied.honest(**call)


BUFFER = torch.zeros(tied.ROWS, tied.K, dtype=torch.int32)


def reuses(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return a buffer of the module."""
    return BUFFER.copy_(tied.honest(**call))


def spends(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Overwrite the buffer of the module, and return something else."""
    BUFFER.fill_(-9)
    return tied.honest(**call)


@pytest.mark.parametrize(
    ("candidate", "status", "why"),
    [
        (raises, Status.UNDECIDED, "crash: RuntimeError: lost it"),
        (exits, Status.UNDECIDED, "crash: SystemExit: 0"),
        (starves, Status.UNDECIDED, "out-of-memory: MemoryError: no message"),
        (nothing, Status.UNDECIDED, "not-compared: cannot be read as ragged_topk"),
        (narrow, Status.DIFFERENT, "shape"),
        (long, Status.DIFFERENT, "dtype"),
        (spoils, Status.DIFFERENT, "wrote-outside"),
        (gambles, Status.EQUAL, ""),
        (reuses, Status.EQUAL, ""),
        (spends, Status.EQUAL, ""),
    ],
)
@pytest.mark.parametrize("first", [tied.honest, reuses])
def test_whatever_the_candidate_does_the_caller_is_safe(
    first: Callable[..., Tensor], candidate: Callable[..., object], status: Status, why: str
) -> None:
    """The result, the arguments and the random numbers are those of the original alone."""
    call = tied.arguments(2)
    torch.manual_seed(8)
    want, after = tied.honest(**call), torch.get_rng_state()
    watched = shadow(first, candidate)
    for _ in range(6):
        torch.manual_seed(8)
        assert torch.equal(watched(**call), want)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(call["scores"], tied.arguments(2)["scores"])
    got = watched.result()
    assert got.status is status
    found = [f.rule for one in got.failing for v in one.verdicts for f in v.findings]
    assert why in " ".join([*found, *got.failed])
    assert got.arms.get(ORIGINAL) in {Status.EQUAL, Status.UNDECIDED}


def test_arms_that_share_a_buffer_are_told_apart() -> None:
    """Each is judged by what it wrote, whichever wrote last."""

    def reuses_badly(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        return BUFFER.copy_(tied.loses(**call))

    watched = shadow(reuses, reuses_badly)
    for number in range(6):
        watched(**tied.arguments(number))
    assert watched.result().arms == {
        ORIGINAL: Status.EQUAL,
        AGAIN: Status.EQUAL,
        CANDIDATE: Status.DIFFERENT,
    }


def test_an_engine_in_inference_mode_is_watched() -> None:
    """Its buffers get their values back there too."""
    watched = shadow(reuses, spends)
    with torch.inference_mode():
        for number in range(6):
            call = tied.arguments(number)
            torch.manual_seed(number)
            got = watched(**call).clone()
            torch.manual_seed(number)
            assert torch.equal(got, tied.honest(**call))
    assert (watched.result().status, watched.result().failed) == (Status.EQUAL, {})


def test_a_compiled_caller_gets_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch traces nothing is compared."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    watched = shadow(tied.fixed, tied.loses)
    assert torch.equal(watched(**tied.arguments(1)), tied.fixed(**tied.arguments(1)))
    assert watched.result().calls == 0


def test_nan_from_a_candidate_is_a_difference() -> None:
    """Logits that are NaN differ, and the caller's are those of the reference."""

    def scores(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        return scoring.mqa_logits(**call)

    def broken(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        got = scores(**call)
        got[1, 3] = torch.nan
        return got

    call = dict(tiny.prefill().inputs)
    watched = ab.shadow(scores, broken, op="mqa_logits", arithmetic="deep_gemm.sm90")
    assert torch.equal(watched(**call), scores(**call))
    got = watched.result()
    assert (got.arms[ORIGINAL], got.arms[CANDIDATE]) == (Status.EQUAL, Status.DIFFERENT)
    assert got.forwards[0].arms[CANDIDATE].failing == (1,)


def into(scores: Tensor, row_start: Tensor, row_end: Tensor, out: Tensor) -> None:
    """Write the picks where the caller wants them."""
    out.copy_(tied.honest(scores=scores, row_start=row_start, row_end=row_end, k=out.shape[1]))


def into_badly(scores: Tensor, row_start: Tensor, row_end: Tensor, out: Tensor) -> None:
    """The same, but row 17 loses its best."""
    into(scores, row_start, row_end, out)
    out[17, 0] = scores[17].argmin()


@pytest.mark.parametrize(
    ("candidate", "status"), [(into, Status.EQUAL), (into_badly, Status.DIFFERENT)]
)
def test_arms_write_in_place_into_their_own_copies(
    candidate: Callable[..., None], status: Status
) -> None:
    """What the caller's buffer holds is what the original wrote, in whatever order arms run."""
    call = tied.arguments(0)
    tensors = (call["scores"], call["row_start"], call["row_end"])
    watched = shadow(into, candidate, inplace={"raw_indices": "out"}, params={"k": tied.K})
    for seed in range(8):
        torch.manual_seed(seed)
        out, want = (torch.full((tied.ROWS, tied.K), 7, dtype=torch.int32) for _ in range(2))
        assert watched(*tensors, out) is None
        torch.manual_seed(seed)
        into(*tensors, want)
        assert torch.equal(out, want)
    assert watched.result().status is status
    assert watched.result().arms[ORIGINAL] is Status.EQUAL


def test_an_original_that_spoils_its_input_is_told_and_unchanged() -> None:
    """The caller sees the scores spoilt, as without us; the other arms saw them whole."""
    call = tied.arguments(1)
    watched = shadow(spoils, tied.fixed)
    watched(**call)
    assert not call["scores"].any()
    got = watched.result()
    assert (got.arms[ORIGINAL], got.arms[CANDIDATE]) == (Status.DIFFERENT, Status.EQUAL)


def test_the_originals_own_exception_passes() -> None:
    """The very object reaches the caller, and the layer-forward is undecided."""
    error = ValueError("no room")

    def fails(**_: Any) -> NoReturn:  # noqa: ANN401 - a candidate's keywords
        raise error

    watched = shadow(fails, tied.honest)
    with pytest.raises(ValueError, match="no room") as caught:
        watched(**tied.arguments(0))
    assert caught.value is error
    got = watched.result()
    assert (got.status, got.why) == (Status.UNDECIDED, ("no layer-forward was compared",))
    assert got.failed == {"the original raised ValueError: no room": 1}


def test_an_interrupt_passes() -> None:
    """Whoever stops the engine stops it inside an arm too."""

    def stopped(**_: Any) -> NoReturn:  # noqa: ANN401 - a candidate's keywords
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shadow(tied.honest, stopped)(**tied.arguments(0))


def test_a_control_that_fails_is_no_control() -> None:
    """The original raised when it was run again: the candidate is judged, nothing is EQUAL."""
    calls: list[int] = []

    def once(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("only once")
        return tied.fixed(**call)

    # With this seed the caller's run comes first.
    watched = shadow(once, tied.fixed, seed=next(s for s in range(9) if starts(s)))
    watched(**tied.arguments(0))
    got = watched.result()
    assert (got.status, got.arms[CANDIDATE]) == (Status.UNDECIDED, Status.EQUAL)
    assert got.why[0] == "the control arm was not run"


def starts(seed: int) -> bool:
    """Whether the original is the first arm of the first call."""
    return turns.order((ORIGINAL, AGAIN, CANDIDATE), seed, 0)[0] == ORIGINAL


def test_what_cannot_be_read_is_counted() -> None:
    """A call that is not one of the op goes on, and the sentence is kept."""

    def other(x: int) -> int:
        return x + 1

    watched = shadow(other, other)
    assert (watched(1), watched(2)) == (2, 3)
    (sentence,) = watched.result().failed
    assert sentence.startswith("cannot be read as ragged_topk: inputs.scores")
    assert watched.result().status is Status.UNDECIDED


# Bounds, places, bookkeeping


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({"every": 3}, {"every": 4}),
        ({"max_bytes": 1000}, {"max_bytes": 6}),
        ({"max_bytes": 2 * (50 * 64 * 4 + 400) + 100}, {"max_bytes": 6}),
        ({"max_seconds": 0}, {"max_seconds": 6}),
    ],
)
def test_calls_beyond_a_bound_are_left_out(options: Call, left_out: dict[str, int]) -> None:
    """They are counted by reason, and the caller gets the result all the same."""
    watched = shadow(tied.fixed, tied.fixed, **options)
    call = tied.arguments(1)
    for _ in range(6):
        assert torch.equal(watched(**call), tied.fixed(**call))
    got = watched.result()
    assert (got.calls, got.left_out) == (6, left_out)
    assert got.total.forwards == 6 - sum(left_out.values())


def test_what_is_known_to_be_too_large_is_not_copied() -> None:
    """No arm runs where the arguments alone pass the bound."""
    calls: list[int] = []

    def counted(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        calls.append(len(call))
        return tied.fixed(**call)

    shadow(counted, counted, max_bytes=1000)(**tied.arguments(1))
    assert calls == [4]


def test_a_call_of_no_rows_is_left_out() -> None:
    """An engine's empty batch says nothing."""
    call = {n: v[:0] if isinstance(v, Tensor) else v for n, v in tied.arguments(1).items()}
    watched = shadow(tied.fixed, tied.fixed)
    watched(**call)
    assert watched.result().left_out == {"no rows": 1}


def test_nothing_of_a_call_is_kept() -> None:
    """When the call is over no tensor of any arm is alive."""
    alive: list[weakref.ref[Tensor]] = []

    def seen(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        picks = tied.fixed(**call)
        alive.extend(weakref.ref(each) for each in (picks, call["scores"]))
        return picks

    watched, call = shadow(seen, seen), tied.arguments(0)
    watched(**call)
    own = id(call["scores"])
    gc.collect()
    assert len(alive) == 6
    assert [ref for ref in alive if ref() is not None and id(ref()) != own] == []


def test_threads_share_a_shadow() -> None:
    """No call is lost."""
    watched = shadow(tied.fixed, tied.fixed)

    def work() -> None:
        for number in range(3):
            watched(**tied.arguments(number))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    got = watched.result()
    assert (got.calls, got.total.forwards, got.failed) == (12, 12, {})


class Indexer:
    """An engine's layer."""

    def __init__(self) -> None:
        """Count calls."""
        self.calls = 0

    def topk(self, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
        """Pick."""
        self.calls += 1
        return tied.fixed(scores=scores, row_start=row_start, row_end=row_end, k=k)


def test_a_method_is_watched_in_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapped method binds as before; the candidate gets the object too."""
    new = lambda self, **call: tied.fixed(**call) if self else None  # noqa: E731 - short
    watched = shadow(Indexer.topk, new)
    monkeypatch.setattr(Indexer, "topk", watched)
    engine = Indexer()
    assert torch.equal(engine.topk(**tied.arguments(1)), tied.fixed(**tied.arguments(1)))
    assert (engine.calls, watched.result().status) == (2, Status.EQUAL)
    assert getattr(watched, "__name__", "") == "topk"


def test_an_arm_that_calls_the_shadow_is_not_watched_again() -> None:
    """A candidate that falls back to the wrapped function gets the original."""
    watched: Shadow

    def falls_back(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        result: Tensor = watched(**call)
        return result

    watched = shadow(tied.fixed, falls_back)
    watched(**tied.arguments(1))
    assert (watched.result().calls, watched.result().status) == (1, Status.EQUAL)


@pytest.mark.parametrize(
    "where",
    [
        {"layer": 3, "ratio": 2, "rank": 1, "other": 5},
        lambda call: {"layer": 3, "ratio": call["k"] // 8, "rank": 1},
    ],
)
def test_calls_are_grouped_by_where_they_are(where: Any) -> None:  # noqa: ANN401 - two kinds
    """A mapping, or a function of the arguments by name, tells layer, ratio and rank."""
    watched = shadow(tied.fixed, tied.fixed, where=where)
    watched(**tied.arguments(1))
    (group,) = watched.result().groups
    assert group.place == {"layer": 3, "ratio": 2, "rank": 1}
    assert (group.rows, group.columns, group.forwards) == (64, 64, 1)


def test_a_place_that_raises_is_counted() -> None:
    """The call goes on."""
    watched = shadow(tied.fixed, tied.fixed, where=lambda call: call["nothing"])
    watched(**tied.arguments(1))
    assert watched.result().failed == {"internal: KeyError: 'nothing'": 1}


def test_calls_that_differ_are_saved(tmp_path: Path) -> None:
    """Each is a case whose recorded runs are the arms'; calls that agree are not saved."""
    watched = shadow(tied.fixed, tied.loses, save=tmp_path)
    watched(**tied.arguments(1))
    same = shadow(tied.fixed, tied.fixed, save=tmp_path)
    same(**tied.arguments(1))
    (case,) = store.load_cases(tmp_path)
    assert case.provenance["arms"].split(", ") == turns.order((ORIGINAL, AGAIN, CANDIDATE), 0, 0)
    assert len(case.recorded) == 3
    assert torch.equal(case.inputs["scores"], tied.arguments(1)["scores"])


def test_a_required_kernel_that_did_not_run_is_undecided() -> None:
    """A silent fallback of the candidate shows."""

    def leaves(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        receipt.leave("my.kernel", rows=len(call["scores"]))
        return tied.fixed(**call)

    for arms in ((tied.fixed, leaves), (leaves, tied.fixed)):
        want = Status.EQUAL if arms[1] is leaves else Status.UNDECIDED
        assert compare(*arms, require_path="my.kernel").status is want
        watched = shadow(*arms, require_path="my.kernel")
        watched(**tied.arguments(1))
        assert watched.result().status is want


def test_memory_of_each_arm_is_told() -> None:
    """A candidate that holds a mebibyte more shows it."""

    def heavy(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        held = torch.zeros(1 << 20, dtype=torch.uint8)
        return tied.fixed(**call) + held[:1].int()

    watched = shadow(tied.fixed, heavy)
    watched(**tied.arguments(1))
    for got in (compare(tied.fixed, heavy), watched.result()):
        more = got.total.memory[CANDIDATE].transient - got.total.memory[AGAIN].transient
        assert (1 << 20) - 100_000 <= more <= (1 << 20) + 100_000


def records(count: int) -> Iterator[Forward]:
    """Layer-forwards of as many layers."""
    for number in range(count):
        yield Forward(
            name=f"{number}",
            op="ragged_topk",
            rows=4,
            columns=32,
            place={"layer": number},
            new={"raw_indices": Difference(rows=4, slots=number % 2, sets=0)},
            control={"raw_indices": Difference(rows=4, slots=0, sets=0)},
            arms=dict.fromkeys((ORIGINAL, AGAIN, CANDIDATE), Arm(status=Status.EQUAL, power=True)),
        )


def test_the_ledger_is_bounded() -> None:
    """Groups beyond the 64th are one, and still every layer-forward is counted."""
    held = Ledger(about=About(op="ragged_topk"))
    for each in records(5000):
        held.add(each)
    got = held.result()
    assert len(got.groups) == ledger.MOST_GROUPS + 1
    assert (got.groups[-1].place, got.groups[-1].forwards) == (
        {"other": "layers and shapes"},
        5000 - ledger.MOST_GROUPS,
    )
    assert len(got.forwards) == ledger.MOST_FORWARDS
    assert got.total.agreement["slots"]["raw_indices"] == Agreement(
        forwards=5000,
        new_equal=2500,
        controls=5000,
        control_equal=5000,
        pairs=5000,
        only_new=2500,
        rows=20_000,
        new_rows=2500,
    )
    assert got.total.agreement["sets"][ALL].new_equal == 5000


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"op": "top"}, "no op named 'top'"),
        ({"every": 0}, "every is 0; it is a whole number, 1 or more"),
        ({"max_bytes": 0}, "max_bytes is 0; it is a whole number, 1 or more"),
        ({"max_seconds": -1}, "max_seconds is -1; it is 0 or more"),
        ({"sample": 0}, "sample is 0; it is a number of rows, 1 or more"),
        ({"contract": "ties=some"}, "ties cannot be 'some'"),
        ({"contract": "ranks=sets"}, "ranks=sets is not judged by this version"),
        ({"baseline": tied.fixed}, "a baseline gives the scores that judge"),
        ({"candidate": 3}, "the candidate is int, not a callable"),
        ({"names": {"x": "y"}}, "names has 'x'"),
    ],
)
def test_a_wrong_argument_is_told_at_once(options: Call, sentence: str) -> None:
    """Nothing is wrapped."""
    arguments = {"candidate": tied.fixed, "op": "ragged_topk", **options}
    with pytest.raises(UsageError, match=sentence):
        ab.shadow(tied.fixed, arguments.pop("candidate"), **arguments)


def test_forwards_are_of_one_op() -> None:
    """Two ops in one comparison are refused, and so is what is no case."""
    with pytest.raises(UsageError, match="one op a run"):
        ab.compare(tied.fixed, tied.fixed, [tiny.topk(), tiny.decode()])
    with pytest.raises(UsageError, match="compare wants cases, not str"):
        ab.compare(tied.fixed, tied.fixed, ["case"])  # type: ignore[list-item]  # a user's mistake


def test_a_bad_case_is_undecided() -> None:
    """It is named, and the others are compared."""
    bad = tiny.swap(tiny.topk(), row_end=torch.zeros(3, dtype=torch.int32))
    got = ab.compare(tied.fixed, tied.fixed, [bad, *tied.forwards(1)], contract=tied.FREE)
    assert (got.status, got.total.forwards) == (Status.UNDECIDED, 2)
    (sentence,) = got.failed
    assert sentence.startswith("invalid-record: inputs.row_end has shape [3]")


def test_a_comparison_has_no_truth() -> None:
    """It has three values."""
    with pytest.raises(TypeError, match="three values"):
        bool(compare(tied.fixed, tied.fixed, 0))


def test_a_decode_op_is_compared_by_whole_requests() -> None:
    """Its rows are judged with their requests."""
    case = tiny.decode()
    right = ops.find(case.op)

    def decodes(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a candidate's keywords
        assert right.score is not None
        params = {"page_size": call["page_size"], "topk": call["topk"]}
        inputs = {n: t for n, t in call.items() if isinstance(t, Tensor)}
        logits = right.score(replace(case, inputs=inputs, params=params), fast.accumulate)
        lengths = call["context_lens"].reshape(-1)
        raw = ragged_topk(
            scores=logits, row_start=torch.zeros_like(lengths), row_end=lengths, k=call["topk"]
        )
        return {"logits": logits, "raw_indices": raw}

    got = ab.compare(decodes, decodes, [case], sample=1)
    assert (got.status, got.why) == (Status.EQUAL, ())
    assert got.forwards[0].sampled >= 1
