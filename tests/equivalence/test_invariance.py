"""Row-count invariance: planted faults are caught and named, honest kernels are let pass."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import batches
import pytest
import tiny
import torch

from equivalence import generate, invariance
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.errors import NotEquivalent, Undecided, UsageError
from equivalence.invariance import (
    WHOLE,
    assert_row_count_invariant,
    check_row_count,
    in_short,
)
from equivalence.planted import paths
from equivalence.planted.counted import COUNTED, CountedFault, random_ties, right
from equivalence.planted.reference import right_outputs
from equivalence.report import as_json, as_text
from equivalence.rowcount import plays, schedules, trials, witness
from equivalence.verdict import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from equivalence.candidate import Candidate
    from equivalence.verdict import Finding, Verdict

K, COLUMNS, ROWS = 4, 24, 66
LOOSE = "order=any,ties=any"


@cache
def rows() -> Case:
    """`ragged_topk`, 66 rows of two requests: distinct scores, row 5 is short, row 6 is empty."""
    random = torch.Generator().manual_seed(3)
    start = torch.where(torch.arange(ROWS) < 40, 0, 8).int()
    end = start + torch.randint(K + 1, 17, (ROWS,), generator=random).int()
    end[5], end[6] = start[5] + 2, start[6]
    end[60] = COLUMNS
    return Case(
        op="ragged_topk",
        inputs={
            "scores": torch.rand(ROWS, COLUMNS, generator=random).argsort(1).float(),
            "row_start": start,
            "row_end": end,
        },
        params={"k": K},
        name="rows",
    )


@cache
def logits() -> Case:
    """`mqa_logits` of 9 rows, the smallest that the arithmetic allows."""
    return generate.mqa_logits(0, k=4, columns=24, heads=16, head_dim=32)


@cache
def layer() -> Case:
    """`prefill_indexer`, likewise, with pages."""
    return generate.prefill_indexer(0, topk=4, columns=24, heads=16, head_dim=32, page_size=4)


def reference(case: Case) -> Callable[..., dict[str, Tensor]]:
    """The reference as a candidate."""

    def candidate(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a candidate's keywords
        inputs = {name: call[name] for name in case.inputs}
        return right_outputs(replace(case, inputs=inputs, recorded=()))

    return candidate


def variance(verdict: Verdict) -> list[Finding]:
    """The findings about schedules."""
    return [found for found in in_short(verdict).runs[1].findings if found.row is not None]


@pytest.mark.parametrize("fault", COUNTED, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named(fault: CountedFault) -> None:
    """Each is DIFFERENT by its rule, and a reading says what the row depends on."""
    case, free = (rows(), LOOSE) if fault.op == "ragged_topk" else (logits(), None)
    verdict = check_row_count(case, fault.make(), contract=free)
    assert verdict.status is Status.DIFFERENT
    found = [each for each in verdict.findings if each.rule == fault.rule]
    assert fault.says in found[0].reading
    whole = fault.name.startswith("wrong everywhere")
    assert bool(variance(verdict)) is not whole


@pytest.mark.parametrize(
    ("candidate", "contract"), [(right, None), (random_ties, LOOSE)], ids=["exact", "random ties"]
)
def test_an_honest_kernel_is_equal(candidate: Candidate, contract: str | None) -> None:
    """Over every schedule, with ties too where the contract lets them fall anyhow."""
    case = rows() if contract is None else generate.ragged_topk(0)
    verdict = check_row_count(case, candidate, contract=contract)
    assert verdict.status is Status.EQUAL
    assert verdict.findings == ()
    short = in_short(verdict).runs[1].stages["raw_indices"]
    assert short.counts["different"] == 0
    assert (short.counts["tied"] > 0) is (contract is not None)
    assert "not run: two streams (the inputs are on no CUDA device), chunks of" in verdict.note


@pytest.mark.parametrize(
    "case",
    [
        layer(),
        generate.topk_pages(0, form="slot_map"),
        generate.topk_pages(0, form="offset"),
        generate.translate_pages(0),
        tiny.decode(),
        tiny.qsa(),
    ],
    ids=lambda case: case.name,
)
def test_the_reference_is_equal_on_every_op(case: Case) -> None:
    """Logits, picks, ragged picks and slots; decode by whole requests."""
    verdict = check_row_count(case, reference(case))
    assert (verdict.status, verdict.findings) == (Status.EQUAL, ())
    assert len(verdict.runs) > 5


def test_the_smallest_call_is_told() -> None:
    """The message lists its rows, the judge's evidence and how many schedules show the same."""
    fault = next(each for each in COUNTED if each.name == "histogram left dirty by a short row")
    with pytest.raises(NotEquivalent) as caught:
        assert_row_count_invariant(rows(), fault.make(), contract=LOOSE)
    message = str(caught.value)
    told = message[message.index("  46 schedules\n") :].splitlines()[1:10]
    assert told == [
        "  row 47   raw_indices   columns 8-24   k 4   lost-winner   row-variance",
        "    cutoff    rank 3                 19  41980000  column 9",
        "    missing   column 10 (K 18)       22  41B00000  +1,572,864 ulp above the cutoff",
        "    extra     column 12 (K 20)       17  41880000  -1,048,576 ulp below the cutoff",
        "    call      rows 5 47",
        "    also      in 12 other schedules",
        "    reading   row 47 alone is right; after row 5 it is wrong",
        "",
        "  ... 8 more rows",
    ]


def test_logits_are_compared_bit_for_bit() -> None:
    """One bit in a larger call is evidence, want beside got, in cells as in rows."""
    fault = next(each for each in COUNTED if each.op == "mqa_logits")
    verdict = check_row_count(logits(), fault.make())
    found = variance(verdict)[0]
    assert (found.stage, found.rule, found.row) == ("logits", "row-variance", 0)
    assert [line.label for line in found.evidence] == ["want", "got", "want", "got", "call", "also"]
    assert found.evidence[1].note in ("+1 ulp", "-1 ulp")
    assert found.evidence[4].place == "rows 0-4"
    stage = in_short(verdict).runs[1].stages["logits"]
    assert set(stage.rules) == {"row-variance"}
    assert stage.counts["compared"] == stage.counts["identical"] + stage.counts["different"]
    assert stage.counts["different"] > 0


def test_logits_nobody_can_judge_are_compared_with_the_row_alone() -> None:
    """Without a bit model the whole call is undecided, and its rows still may not vary."""
    fault = next(each for each in COUNTED if each.op == "mqa_logits")
    case = replace(logits(), arithmetic=None)
    candidate = partial(fault.make(), arithmetic="deep_gemm.sm90")
    verdict = check_row_count(case, candidate)
    assert verdict.status is Status.DIFFERENT
    sentence = "row 0 is unchanged in calls of up to 4 rows and changed in one of 5"
    assert variance(verdict)[0].reading == sentence


def test_the_baseline_can_judge() -> None:
    """A candidate that agrees with itself and not with the old kernel is different."""
    case, old = replace(layer(), arithmetic=None), reference(layer())

    def other(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a candidate's keywords
        return old(**{**call, "weights": call["weights"] * 2})

    few = partial(check_row_count, case, rows=[2, 5])
    assert few(old, baseline=old).status is Status.EQUAL
    verdict = few(other, baseline=old)
    assert verdict.status is Status.DIFFERENT
    assert [run.name for run in verdict.runs if run.findings] == [WHOLE]
    assert few(old).status is Status.UNDECIDED


def test_random_ties_of_a_layer_are_judged_by_its_logits() -> None:
    """Without a bit model the logits of the whole call tell legal picks from others."""

    def ties(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a candidate's keywords
        right_ = reference(layer())(**call)
        windows = {name: call[name] for name in ("row_start", "row_end")}
        picks = random_ties(scores=right_["logits"], k=call["topk"], **windows)
        return {"logits": right_["logits"], "raw_indices": picks}

    few = partial(check_row_count, contract=LOOSE, rows=[1, 4])
    assert few(layer(), ties).status is Status.EQUAL
    unknown = in_short(few(replace(layer(), arithmetic=None), ties)).runs[1]
    assert unknown.findings == ()
    counts = unknown.stages["raw_indices"].counts
    assert counts["reordered"] + counts["tied"] > 0

    def only(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
        return ties(**call)["raw_indices"]

    blind = few(replace(layer(), arithmetic=None), only)
    assert blind.status is Status.UNDECIDED
    assert "no scores say whether legally" in "".join(found.reading for found in blind.findings)


def test_a_request_that_follows_another_is_shrunk_whole() -> None:
    """Decode rows come by requests of two; the call that is left holds both of each."""
    case = generate.decode_indexer(0, topk=4, heads=16, head_dim=32, page_size=4)

    def second_is_wrong(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a candidate's keywords
        outputs = reference(case)(**call)
        picks = outputs["raw_indices"]
        picks[2:, 0] = torch.where(picks[2:, 3] >= 0, picks[2:, 1], picks[2:, 0])
        return {"raw_indices": picks}

    verdict = check_row_count(case, second_is_wrong)
    found = variance(verdict)[0]
    assert found.reading == "row 0 alone is right; after rows 2-3 it is wrong"
    assert [line.place for line in found.evidence if line.label == "call"] == ["rows 2-3 0-1"]


def test_a_fault_that_comes_and_goes_is_nondeterminism() -> None:
    """What the same call does not give again is no dependence on rows."""
    calls: list[int] = []

    def fourth_call_is_wrong(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        calls.append(1)
        picks = right(**call)
        return picks.roll(1, 1) if len(calls) == 8 else picks

    found = variance(check_row_count(rows(), fourth_call_is_wrong))[0]
    assert found.rule == "nondeterminism"
    assert found.reading.endswith(
        "was wrong in a call of these rows, and not when it was made again"
    )


def test_a_row_wrong_alone_and_right_among_others() -> None:
    """The smallest call is the row alone."""

    def alone(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        picks = right(**call)
        return picks.flip(1) if len(picks) == 1 else picks

    found = variance(check_row_count(rows(), alone, contract="short_rows=any"))[0]
    assert found.reading == "row 0 is wrong in a call of 1 row and right in one of 66"


def test_rows_wrong_in_two_ways_say_so() -> None:
    """Neither call is right: the reading does not call one of them so."""

    def either(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        picks = right(**call)
        return picks.flip(1) if len(picks) > 1 else picks.roll(1, 1)

    verdict = check_row_count(rows(), either, rows=[1])
    sentence = "row 0 is wrong in a call of 1 row and wrong in another way in one of 66"
    assert variance(verdict)[0].reading == sentence


@pytest.mark.parametrize("least", [1, 3])
def test_a_call_that_raises_is_undecided(least: int) -> None:
    """The sentence, the schedule and the rows are told; other schedules still run."""

    def needs_rows(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        if len(call["scores"]) < least:
            raise RuntimeError("too few rows")
        return right(**call)

    verdict = check_row_count(tiny.topk(), needs_rows)
    if least == 1:
        assert verdict.status is Status.EQUAL
        return
    found = verdict.findings[0]
    assert verdict.status is Status.UNDECIDED
    assert (found.rule, found.run) == ("crash", "chunks of 1 row")
    assert found.place == "chunks of 1 row   row 0"
    assert found.reading.startswith("RuntimeError: too few rows (test_invariance.py:")
    assert "last row first" in [run.name for run in verdict.runs if run.stages]
    with pytest.raises(Undecided):
        assert_row_count_invariant(tiny.topk(), needs_rows)


def test_other_outputs_and_shapes_are_told() -> None:
    """A call that gives another width is different; one that leaves an output out undecided."""

    def wide(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        picks = right(**call)
        return torch.cat([picks, picks[:, :1] * 0 - 1], 1) if len(picks) == 2 else picks

    verdict = check_row_count(tiny.topk(), wide, rows=[2])
    found = verdict.findings[0]
    assert (verdict.status, found.rule) == (Status.DIFFERENT, "shape")
    assert found.evidence[0].value == "want [2, 8] int32   got [2, 9] int32"

    def fewer(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
        outputs = reference(layer())(**call)
        return outputs if len(call["q"]) > 2 else {"logits": outputs["logits"]}

    verdict = check_row_count(layer(), fewer, rows=[2])
    found = next(each for each in verdict.findings if each.run == "chunks of 2 rows")
    assert (verdict.status, found.rule) == (Status.UNDECIDED, "not-compared")
    assert found.reading == (
        "page_indices, raw_indices: given by this call or by the whole one, and not by both"
    )


def test_a_whole_call_that_fails_ends_it() -> None:
    """No schedule can be compared with nothing."""

    def fails(**_: object) -> Tensor:
        raise ValueError("no")

    verdict = check_row_count(rows(), fails)
    assert verdict.status is Status.UNDECIDED
    assert verdict.note == "no schedule ran: the whole call gave nothing to compare"
    assert [found.rule for found in verdict.findings] == ["crash"]


def test_no_schedule_is_undecided() -> None:
    """Sizes that hold the whole call, and a call of no rows."""
    verdict = check_row_count(rows(), right, rows=[66, 100])
    assert verdict.status is Status.UNDECIDED
    assert verdict.note == (
        "no schedule ran; not run: chunks of 66 100 rows (the call has 66 rows)"
    )
    empty = replace(rows(), inputs={name: t[:0] for name, t in rows().inputs.items()})
    verdict = check_row_count(empty, right)
    assert verdict.status is Status.UNDECIDED
    assert verdict.note == "no schedule ran; not run: every schedule (the call has no rows)"


def test_broken_rows_are_told_and_the_others_compared() -> None:
    """A row whose window ends before it begins is not called with."""
    case = tiny.swap(tiny.topk(), row_end=tiny.ints(32, 2, 14, 5))
    verdict = check_row_count(case, right)
    assert verdict.status is Status.UNDECIDED
    assert [found.reading for found in verdict.findings] == ["row_end 2 is before row_start 3"]
    assert verdict.coverage.rows == 3
    assert check_row_count(replace(case, params={"k": -1}), right).status is Status.UNDECIDED


def test_rows_meant_to_be_unwritten_may_hold_anything() -> None:
    """A row that no kernel writes is in no schedule's count, whatever its buffer held."""
    kind = torch.zeros(ROWS, dtype=torch.int8)
    kind[9] = 2

    def skips(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        picks = right(**call)
        if len(picks) == ROWS:
            picks[9] = -5
        return picks

    verdict = check_row_count(replace(rows(), row_class=kind), skips, rows=[20])
    assert (verdict.status, verdict.coverage.rows) == (Status.EQUAL, 65)
    assert verdict.runs[1].stages["raw_indices"].counts["rows"] == 65
    assert check_row_count(rows(), skips, rows=[8]).status is Status.DIFFERENT


def test_a_buffer_handed_out_again_is_no_fault() -> None:
    """The whole call's outputs are kept before the next call overwrites them."""
    buffer = torch.zeros(ROWS, K, dtype=torch.int32)

    def reuses(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        picks = right(**call)
        buffer[: len(picks)] = picks
        return buffer[: len(picks)]

    assert check_row_count(rows(), reuses).status is Status.EQUAL


def test_large_cases_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where judging all rows is slow, so many are; the verdict and its note say how many."""
    monkeypatch.setattr(trials, "_FEW_CELLS", 0)
    monkeypatch.setattr(schedules, "MOST_CALLS", 64)
    verdict = check_row_count(rows(), right, sample=8)
    assert (verdict.status, verdict.coverage.rows) == (Status.EQUAL, 66)
    assert verdict.coverage.scored_rows == 8
    assert (
        "; 8 of 66 rows judged by their scores; chunks of 1 row: 64 of 66 calls; " in verdict.note
    )
    tied = check_row_count(generate.ragged_topk(0), random_ties, contract=LOOSE, sample=4)
    stage = in_short(tied).runs[1].stages["raw_indices"]
    assert (tied.status, stage.counts["different"]) == (Status.EQUAL, 0)
    assert stage.counts["open"] > 0
    fault = COUNTED[0].make()
    assert check_row_count(rows(), fault, contract=LOOSE, sample=8).status is Status.DIFFERENT


def test_streams_join_their_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half of the rows is one launch, and their outputs stand under each other."""

    class Stream:
        def wait_stream(self, _: object) -> None:
            pass

        device = torch.device("cpu")

    class Here:
        def __init__(self, _: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    for name, fake in {"Stream": Stream, "current_stream": Stream, "stream": Here}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    sizes: list[int] = []

    def counts(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a candidate's keywords
        sizes.append(len(call["q"]))
        return reference(layer())(**call)

    got = trials._on_two_streams(counts, layer())(**layer().inputs, **layer().params)
    want = reference(layer())(**layer().inputs)
    assert sizes == [5, 4]
    assert {name: torch.equal(got[name], want[name]) for name in want} == dict.fromkeys(want, True)
    halves = trials._on_two_streams(right, rows())(**rows().inputs, k=K)
    assert torch.equal(halves, right(**rows().inputs, k=K))


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    {
        "repeats is 0; it is a whole number from 1 on": {"repeats": 0},
        "seed is -1; it is a whole number from 0 to 2**63 - 1": {"seed": -1},
        f"seed is {1 << 63}; it is a whole number from 0 to 2**63 - 1": {"seed": 1 << 63},
        "sample is 1.5; it is a whole number from 1 on": {"sample": 1.5},
        "rows is empty; it is the chunk sizes to call with, as in rows=(128, 256)": {"rows": []},
        "rows holds 0; a chunk has a whole number of rows, 1 or more": {"rows": [4, 0]},
        "a baseline gives the scores that judge; ragged_topk has its own among the inputs": {
            "baseline": right
        },
        "ties cannot be 'some'; it is lowest, highest, any or all": {"contract": "ties=some"},
        "nan=drop speaks of masks: this ragged_topk publishes none": {"contract": "nan=drop"},
    }.items(),
)
def test_wrong_use_is_a_sentence(sentence: str, wrong: dict[str, Any]) -> None:
    """A UsageError, before anything is concluded."""
    with pytest.raises(UsageError, match=r".") as caught:
        check_row_count(rows(), right, **wrong)
    assert str(caught.value) == sentence
    with pytest.raises(UsageError, match="check_row_count wants a Case, not str; load_cases"):
        check_row_count("rows", right)  # type: ignore[arg-type]  # that is the point


def test_progress_counts_calls() -> None:
    """It ends at the number of calls that was told from the start."""
    told: list[tuple[int, int]] = []
    verdict = check_row_count(rows(), right, rows=[32, 33], progress=lambda *n: told.append(n))
    assert told == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    assert verdict.note == "2 schedules in 5 calls"


def test_a_verdict_survives_json() -> None:
    """Every schedule is a run of its own, with its counts and findings."""
    verdict = check_row_count(rows(), COUNTED[0].make(), contract=LOOSE, rows=[1, 32])
    data = json.loads(as_json.render([verdict]))["cases"][0]
    assert [run["run"] for run in data["runs"]] == [
        WHOLE,
        "chunks of 1 row",
        "chunks of 32 rows",
    ]
    assert as_json.verdict_of(data).findings == verdict.findings
    assert as_text.summary([verdict]).startswith("1 case, 198 rows: 0 equal, 1 different")


def test_a_seed_makes_the_same_verdict() -> None:
    """Two runs of the same seed tell the same, another seed tells the same status."""
    case, fault = generate.ragged_topk(0), COUNTED[2].make()
    one, two, other = (
        check_row_count(case, fault, contract=LOOSE, seed=seed) for seed in (1, 1, 2)
    )
    assert [run.stages for run in one.runs] == [run.stages for run in two.runs]
    assert one.findings == two.findings
    assert other.status is one.status


def test_a_call_of_one_row_shows_nothing() -> None:
    """It can be repeated over other memory, but no call of other rows can be made."""
    one = replace(rows(), inputs={name: t[:1] for name, t in rows().inputs.items()})
    verdict = check_row_count(one, right)
    assert verdict.status is Status.UNDECIDED
    assert verdict.note.startswith(
        "4 schedules in 4 calls; no call of other rows can be made; not run: two streams"
    )
    assert all(run.stages["raw_indices"].status is Status.EQUAL for run in verdict.runs)
    assert check_row_count(one, lambda **call: right(**call).flip(1)).status is Status.DIFFERENT


def test_slots_that_nobody_wrote_are_told_like_their_picks() -> None:
    """The last row of each call stays poison: in the smallest call as in the first."""
    case = batches.case([(5, 9)], tie_rich=False)
    readings = {
        found.stage: (found.rule, found.reading)
        for found in variance(check_row_count(case, paths.last_chunk_short, rows=[2]))
    }
    sentence = "row 1 is wrong in a call of 1 row and right in one of 5"
    assert readings == dict.fromkeys(("raw_indices", "page_indices"), ("row-variance", sentence))


def test_logits_that_were_kept_are_told_of_their_own_row() -> None:
    """Rows come back in another order; the row that changed first there is not the first one."""
    calls: list[int] = []

    def second_call_differs(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        calls.append(1)
        return reference(logits())(**call)["logits"] + (len(calls) == 2)

    trial = invariance._trial(logits(), second_call_differs, None, Contract(), 8)
    backward = schedules.Schedule(name="last row first", calls=(torch.arange(9).flip(0),))
    played = plays.play(trial, backward, lambda: None)
    plays.decide(trial, played, seed=0)
    assert played.logits is not None
    assert played.logits[0] == 8
    suspect = witness.suspect_of(trial, played, "logits")
    assert suspect is not None
    assert (suspect.row, suspect.got) == (0, None)


def test_the_evidence_is_of_the_call_that_is_told() -> None:
    """Shrinking also tries copies of the row, which are wrong in another way."""

    def by_the_first(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
        picks = right(**call)
        first, last = call["scores"][0, :1], call["scores"][-1, :1]
        if len(picks) > 1:
            picks[-1] = picks[-1].roll(1 if bool(first != last) else 2)
        return picks

    found = variance(check_row_count(rows(), by_the_first, rows=[3]))[0]
    assert right(**rows().inputs, k=K)[2].tolist() == [4, 0, 2, 1]
    assert [(line.label, line.place) for line in found.evidence] == [
        ("slot 0", "column 1"),
        ("slot 1", "column 4"),
        ("call", "rows 1-2"),
    ]
