"""Verdicts: which claims count as reproduced, and which do not although their acceptance is met."""

import pytest

from lab.studies.claims import Claim, Finding, Without, evaluate, holding


def judged(holds, *, otherwise=None, by_construction=False):
    """A claim that is met or not, and what it comes to without an added rule."""
    found = Finding("1", holds, "", None if otherwise is None else Without("as printed", "2", otherwise))
    texts = {"id": "T1", "kind": "derived", "statement": "", "acceptance": ""}
    return evaluate([Claim(judge=lambda _: found, by_construction=by_construction, **texts)], {"measured": 0.0})


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
    table = judged(holds, otherwise=otherwise, by_construction=by_construction)
    assert table["verdict"].tolist() == [verdict]
    counts = holding(table).iloc[0]
    assert counts["holds"] == (verdict == "holds")
    assert counts["of"] == (verdict != "by construction")


def test_both_verdicts_are_printed():
    assert judged(True, otherwise=False)["without"].tolist() == ["as printed: 2; fails"]
    assert judged(True)["without"].tolist() == [""]
