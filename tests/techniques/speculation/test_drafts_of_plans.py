"""Drafts of a plan in its question, pools, page and files; searches over several numbers of drafts."""

import pytest

import disagg_sim as ds
from disagg_sim.cli.tables import blocks_text
from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_speculation
from disagg_sim.planning.question import PlanOptions
from disagg_sim.report.page.write import content_of, page_html, plan_content
from disagg_sim.report.plan import PlanExtras, screen, write_plan
from disagg_sim.report.plan_rows import question_line
from disagg_sim.serving.colocated import count_colocated
from disagg_sim.serving.colocation import ColocatedCase
from disagg_sim.serving.piggyback import count_piggyback

ASKED = {"ttft": "2 s", "tpot": "15 ms", "rate": 5}
DRAFTERS = ("mtp 0.75 0.5", "draft_model llama_3_1_8b 0.75 0.5")


@pytest.fixture(scope="module", params=DRAFTERS)
def plan(request):
    options = PlanOptions(speculation=ds.load_speculation(request.param).trying((2,)))
    return request.param, ds.plan("llama_3_1_70b", "h200_sxm", ds.lengths(1024, 256), **ASKED, options=options)


def test_the_page_of_a_plan_shows_its_drafts(plan, tmp_path):
    """Pools that decode say their draft tokens, prefill none; the question names drafter and acceptance."""
    drafter, found = plan
    write_plan(found, PlanExtras(), blocks_text(screen(found, PlanExtras())), tmp_path)
    shown = plan_content(tmp_path).facts["plan"]
    for design in (shown["best"], *shown["runners_up"]):
        for pool in design["pools"]:
            assert pool["mapping"].endswith(", draft tokens 2") is (pool["role"] != "prefill")
    assert shown["question"]["speculation"] == drafter
    assert f"drafts of {drafter}" in question_line(found)
    page = page_html(content_of(tmp_path))
    assert ", draft tokens 2" in page
    assert f"drafts of {drafter}" in page


def test_a_draft_model_meets_a_limit_that_fails_without_it():
    """No step of the 70B on H200 is as short as 5 ms; of those that verify two drafts a token takes less."""
    options = PlanOptions(speculation=ds.load_speculation("draft_model llama_3_1_8b 0.75 0.5"))
    asked = {"ttft": "2 s", "tpot": "5 ms", "rate": 1}
    alone = ds.plan("llama_3_1_70b", "h200_sxm", ds.lengths(1024, 256), **asked)
    drafted = ds.plan("llama_3_1_70b", "h200_sxm", ds.lengths(1024, 256), **asked, options=options)
    assert alone.best is None
    assert drafted.best.pools[-1].mapping.draft_tokens == 2


WIDE = Sharding(dp_attn=8, ep=8)


def drafted(*drafts: int):
    drafter = load_speculation("mtp 0.8 0.6 0.45").trying(drafts)
    return ds.setup("deepseek_r1", "h200_sxm", "fp8", speculation=drafter)


@pytest.mark.parametrize(("mode", "count"), [(ds.colocated, count_colocated), (ds.piggyback, count_piggyback)])
def test_several_numbers_of_drafts_are_searched_as_each_alone(mode, count):
    """The best of all numbers is the best of what each has alone, and three accepted tokens pay."""
    options = ds.Colocation(batch=(8, 256))

    def counted(*drafts):
        case = ColocatedCase(at=drafted(*drafts), lengths=ds.lengths(4096, 1024), ftl_limit=100.0, options=options)
        return count(case, WIDE)

    assert counted(1, 2, 3) == counted(1) + counted(2) + counted(3)
    alone = [mode(drafted(k), WIDE, ds.lengths(4096, 1024), ftl_limit=100.0, options=options) for k in (1, 2, 3)]
    together = mode(drafted(1, 2, 3), WIDE, ds.lengths(4096, 1024), ftl_limit=100.0, options=options)
    best = [min(table["ttl_mean_s"].iloc[row] for table in alone) for row in (0, 1)]
    assert together["ttl_mean_s"].tolist() == pytest.approx(best, rel=1e-12)
    assert together["decode_draft_tokens"].max() > 1
