"""The measurements for a Hopper GPU, rehearsed small on this device."""

from benchmarks import hopper, page

SMALL = hopper.Setup(
    device="cpu",
    scorer="reference",
    selector="torch",
    contract="torch.topk",
    rows=64,
    heads=16,
    head_dim=32,
    topk=16,
    columns=(256, 512),
    swept=256,
    budgets=(1 << 14, 1 << 15),
    budget=1 << 15,
    chunks=(8, 32),
    compared=(256,),
    scenarios=("cold-8k", "repeated-text"),
    layers=1,
    ratios=(1, 2),
    scale=64,
    sample=16,
    rounds=1,
)


def test_transient_counts_what_the_formula_says_and_all_picks_are_right() -> None:
    """The original holds all logits, chunks a budget of them, and each way is judged equal."""
    rows = list(hopper.transient(SMALL))
    assert [row["columns"] for row in rows] == [256, 512]
    for row in rows:
        formulas = {name: way["formula"] for name, way in row["ways"].items()}
        assert formulas == {
            "original": 64 * row["columns"] * 4,
            "chunked": 1 << 15,
            "pipelined": 1 << 15,
        }
        assert all(way["transient"] >= way["formula"] for way in row["ways"].values())
        assert {run["status"] for run in row["judged"]["runs"].values()} == {"EQUAL"}
        assert row["judged"]["judge_bytes"] < 256 << 20


def test_sweep_has_two_ways_a_budget_after_the_original() -> None:
    """Every row has its budget, bytes and ratio."""
    rows = list(hopper.sweep(SMALL))
    told = [(row["way"], row["budget"]) for row in rows]
    assert told == [
        ("original", None),
        *((way, budget) for budget in SMALL.budgets for way in ("chunked", "pipelined")),
    ]
    assert all(row["ratio"] > 0 and row["transient"] >= 0 for row in rows)


def test_invariance_compares_every_chunk_size() -> None:
    """The reference does not depend on the row count."""
    (row,) = hopper.invariance(SMALL)
    assert (row["status"], row["chunks"], row["findings"]) == ("EQUAL", [8, 32], [])


def test_the_table_has_a_row_a_scenario() -> None:
    """Deterministic parts: new equals original everywhere, and so does the original itself."""
    rows = list(hopper.table(SMALL))
    assert [row["scenario"] for row in rows] == ["cold-8k", "repeated-text"]
    assert [row["comparison"]["status"] for row in rows] == ["EQUAL", "EQUAL"]


def test_the_page_of_results_is_what_the_committed_files_say() -> None:
    """docs/results.md is made of benchmarks/results and of nothing else."""
    assert page.TARGET.read_text(encoding="utf-8") == page.render()


def test_the_committed_run_measured_what_the_plans_count() -> None:
    """Transient bytes on the H200 are the formula's, to 16 MiB; the judge takes under 256 MiB."""
    for row in page.load("transient")["rows"]:
        for way in row["ways"].values():
            assert abs(way["transient"] - way["formula"]) < 16 << 20
        assert row["judged"]["judge_bytes"] < 256 << 20


def test_the_committed_run_keeps_its_claims() -> None:
    """2 GiB of chunks take at most 1.2 of the time; all judged forwards and schedules are equal."""
    ratios = [
        way["ratio_to_original"]
        for row in page.load("transient")["rows"]
        for way in row["ways"].values()
    ]
    assert max(ratios) <= 1.2
    table = page.load("table")["rows"]
    assert sum(row["comparison"]["total"]["forwards"] for row in table) >= 176
    assert {row["comparison"]["status"] for row in table} == {"EQUAL"}
    assert {row["status"] for row in page.load("invariance")["rows"]} == {"EQUAL"}
