"""The judge: every way a case, a candidate and a baseline can meet."""

import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence import generate
from equivalence.candidate import name_of
from equivalence.case import Case, Space
from equivalence.contract import Contract
from equivalence.errors import NotEquivalent, Undecided, UsageError
from equivalence.judge import assert_equivalent, check, reference_digests
from equivalence.planted.reference import right_outputs
from equivalence.verdict import Status, Verdict
from refimpl import layer, pages, scoring, topk

EQUAL, DIFFERENT, UNDECIDED = Status.EQUAL, Status.DIFFERENT, Status.UNDECIDED


def right(**inputs: Any) -> Tensor:  # noqa: ANN401 - a candidate takes whatever the case holds
    """The reference itself as a candidate of ragged_topk."""
    return topk.ragged_topk(**inputs)


def dense(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
    """The reference itself as a candidate of prefill_indexer."""
    return layer.prefill_indexer(**inputs)


def outcome(verdict: Verdict) -> tuple[Status, list[tuple[str, str]]]:
    """A verdict's status and the stage and rule of every finding."""
    return verdict.status, [(f.stage, f.rule) for f in verdict.findings]


def counts(verdict: Verdict, stage: str = "raw_indices") -> Mapping[str, int]:
    """What was counted of one output, zeros left out."""
    return {name: n for name, n in verdict.stages[stage].counts.items() if n}


def test_the_reference_itself_is_identical() -> None:
    """Nine rows: five select, three are short, one is empty."""
    verdict = check(generate.ragged_topk(1), right)
    assert outcome(verdict) == (EQUAL, [])
    rows = len(generate.ragged_topk(1).inputs["row_start"])
    assert counts(verdict)["identical"] == counts(verdict)["rows"] == rows
    assert (verdict.contract, verdict.contract_origin, verdict.scores) == (
        "strict (default)",
        "default",
        "recorded",
    )


def test_a_candidate_is_strict_unless_a_contract_is_given() -> None:
    """The record's own contract never speaks for a candidate."""
    case = replace(generate.ragged_topk(1), contract="order=any,ties=any")

    def ascending(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        return topk.ragged_topk(**inputs, order="ascending")

    strict = check(case, ascending)
    assert (strict.status, set(strict.stages["raw_indices"].rules)) == (DIFFERENT, {"order"})
    free = check(case, ascending, contract="order=any")
    assert (free.status, free.contract) == (EQUAL, "order=any (argument)")
    assert counts(free)["reordered"] >= 3
    assert check(case, ascending, contract=Contract(order="ascending")).status is EQUAL


@pytest.mark.parametrize(
    ("candidate", "rule", "words"),
    [
        (lambda **_: 1 / 0, "crash", "ZeroDivisionError: division by zero"),
        (lambda **_: "picks", "not-compared", "the candidate returned str"),
        (lambda **_: {}, "not-compared", "the candidate returned nothing"),
        (lambda **_: {"picks": torch.zeros(1)}, "not-compared", "'picks' (Tensor)"),
        (lambda **_: {"raw_indices": [1]}, "not-compared", "'raw_indices' (list)"),
    ],
)
def test_a_candidate_that_gives_nothing_to_compare_is_undecided(
    candidate: Callable[..., Any], rule: str, words: str
) -> None:
    """It raised, or returned what is no output; the sentence says which."""
    verdict = check(generate.ragged_topk(1), candidate)
    assert outcome(verdict) == (UNDECIDED, [("candidate", rule)])
    assert words in verdict.findings[0].reading


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda picks: picks[1:], "shape"),
        (lambda picks: picks[:, 1:], "shape"),
        (lambda picks: picks[0], "shape"),
        (lambda picks: picks.long(), "dtype"),
    ],
)
def test_picks_of_another_shape_or_dtype_are_different(
    change: Callable[[Tensor], Tensor], rule: str
) -> None:
    """Too few rows, too few slots, one row, int64."""
    verdict = check(generate.ragged_topk(1), lambda **inputs: change(right(**inputs)))
    assert outcome(verdict) == (DIFFERENT, [("raw_indices", rule)])


def test_an_output_wider_than_k_holds_pads_in_the_surplus() -> None:
    """Two slots more than k are fine while they are pads."""

    def wide(fill: int) -> Callable[..., Tensor]:
        return lambda **i: torch.nn.functional.pad(right(**i), (0, 2), value=fill)

    assert check(generate.ragged_topk(1), wide(-1)).status is EQUAL
    verdict = check(generate.ragged_topk(1), wide(0))
    assert set(verdict.stages["raw_indices"].rules) == {"pad"}


def test_writing_into_an_input_is_told_unless_the_contract_allows_it() -> None:
    """A kernel that overwrites scores before the window, as one engine's does."""

    def scribbles(scores: Tensor, row_start: Tensor, **rest: Any) -> Tensor:  # noqa: ANN401 - likewise
        picks = right(scores=scores, row_start=row_start, **rest)
        scores[1, int(row_start[1]) - 1] = torch.nan
        return picks

    case = generate.ragged_topk(1)
    assert outcome(check(case, scribbles)) == (DIFFERENT, [("inputs", "wrote-outside")])
    for writes in ("before-window", "out-of-window", "scores"):
        assert check(case, scribbles, contract=f"writes={writes}").status is EQUAL

    def resets(row_end: Tensor, **rest: Any) -> Tensor:  # noqa: ANN401 - likewise
        picks = right(row_end=row_end, **rest)
        row_end.zero_()
        return picks

    verdict = check(case, resets, contract="writes=scores")
    assert outcome(verdict) == (DIFFERENT, [("inputs", "wrote-outside")])
    assert "input row_end" in verdict.findings[0].place


def test_rows_left_as_allocated_are_unwritten() -> None:
    """Fresh memory is poisoned, and a second poison confirms the first."""

    def half(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        picks = right(**inputs)
        out = torch.empty_like(picks)
        out[:2] = picks[:2]
        return out

    verdict = check(generate.ragged_topk(1), half)
    rows = len(generate.ragged_topk(1).inputs["row_start"])
    assert dict(verdict.stages["raw_indices"].rules) == {"unwritten": rows - 2}


def test_a_scoring_fault_is_blamed_on_the_scoring() -> None:
    """Picks that are right for the candidate's own wrong logits say so."""

    def no_relu(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
        inputs["weights"] = -inputs["weights"]
        return layer.prefill_indexer(**inputs)

    verdict = check(generate.prefill_indexer(1, tie_rich=False), no_relu)
    run = verdict.runs[0]
    assert set(verdict.stages["logits"].rules) == {"bits"}
    assert run.blame["scoring"] > 0
    assert run.blame["selection"] == 0
    told = [f for f in run.findings if f.stage == "raw_indices"]
    assert all("the fault is in the scoring" in finding.reading for finding in told)


def test_a_selection_fault_is_blamed_on_the_selection() -> None:
    """Right logits, wrong picks."""

    def swaps(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
        out = dense(**inputs)
        raw = out["raw_indices"]
        raw[0, 0] = next(c for c in range(32) if c not in raw[0].tolist())
        return {"logits": out["logits"], "raw_indices": raw}

    verdict = check(generate.prefill_indexer(1, tie_rich=False), swaps)
    assert outcome(verdict) == (DIFFERENT, [("raw_indices", "lost-winner")])
    assert dict(verdict.runs[0].blame) == {"scoring": 0, "selection": 1}


def test_scores_that_rank_nothing_blame_nobody() -> None:
    """Wrong picks beside NaN logits of the chain's own: neither stage is named."""

    def lost(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
        out = dense(**inputs)
        raw = out["raw_indices"]
        raw[0, 0] = next(c for c in range(32) if c not in raw[0].tolist())
        return {"logits": torch.full_like(out["logits"], torch.nan), "raw_indices": raw}

    verdict = check(generate.prefill_indexer(1, tie_rich=False), lost)
    assert verdict.status is Status.DIFFERENT
    assert dict(verdict.runs[0].blame) == {"scoring": 0, "selection": 0}


def test_without_arithmetic_nothing_judges_a_layers_scores() -> None:
    """No reference, no record, no baseline: undecided, and the sentence says what would help."""
    case = replace(generate.prefill_indexer(1), arithmetic=None)
    picks_only = lambda **inputs: dense(**inputs)["raw_indices"]  # noqa: E731 - one expression
    verdict = check(case, picks_only)
    assert outcome(verdict) == (UNDECIDED, [("raw_indices", "not-compared")])
    assert "name an arithmetic, or give a baseline" in verdict.findings[0].reading


def test_a_baseline_stands_in_for_a_bit_model() -> None:
    """Its logits are compared bitwise, and its scores judge the picks."""
    case = replace(generate.prefill_indexer(1), arithmetic=None)

    def exact(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
        return layer.prefill_indexer(**inputs, arithmetic="exact")

    same = check(case, exact, baseline=exact)
    assert (same.status, same.scores) == (EQUAL, "baseline")
    other = check(case, dense, baseline=exact)
    assert other.status is DIFFERENT
    assert set(other.stages["logits"].rules) == {"bits"}


def test_recorded_scores_judge_picks_where_no_reference_can() -> None:
    """Without arithmetic the recorded logits judge recorded picks, and are not judged."""
    case = generate.prefill_indexer(1)
    out = dense(**case.inputs, **case.params)
    recorded = (out, {"raw_indices": out["raw_indices"]})
    verdict = check(replace(case, arithmetic=None, recorded=recorded))
    assert (verdict.status, verdict.scores) == (EQUAL, "recorded")
    assert sorted(verdict.stages) == ["page_indices", "raw_indices"]


def test_rows_unwritten_by_design_are_not_judged_and_padding_rows_are_empty() -> None:
    """Classes 2 and 3 are left out; a padding row may have a backward window."""
    case = generate.ragged_topk(1)
    rows = len(case.inputs["row_start"])
    end = case.inputs["row_end"].clone()
    end[2] = case.inputs["row_start"][2] - 4
    kinds = torch.zeros(rows, dtype=torch.int8)
    kinds[0], kinds[1], kinds[2] = 2, 3, 1
    padded = replace(case, inputs={**case.inputs, "row_end": end}, row_class=kinds)

    def skips(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        picks = right(**inputs)
        picks[:2] = 7
        return picks

    verdict = check(padded, skips)
    assert (verdict.status, verdict.coverage.rows) == (EQUAL, rows - 2)
    live = check(replace(padded, row_class=None), right)
    assert live.status is UNDECIDED
    assert [(f.rule, f.row) for f in live.findings] == [("invalid-record", 2)]
    assert "is before row_start" in live.findings[0].reading


def test_a_row_with_a_nan_is_undecided_and_others_are_judged() -> None:
    """nan=reject; a declared place for NaN decides the row."""
    case = generate.ragged_topk(1, scores=generate.Scores(nan=True))
    verdict = check(case, right)
    assert (verdict.status, counts(verdict)["undecided"]) == (UNDECIDED, 2)
    assert {f.rule for f in verdict.findings} == {"nan"}
    first = lambda **inputs: topk.ragged_topk(**inputs, nan="first")  # noqa: E731 - one expression
    assert check(case, first, contract="nan=first").status is EQUAL


@pytest.mark.parametrize(
    ("scores", "k", "contract", "power"),
    [
        (torch.zeros(3, 8), 4, "ties=any", False),
        (torch.zeros(3, 8), 4, "ties=lowest", True),
        (torch.randn(3, 8), 8, "ties=any", False),
        (torch.arange(24.0).reshape(3, 8), 4, "ties=any", True),
    ],
)
def test_a_case_in_which_nothing_could_be_wrong_is_undecided(
    scores: Tensor, k: int, contract: str, *, power: bool
) -> None:
    """All scores equal under free ties, or no row that selects."""
    ends = torch.full((3,), 8, dtype=torch.int32)
    inputs = {"scores": scores, "row_start": torch.zeros_like(ends), "row_end": ends}
    verdict = check(
        Case(op="ragged_topk", inputs=inputs, params={"k": k}), right, contract=contract
    )
    assert verdict.status is (EQUAL if power else UNDECIDED)
    assert ("no power" in verdict.note) is not power


def test_a_stored_digest_that_no_longer_holds_is_drift() -> None:
    """The reference of today must give what the case was stored with."""
    case = generate.mqa_logits(1)
    inputs: dict[str, Any] = dict(case.inputs)
    recorded = ({"logits": scoring.mqa_logits(**inputs)},)
    stored = replace(case, recorded=recorded, reference=reference_digests(case))
    assert check(stored).status is EQUAL
    drifted = check(replace(stored, reference={"logits": "0" * 32}))
    assert outcome(drifted) == (UNDECIDED, [("logits", "reference-drift")])


@pytest.mark.parametrize(("dead", "fill"), [("-inf", -torch.inf), ("zero", 0.0)])
def test_cells_outside_the_window_hold_what_the_contract_says(dead: str, fill: float) -> None:
    """One stray cell outside is found under that contract and ignored without."""
    case = generate.mqa_logits(1)

    def filled(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        logits = scoring.mqa_logits(**inputs)
        return torch.where(logits == -torch.inf, fill, logits)

    def stray(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        logits = filled(**inputs)
        logits[0, -1] = 1.0
        return logits

    assert check(case, filled, contract=f"dead={dead}").status is EQUAL
    verdict = check(case, stray, contract=f"dead={dead}")
    assert outcome(verdict) == (DIFFERENT, [("logits", "bits")])
    assert check(case, stray).status is EQUAL


def test_pages_of_a_launch_of_their_own_are_judged_as_a_multiset() -> None:
    """Two columns may share a slot; other ties are legal; a foreign slot is not."""
    case = generate.topk_pages(2, shared=True)

    def slots(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        raw = topk.ragged_topk(
            scores=inputs["scores"],
            row_start=inputs["row_start"],
            row_end=inputs["row_end"],
            k=inputs["k"],
            ties="highest",
        )
        return pages.translate_pages(
            raw_indices=raw,
            page_table=inputs["page_table"],
            page_size=inputs["page_size"],
            row_to_request=inputs["row_to_request"],
        )

    verdict = check(case, slots, contract="order=any,ties=any")
    assert verdict.status is EQUAL
    assert counts(verdict, "page_indices")["tied"] > 0

    def foreign(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        out = slots(**inputs)
        out[0, 0] = 1_000_000
        return out

    wrong = check(case, foreign, contract="order=any,ties=any")
    assert outcome(wrong) == (DIFFERENT, [("page_indices", "out-of-window")])


def test_a_pick_on_a_reserved_page_is_found_and_can_be_allowed() -> None:
    """Page 0 is the dummy page unless the contract says otherwise."""
    case = generate.topk_pages(2)
    table = case.inputs["page_table"].clone()
    table[0, 0] = 0
    zero = replace(case, inputs={**case.inputs, "page_table": table})
    both = lambda **i: layer.prefill_picks(logits=i.pop("scores"), **i)  # noqa: E731 - one expression
    assert "page-zero" in check(zero, both).stages["page_indices"].rules
    assert check(zero, both, contract="reserved_pages=0").status is EQUAL


def test_picks_may_be_recorded_in_another_space_with_another_pad() -> None:
    """Absolute columns padded with INT32_MAX are the same picks."""
    case = generate.ragged_topk(1)
    raw = right(**case.inputs, **case.params)
    far = torch.iinfo(torch.int32).max
    absolute = torch.where(raw == -1, far, raw + case.inputs["row_start"][:, None]).int()
    spaces = {"raw_indices": Space(kind="absolute", pad=far)}
    assert (
        check(replace(case, recorded=({"raw_indices": absolute},), spaces=spaces)).status is EQUAL
    )
    assert check(replace(case, recorded=({"raw_indices": absolute},))).status is DIFFERENT


def test_a_candidate_can_be_called_more_than_once() -> None:
    """Each call is judged, and the calls are compared with each other."""
    calls = []

    def counted(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        calls.append(1)
        return right(**inputs)

    verdict = check(generate.ragged_topk(1), counted, repeats=3)
    rows = len(generate.ragged_topk(1).inputs["row_start"])
    assert ([run.name for run in verdict.runs], len(calls)) == (
        ["candidate", "candidate, call 2", "candidate, call 3"],
        3,
    )
    assert verdict.control["raw_indices"]["identical"] == 2 * rows


def test_logits_that_change_from_call_to_call_are_nondeterminism() -> None:
    """The same inputs gave other bits inside a window."""
    calls = []

    def drifts(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        calls.append(1)
        logits = scoring.mqa_logits(**inputs)
        logits[0, 0] += len(calls) - 1
        return logits

    verdict = check(generate.mqa_logits(1), drifts, repeats=2)
    assert outcome(verdict) == (
        DIFFERENT,
        [("logits", "nondeterminism"), ("logits", "bits")],
    )


def test_nothing_to_judge_is_undecided() -> None:
    """No record and no candidate."""
    verdict = check(generate.ragged_topk(1))
    assert (verdict.status, verdict.note) == (
        UNDECIDED,
        "nothing was compared: the case holds no recorded run and no candidate was given",
    )


def test_a_case_that_does_not_fit_its_op_is_an_invalid_record() -> None:
    """The sentence names the tensor."""
    case = generate.ragged_topk(1)
    bad = replace(case, inputs={**case.inputs, "row_end": case.inputs["row_end"].float()})
    verdict = check(bad, right)
    assert outcome(verdict) == (UNDECIDED, [("inputs", "invalid-record")])
    assert verdict.findings[0].reading == "inputs.row_end is float32; the op wants int32"


def test_an_unreadable_contract_of_the_record_is_an_invalid_record() -> None:
    """A case's own contract is data from others."""
    verdict = check(replace(generate.ragged_topk(1), contract="order=sideways"))
    assert outcome(verdict) == (UNDECIDED, [("inputs", "invalid-record")])


@pytest.mark.parametrize("call", [{"contract": "order=sideways"}, {"repeats": 0}])
def test_wrong_use_raises(call: dict[str, Any]) -> None:
    """Arguments are the caller's: UsageError."""
    with pytest.raises(UsageError):
        check(generate.ragged_topk(1), right, **call)


def test_assert_equivalent_raises_with_the_verdict() -> None:
    """NotEquivalent for DIFFERENT, Undecided for UNDECIDED, the verdict in both."""
    case = generate.ragged_topk(1)
    assert assert_equivalent(case, right).status is EQUAL
    with pytest.raises(NotEquivalent, match=r"^ragged_topk seed 1 ragged_topk: ") as different:
        assert_equivalent(case, lambda **i: right(**i).flip(1))
    assert different.value.verdict.status is DIFFERENT
    with pytest.raises(Undecided, match=r"ragged_topk: nothing may be concluded") as undecided:
        assert_equivalent(case, lambda **_: None)
    assert undecided.value.verdict.status is UNDECIDED


def test_a_candidate_has_a_name_where_it_can_be_imported_again() -> None:
    """Lambdas and closures have none."""
    assert name_of(right) == f"{right.__module__}:right"
    assert name_of(lambda: None) == name_of(None) == ""


def test_progress_is_told_to_the_last_row() -> None:
    """Blocks of rows, in order."""
    told: list[tuple[int, int]] = []
    case = generate.ragged_topk(1)
    check(case, right, progress=lambda done, rows: told.append((done, rows)))
    rows = len(case.inputs["row_start"])
    assert told[-1] == (rows, rows)


MEMORY = """
import sys
from pathlib import Path
import torch
from equivalence.case import Case
from equivalence.judge import check

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024

torch.manual_seed(0)
if sys.argv[1] == "pages":
    rows, columns, k = 1024, 65536, 64
    table = torch.randint(1, 1 << 20, (rows, columns), dtype=torch.int32)
    raw = torch.randint(0, columns, (rows, k), dtype=torch.int32)
    case = Case(
        op="translate_pages",
        inputs={"raw_indices": raw, "page_table": table},
        params={"page_size": 1},
        recorded=({"page_indices": table.gather(1, raw.long()).int()},),
    )
else:
    rows, columns, k = 2048, 32768, 512
    ends = torch.full((rows,), columns, dtype=torch.int32)
    scores = torch.zeros(rows, columns)
    raw = (torch.arange(k, dtype=torch.int32) * 61 + torch.arange(rows)[:, None].int()) % columns
    scores.scatter_(1, raw.long(), torch.arange(k, 0, -1.0).expand(rows, k))
    case = Case(
        op="ragged_topk",
        inputs={"scores": scores, "row_start": ends - ends, "row_end": ends},
        params={"k": k},
        recorded=({"raw_indices": raw.flip(1)},),
    )

def candidate(scores, **rest):
    if sys.argv[1] == "writes":
        scores[5, 7] = 1e9
    return raw

Path("/proc/self/clear_refs").write_text("5")
before = peak()
judged = None if sys.argv[1] in ("pages", "recorded") else candidate
verdict = check(case, judged, contract="order=any,reserved_pages=0")
print(verdict.status.value, peak() - before)
"""


@pytest.mark.parametrize(
    ("path", "status", "copies"),
    [
        ("recorded", "EQUAL", 0),
        ("pages", "EQUAL", 0),
        ("candidate", "EQUAL", 256),
        ("writes", "DIFFERENT", 256),
    ],
)
def test_the_judge_adds_at_most_256_mib(path: str, status: str, copies: int) -> None:
    """256 MiB of scores or page table; a candidate's own copy of its inputs comes on top."""
    done = subprocess.run(  # noqa: S603 - our own interpreter and program
        [sys.executable, "-c", MEMORY, path], capture_output=True, text=True, check=True
    )
    got, mebibytes = done.stdout.split()
    assert got == status
    assert int(mebibytes) - copies <= 256


def wrong(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Row 0 holds a column twice."""
    picks = right(**inputs)
    picks[0, 1] = picks[0, 0]
    return picks


def test_a_compiled_candidate_is_judged_as_it_is_compiled() -> None:
    """Watching its allocations does not turn the compiler off."""

    @torch.compile(backend="eager")
    def candidate(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
        call = wrong if torch.compiler.is_compiling() else right
        return call(scores=scores, row_start=row_start, row_end=row_end, k=k)

    verdict = check(generate.ragged_topk(1), candidate)
    assert outcome(verdict) == (DIFFERENT, [("raw_indices", "duplicate")])


def test_a_candidate_is_never_judged_by_its_own_scores() -> None:
    """Without a reference its logits prove nothing; recorded ones judge its picks."""
    case = replace(generate.prefill_indexer(1), arithmetic=None)
    out = dense(**case.inputs, **case.params)

    def consistent(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
        inputs["weights"] = -inputs["weights"]
        return dense(**inputs)

    alone = check(case, consistent)
    assert (alone.status, alone.scores) == (UNDECIDED, "none")
    beside = check(replace(case, recorded=(out,)), consistent)
    assert (beside.status, beside.scores) == (DIFFERENT, "recorded")


def test_a_baseline_without_logits_leaves_the_reference_in_charge() -> None:
    """The old kernel gave picks alone; the arithmetic of the case still judges."""
    case = generate.prefill_indexer(1)

    def old(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        return dense(**inputs)["raw_indices"]

    def negated(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
        inputs["weights"] = -inputs["weights"]
        return dense(**inputs)

    assert check(case, dense, baseline=old).status is EQUAL
    verdict = check(case, negated, baseline=old)
    assert (verdict.status, verdict.scores) == (DIFFERENT, "reference deep_gemm.sm90")


def test_candidate_and_baseline_may_share_a_buffer() -> None:
    """What the candidate gave is kept before the other one writes over it."""
    case = replace(generate.prefill_indexer(1), arithmetic=None)
    buffer: dict[str, Tensor] = {}

    def into(sign: float) -> Callable[..., dict[str, Tensor]]:
        def call(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
            inputs["weights"] = sign * inputs["weights"]
            for name, tensor in dense(**inputs).items():
                buffer.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
            return buffer

        return call

    assert check(case, into(1), baseline=into(1)).status is EQUAL
    assert check(case, into(-1), baseline=into(1)).status is DIFFERENT


def test_a_buffer_that_a_later_call_leaves_alone_is_unwritten() -> None:
    """The first call's picks do not stand in for the second's."""
    kept: list[Tensor] = []

    def once(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        if not kept:
            kept.append(right(**inputs))
        return kept[0]

    verdict = check(generate.ragged_topk(1), once, repeats=2)
    assert (verdict.status, set(verdict.runs[1].stages["raw_indices"].rules)) == (
        DIFFERENT,
        {"unwritten"},
    )


def test_outputs_that_are_missing_are_missed() -> None:
    """A layer without picks, and a second call without what the first gave."""
    case = generate.prefill_indexer(1)
    verdict = check(case, lambda **inputs: {"logits": dense(**inputs)["logits"]})
    assert outcome(verdict) == (UNDECIDED, [("raw_indices", "not-compared")])
    calls: list[int] = []

    def fewer(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
        calls.append(1)
        out = dense(**inputs)
        return out if len(calls) == 1 else {"raw_indices": out["raw_indices"]}

    again = check(case, fewer, repeats=2)
    assert outcome(again) == (UNDECIDED, [("candidate", "not-compared")])


def test_cells_outside_the_window_do_not_come_from_a_baseline() -> None:
    """dead=-inf means -inf, whatever the old kernel leaves there."""
    case = replace(generate.mqa_logits(1), arithmetic=None)

    def zeroed(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        logits = scoring.mqa_logits(**inputs)
        return torch.where(logits == -torch.inf, 0.0, logits)

    assert check(case, scoring.mqa_logits, baseline=zeroed, contract="dead=-inf").status is EQUAL
    assert check(case, zeroed, baseline=zeroed, contract="dead=-inf").status is DIFFERENT


def test_rows_can_be_judged_alone_and_keep_their_numbers() -> None:
    """Row 3 is row 3 in every finding, also where it was the only one asked for."""
    case = generate.ragged_topk(1)

    def third(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        picks = right(**inputs)
        picks[-1, 1] = picks[-1, 0]
        return picks

    verdict = check(case, third, rows=[3, 1])
    assert (verdict.coverage.rows, verdict.failing) == (2, [3])
    assert [finding.row for finding in verdict.findings] == [3]
    with pytest.raises(UsageError, match="row 99 of"):
        check(case, third, rows=[99])


def test_a_row_unwritten_by_design_may_hold_any_metadata() -> None:
    """Nothing of it is read."""
    case = generate.ragged_topk(1)
    kinds = torch.zeros(len(case.inputs["row_start"]), dtype=torch.int8)
    kinds[0] = 2
    end = case.inputs["row_end"].clone()
    end[0] = -5
    odd = replace(case, inputs={**case.inputs, "row_end": end}, row_class=kinds)
    assert check(odd, right).status is EQUAL


@pytest.mark.parametrize(
    ("freedom", "sentence"),
    [
        ("scores=bound", "scores=bound is derived where a reference scores; ragged_topk does not"),
        ("ranks=sets", "ranks=sets is not judged by this version"),
    ],
)
def test_a_freedom_that_is_not_judged_is_refused(freedom: str, sentence: str) -> None:
    """It is not printed as if it were in force."""
    with pytest.raises(UsageError, match=sentence):
        check(generate.ragged_topk(1), right, contract=freedom)


def test_pads_beyond_the_picks_of_a_translation_are_pads() -> None:
    """An output wider than its picks is compared, not refused."""
    case = generate.translate_pages(1)

    def wide(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        slots = pages.translate_pages(**inputs)
        return torch.nn.functional.pad(slots, (0, 2), value=-1)

    assert check(case, wide).status is EQUAL


def test_a_candidate_whose_attributes_raise_has_no_name() -> None:
    """Looking at it breaks nothing."""

    class Odd:
        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - raises
            raise RuntimeError(name)

        def __call__(self, **inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
            return right(**inputs)

    assert check(generate.ragged_topk(1), Odd()).status is EQUAL


def test_ragged_indices_are_the_raw_ones_of_their_chain_moved() -> None:
    """Each may be legal by itself: beside each other they name the same picks, slot by slot."""
    case = generate.prefill_indexer(3, form="offset")

    def two_ties(**inputs: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
        ragged = layer.prefill_indexer(**inputs, ties="highest")["ragged_indices"]
        return {"raw_indices": dense(**inputs)["raw_indices"], "ragged_indices": ragged}

    verdict = check(case, two_ties, contract="order=any,ties=any")
    assert verdict.stages["raw_indices"].status is EQUAL
    assert set(verdict.stages["ragged_indices"].rules) == {"page-mismatch"}
    assert check(case, dense).status is EQUAL


def test_a_baseline_is_refused_where_the_case_has_its_own_scores() -> None:
    """It would change nothing."""
    with pytest.raises(UsageError, match="judge the old kernel as a candidate of its own"):
        check(generate.ragged_topk(1), right, baseline=right)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"case": "a.safetensors"}, "check wants a Case, not str"),
        ({"contract": {"order": "any"}}, "a Contract or a text, not dict"),
        ({"repeats": 1.5}, "repeats is 1.5"),
    ],
)
def test_arguments_of_another_kind_are_told(call: dict[str, Any], words: str) -> None:
    """One sentence, no traceback of ours."""
    with pytest.raises(UsageError, match=words):
        check(**{"case": generate.ragged_topk(1), "candidate": right, **call})


def test_a_wrapper_is_not_named_after_what_it_wraps() -> None:
    """Importing that name again would judge another function."""

    @functools.wraps(right)
    def wrapper(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        return right(**inputs)

    assert name_of(wrapper) == ""


def test_a_candidate_that_flushes_subnormals_does_not_change_the_reference() -> None:
    """Scores of 1e-40 keep their order after such a call."""
    case = generate.ragged_topk(1, scores=generate.Scores(scale=1e-40))

    def flushes(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        picks = right(**inputs)
        torch.set_flush_denormal(True)
        return picks

    assert check(case, flushes, repeats=2).status is EQUAL


def test_readings_name_absolute_columns_and_signed_zeros() -> None:
    """Two mistakes kernel authors make, by their causes."""
    case = generate.ragged_topk(1)

    def absolute(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        picks = right(**inputs)
        return torch.where(picks == -1, -1, picks + inputs["row_start"][:, None]).int()

    told = {f.row: f.reading for f in check(case, absolute).findings}
    assert told[1] == "these are columns of the whole K: the row's start 38 was not subtracted"
    zeros = generate.ragged_topk(1, scores=generate.Scores(plateau=0.0, signed_zeros=True))
    merged = lambda **inputs: topk.ragged_topk(**inputs, zero_sign="equal")  # noqa: E731 - one expression
    readings = {f.reading for f in check(zeros, merged, contract="order=any,ties=any").findings}
    assert readings == {"a +0 was lost to a -0, which ranks below it under zero_sign=distinct"}


def test_a_kernel_that_keeps_4096_candidates_shows_on_narrow_scores() -> None:
    """The fault of a released kernel, made small enough for a CPU."""
    case = generate.ragged_topk(7, scores=generate.Scores(narrow=True), k=512, columns=16_384)

    def keeps(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
        # Coarse keys first, as the kernel's first pass has them; of a crowded one 4,096 stay.
        coarse = scores.half().float()
        for row, (start, end) in enumerate(zip(row_start.tolist(), row_end.tolist(), strict=True)):
            window = coarse[row, start:end]
            if len(window) > k:
                crowd = (window == window.median()).nonzero()[:, 0][4096:]
                coarse[row, start + crowd] = -torch.inf
        scores = torch.where(coarse == -torch.inf, -torch.inf, scores)
        return right(scores=scores, row_start=row_start, row_end=row_end, k=k)

    verdict = check(case, keeps, contract="order=any,ties=any")
    assert "lost-winner" in verdict.stages["raw_indices"].rules


@pytest.mark.parametrize("form", ["page_table", "offset"])
def test_the_slot_of_an_empty_row_is_compared(form: Any) -> None:  # noqa: ANN401 - a Form
    """Under empty_rows=first it stands for the row's first column."""
    case = generate.topk_pages(1, form=form)
    free = Contract(empty_rows="first")
    right_ones = right_outputs(case, contract=free)
    stage = next(name for name in right_ones if name != "raw_indices")
    empty = int((case.inputs["row_end"] - case.inputs["row_start"]).argmin())
    off = {name: tensor.clone() for name, tensor in right_ones.items()}
    off[stage][empty, 0] += 1
    assert check(case, lambda **_: right_ones, contract=free).status is EQUAL
    assert check(case, lambda **_: off, contract=free).failing == [empty]


def test_recorded_logits_judge_a_candidates_logits_where_no_reference_can() -> None:
    """Right picks do not excuse wrong logits."""
    case = generate.prefill_indexer(0)
    out = right_outputs(case)
    bare = replace(case, arithmetic=None, recorded=(out,))
    assert check(bare, lambda **_: out).status is EQUAL
    wrong_ones = {**out, "logits": out["logits"] * 2}
    assert set(check(bare, lambda **_: wrong_ones).stages["logits"].rules) == {"bits"}


def test_scores_that_were_never_written_judge_nothing() -> None:
    """A baseline and a candidate may leave the same row alone."""
    case = replace(generate.mqa_logits(0), arithmetic=None)
    logits = right_outputs(generate.mqa_logits(0))["logits"]

    def half(**_: Any) -> Tensor:  # noqa: ANN401 - likewise
        out = torch.empty(logits.shape)
        out[1:] = logits[1:]
        return out

    verdict = check(case, half, baseline=half)
    assert (verdict.status, "unwritten") == (UNDECIDED, verdict.findings[0].rule)
    assert check(case, lambda **_: logits, baseline=lambda **_: logits.clone()).status is EQUAL


def test_what_a_candidate_hands_out_gets_its_values_back() -> None:
    """Neither a case's own tensors nor a candidate's constants are left poisoned."""
    case = generate.prefill_indexer(0)
    golden = right_outputs(case)
    recorded = replace(case, recorded=({n: t.clone() for n, t in golden.items()},))
    check(recorded, lambda **_: golden, baseline=lambda **_: recorded.recorded[0])
    assert check(recorded, lambda **_: recorded.recorded[0], repeats=2).status is EQUAL
    check(recorded, lambda **_: golden, repeats=2)
    assert check(recorded).status is EQUAL
    assert check(recorded, lambda **_: golden).status is EQUAL


@pytest.mark.parametrize("make", ["empty_permuted", "resize_"])
def test_other_ways_to_fresh_memory_are_poisoned_too(make: str) -> None:
    """A row that was not written is unwritten, whatever stood there."""
    case = generate.ragged_topk(0)

    def skips(**inputs: Any) -> Tensor:  # noqa: ANN401 - likewise
        picks = right(**inputs)
        if make == "resize_":
            out = torch.empty(0, dtype=torch.int32).resize_(picks.shape)
        else:
            out = torch.empty_permuted(picks.shape, (0, 1), dtype=torch.int32)
        out[:-1] = picks[:-1]
        return out

    assert dict(check(case, skips).stages["raw_indices"].rules) == {"unwritten": 1}


def test_a_process_that_flushes_subnormals_is_judged_as_any_other() -> None:
    """Recorded logits of 1e-40 are compared with a reference that keeps them."""
    case = generate.mqa_logits(0, scale=1e-40)
    recorded = replace(case, recorded=(right_outputs(case),))
    torch.set_flush_denormal(True)
    assert check(recorded).status is EQUAL


def test_a_padding_row_may_point_anywhere() -> None:
    """Its backward window is empty, and no slot is looked up for it."""
    case = generate.topk_pages(0, form="slot_map")
    kinds = torch.zeros(len(case.inputs["row_start"]), dtype=torch.int8)
    empty = int((case.inputs["row_end"] - case.inputs["row_start"]).argmin())
    kinds[empty] = 1
    inputs = {name: tensor.clone() for name, tensor in case.inputs.items()}
    inputs["row_start"][empty] = inputs["row_end"][empty] = -1000
    padded = replace(case, inputs=inputs, row_class=kinds)
    assert check(padded, lambda **_: right_outputs(case)).status is EQUAL


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spaces": {"raw_indices": Space(kind="absolute", pad=3)}}, "the pad 3 is also a column"),
        ({"offset": 2**31 - 3}, "passes int32"),
    ],
)
def test_a_space_in_which_picks_are_ambiguous_is_refused(
    change: dict[str, Any], words: str
) -> None:
    """A pad that is a column, or columns that an int32 cannot hold."""
    case = generate.topk_pages(0, form="offset")
    out = right_outputs(case)
    if "offset" in change:
        offset = torch.full_like(case.inputs["topk_indices_offset"], change["offset"])
        case = replace(case, inputs={**case.inputs, "topk_indices_offset": offset})
    else:
        case = replace(case, **change)
    verdict = check(case, lambda **_: out)
    assert outcome(verdict) == (UNDECIDED, [("inputs", "invalid-record")])
    assert words in verdict.findings[0].reading
