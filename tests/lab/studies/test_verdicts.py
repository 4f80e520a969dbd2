"""Verdicts, in our setting and as authors set a claim up: what counts as reproduced although it is met or missed.

Claims on serving policies are judged on benches made by hand: which baseline counts, what a missed condition does.
"""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from lab.studies.arrow import TEXT as ARROW
from lab.studies.arrow import claims as arrow
from lab.studies.arrow.claims_times import phases
from lab.studies.arrow.setup import HOUR
from lab.studies.beyond_the_buzz import TEXT
from lab.studies.claims import (
    BOTH_COLUMNS,
    AsAuthors,
    Claim,
    Finding,
    Verdict,
    Without,
    detail_rows,
    evaluate,
    evaluate_as_authors,
    holding,
    verdict_rows,
)
from lab.studies.dopd import claims_runs as dopd
from lab.studies.dopd.setup import PLANNERS
from lab.studies.papers import HOMES, paper

ROOT = Path(__file__).parents[3]


def known(value, holds, without=None, **more):
    """A claim that finds what it is given."""

    texts = {"id": "T1", "kind": "paper", "statement": "two is two", "acceptance": "exact"}
    return Claim(judge=lambda _: Finding(value, holds, "stand-in", without), **texts, **more)


OURS = pd.DataFrame([{"id": "T1", "value": "1", "verdict": "fails", "note": "slow"}])
PRINTED = Without("as printed", "2", True)


@pytest.mark.parametrize(
    ("holds", "otherwise", "by_construction", "verdict"),
    [
        (True, None, False, "holds"),
        (False, None, False, "fails"),
        (True, True, False, "holds"),
        (False, False, False, "fails"),
        (True, False, False, "rests on an added rule"),
        (False, True, False, "rests on an added rule"),
        (True, None, True, "by construction"),
        (False, None, True, "fails"),
    ],
)
def test_a_claim_counts_only_if_it_could_fail_and_needs_no_added_rule(holds, otherwise, by_construction, verdict):
    without = None if otherwise is None else Without("as printed", "2", otherwise)
    table = evaluate([known("1", holds, without, by_construction=by_construction)], {"measured": 0.0})
    assert table[["verdict", "note"]].to_numpy().tolist() == [[verdict, "stand-in"]]
    said = {None: "", True: "as printed: 2; holds", False: "as printed: 2; fails"}
    assert table["without"].tolist() == [said[otherwise]]
    counts = holding(table).iloc[0]
    assert (counts["holds"], counts["of"]) == (verdict == "holds", verdict != "by construction")


@pytest.mark.parametrize(
    ("about", "verdict"),
    [
        (AsAuthors(known("1", False), place="1", setting="", paper=""), Verdict.FAILS),
        (AsAuthors(known("1", False, PRINTED), place="1", setting="", paper=""), Verdict.HOLDS),
        (AsAuthors(known("1", True, by_construction=True), place="1", setting="", paper=""), Verdict.BY_CONSTRUCTION),
        (AsAuthors(known("1", True), place="1", setting="", paper="", judged=False, why="lost"), Verdict.NOT_JUDGED),
        (
            AsAuthors(
                known("1", True), place="1", setting="", paper="", judge=lambda _: Finding("1", False, "", PRINTED)
            ),
            Verdict.READING,
        ),
    ],
)
def test_the_rules_as_printed_decide_unless_a_reading_does(about, verdict):
    row = evaluate_as_authors([about], {"vllm_v0": 0.0}, OURS).iloc[0]
    assert row["verdict"] == verdict
    assert row["our_verdict"] == "fails"


def test_engines_stand_in_one_row_of_the_page():
    about = AsAuthors(known("5", True), place="3.2", setting="one GPU", paper="4", inferred="the lengths")
    table = evaluate_as_authors([about], {"vllm_v0": 0.0, "vllm": 0.0}, OURS)
    assert verdict_rows(table) == [("T1", "two is two", "holds", "fails", "slow")]
    here = "vllm_v0: 5; vllm: 5"
    assert detail_rows(table) == [("T1", "3.2: one GPU", "the lengths", "4", here, "exact", "1", "exact")]


@pytest.mark.parametrize("name", [*HOMES, "beyond_the_buzz"])
def test_the_table_of_a_page_has_the_claims_as_the_code_has_them(name):
    shown = pd.read_csv(ROOT / "docs" / "studies" / f"{name}.csv", dtype=str, keep_default_na=False)
    assert tuple(shown) == BOTH_COLUMNS
    for each in import_module(f"lab.studies.{name}").TEXT.as_authors:
        row = shown[shown["id"] == each.claim.id].iloc[0]
        for column in ("statement", "place", "setting", "paper", "inferred", "acceptance", "why"):
            assert row[column] == getattr(each, column)
        assert row["our_acceptance"] == each.claim.acceptance


@pytest.mark.parametrize("text", [*(paper(name).text for name in HOMES), TEXT])
def test_every_claim_is_judged_as_the_authors_set_it_up(text):
    """The file has them in the order of their numbers, and each has a function that tests it."""
    about = text.as_authors
    assert [each.claim.id for each in about] == list(text._table["claims"])
    assert all(each.place and each.setting and each.paper and each.acceptance for each in about)
    assert all(each.judged or each.why for each in about)


def test_phases_of_a_burst_by_hand():
    """A load of 0 rises to 10 at 3 s and falls back at 6 s, in steps of 0.1 s."""
    load = np.zeros(100, np.int64)
    load[30:60] = 10
    load[45] = 11
    onset, peak, decline = phases(load, 0.1)
    assert (onset, peak, decline) == pytest.approx((2.9, 4.5, 6.0))


@pytest.mark.parametrize(
    ("with_rule", "printed", "lasts", "ours", "as_authors"),
    [
        (1.0, 1.0, 3436.0, Verdict.HOLDS, Verdict.HOLDS),
        (0.95, 1.2, 3436.0, Verdict.ADDED_RULE, Verdict.READING),
        (1.2, 1.2, 3436.0, Verdict.FAILS, Verdict.FAILS),
        (1.0, 1.0, 298.0, Verdict.FAILS, Verdict.FAILS),  # half of the flips of so short a run never end
    ],
)
def test_a12_is_judged_as_printed_too_and_needs_runs_of_ten_flips(with_rule, printed, lasts, ours, as_authors):
    """Slow flips reach these rates over static instances, with requests that wait as load and without."""
    bench = SimpleNamespace(
        ratio=lambda _, case, __: printed if case.endswith("_printed") else with_rule,
        workloads={HOUR: SimpleNamespace(trace=SimpleNamespace(duration=lasts))},
        stand_ins=lambda *_: "",
    )
    assert arrow.a12_slow_flips.verdict(arrow.a12_slow_flips(bench)) == ours
    (about,) = (each for each in ARROW.as_authors if each.claim.id == "A12")
    found = about(bench)
    assert about.verdict(found) == as_authors
    assert found.value == f"180 s {printed:.2f}, 300 s {printed:.2f}"


@pytest.mark.parametrize(("latency", "verdict"), [(0.4, Verdict.HOLDS), (0.8, Verdict.FAILS)])
def test_d14_compares_with_the_best_mode_of_each_planner(latency, verdict):
    shares = dict.fromkeys(PLANNERS, 0.7) | {"SLA-driven": 0.5, "SLA-driven, load planner in between": 0.6}
    shares |= {"load-driven": 0.3, "load-driven, estimates": 0.2, "load-driven, low thresholds": latency}
    bench = SimpleNamespace(attainments=lambda name, *_: np.array([shares[name]]), hours=range(1))
    found = dopd.d14_bursts(bench)
    assert dopd.d14_bursts.verdict(found) == verdict
    assert f"load-driven, low thresholds {latency:.1%}" in found.value


@pytest.mark.parametrize(
    ("hours", "share", "holds"), [(5.0, 0.8, True), (5.0, 0.6, False), (6.5, 0.8, False), (5.0, 0.7, True)]
)
def test_d17_asks_for_fewer_gpu_hours_at_an_attainment_that_is_not_lower(hours, share, holds):
    """The best mode of each planner holds 6 GPU-hours and has 0.7 of the requests in time."""
    bench = SimpleNamespace(
        attainments=lambda name, *_: np.array([share if name == "DOPD" else 0.7]),
        gpu_hours=lambda name: hours if name == "DOPD" else 6.0,
        hours=range(1),
    )
    assert dopd.d17_resources(bench).holds == holds
