"""Plans with drafts, apart and co-located: the simulator plays them, and finds the TPOT that was planned."""

import pytest

import disagg_sim as ds
from disagg_sim.planning.plan import PlanOptions, plan
from disagg_sim.planning.prove import prove


@pytest.fixture(scope="module")
def drafted():
    said = ds.load_speculation("mtp 0.75 0.5").trying((2,))
    options = PlanOptions(speculation=said)
    return plan("llama_3_1_8b", "h100_sxm", ds.lengths(1024, 256), ttft=1.0, tpot=0.01, rate=40, options=options)


def test_instances_of_every_kind_draft(drafted):
    assert {drafted.best.mode, drafted.other.mode} == {"colocated", "disaggregated"}
    assert [each.pools[-1].mapping.draft_tokens for each in (drafted.best, drafted.other)] == [2, 2]


def test_a_design_with_drafts_holds_as_planned_when_it_is_simulated(drafted):
    """Steps of both take AL = 2.25 tokens; the budget of the co-located ones holds three tokens a sequence."""
    for design in (drafted.best, drafted.other):
        found = prove(drafted, design, adapt=False).planned
        assert found.holds
        assert found.tpot["p50"] == pytest.approx(design.tpot["p50"], rel=0.06)


@pytest.mark.parametrize(("choices", "drafts"), [((2,), 2), ((0, 2), 0)])
def test_drafts_that_do_not_pay_are_left_out_only_where_none_is_a_choice(choices, drafts):
    """One in twenty is accepted: steps of three tokens a sequence take longer than they save."""
    options = PlanOptions(speculation=ds.load_speculation("mtp 0.05 0.01").trying(choices))
    found = plan("llama_3_1_8b", "h100_sxm", ds.lengths(1024, 256), ttft=1.0, tpot=0.05, gpus=1, options=options)
    assert found.best.pools[-1].mapping.draft_tokens == drafts
