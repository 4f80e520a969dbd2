"""Claims as the authors set them up: every claim has both verdicts, and each says where the paper has it."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab.studies.arrow.as_authors import phases
from lab.studies.as_authors import COLUMNS, AsAuthors, detail_rows, evaluate_as_authors, verdict_rows
from lab.studies.beyond_the_buzz.as_authors import CLAIMS as BUZZ
from lab.studies.claims import PAPER, Finding, Verdict, Without, claim
from lab.studies.papers import HOMES, paper

ROOT = Path(__file__).parents[3]


def known(value, holds, without=None, **more):
    """A claim that finds what it is given."""

    @claim("T1", kind=PAPER, statement="two is two", acceptance="exact", **more)
    def found(_: float) -> Finding:
        return Finding(value, holds, "", without)

    return found


OURS = pd.DataFrame([{"id": "T1", "value": "1", "verdict": "fails", "note": "slow"}])
PRINTED = Without("as printed", "2", True)


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
    assert tuple(shown) == COLUMNS
    for each in import_module(f"lab.studies.{name}.as_authors").CLAIMS:
        row = shown[shown["id"] == each.claim.id].iloc[0]
        for column in ("statement", "place", "setting", "paper", "inferred", "acceptance", "why"):
            assert row[column] == getattr(each, column)
        assert row["our_acceptance"] == each.claim.acceptance


@pytest.mark.parametrize("name", HOMES)
def test_every_claim_is_judged_as_the_authors_set_it_up(name):
    about = import_module(f"lab.studies.{name}.as_authors").CLAIMS
    assert [each.claim.id for each in about] == [each.id for each in paper(name).claims]
    assert all(each.place and each.setting and each.paper and each.acceptance for each in about)
    assert all(each.judged or each.why for each in about)


def test_every_claim_of_frontiers_is_judged_as_the_text_has_it():
    assert [each.claim.id for each in BUZZ] == [f"C{number}" for number in range(1, 37)]
    assert [each.claim.id for each in BUZZ if not each.judged] == ["C28"]
    assert all(each.place and each.setting and each.paper and each.acceptance for each in BUZZ)


def test_phases_of_a_burst_by_hand():
    """A load of 0 rises to 10 at 3 s and falls back at 6 s, in steps of 0.1 s."""
    load = np.zeros(100, np.int64)
    load[30:60] = 10
    load[45] = 11
    onset, peak, decline = phases(load, 0.1)
    assert (onset, peak, decline) == pytest.approx((2.9, 4.5, 6.0))
