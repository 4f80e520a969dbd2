"""Verdicts, in our setting and as authors set a claim up: what counts as reproduced although it is met or missed."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab.studies.arrow.as_authors import phases
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
from lab.studies.papers import HOMES, paper

ROOT = Path(__file__).parents[3]


def known(value, holds, without=None, **more):
    """A claim that finds what it is given."""

    texts = {"id": "T1", "kind": "paper", "statement": "two is two", "acceptance": "exact"}
    return Claim(judge=lambda _: Finding(value, holds, "", without), **texts, **more)


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
    assert table["verdict"].tolist() == [verdict]
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
