"""Which designs of a plan are proven, which one is the answer then, and that flattered ones are simulated."""

from dataclasses import replace

import pytest

import disagg_sim as ds
from disagg_sim.domain import ServingMode
from disagg_sim.errors import InfeasibleError, MissingExtraError
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.planning import prove as module
from disagg_sim.planning import ranking
from disagg_sim.planning.answer import answer
from disagg_sim.planning.prove import DRAWS, RATE_STEP, Proof, ProofRun, _holding, checked, prove, resized
from disagg_sim.planning.replayed import run_options
from disagg_sim.simulation.kv_link import LinkSpec

SPLIT, JOINT = ServingMode.DISAGGREGATED, ServingMode.COLOCATED


@pytest.fixture(scope="module")
def planned():
    return ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), ttft="1 s", tpot="20 ms", rate=40)


def answered(planned, monkeypatch, needs):
    """Prove a plan of designs that need other GPUs than planned: (mode, planned, needed; None = not to be had)."""
    of_mode = {each.mode: each for each in (planned.best, planned.other)}
    designs = [replace(of_mode[mode], cost=float(cost)) for mode, cost, _ in needs]
    after, asked = {id(each): need for each, (_, _, need) in zip(designs, needs, strict=True)}, []

    def stood_in(plan, design=None, *, seed=0):
        design = plan.best if design is None else design
        asked.append((design.mode, design.cost))
        need = after[id(design)]
        if need is None:
            raise InfeasibleError("no request can keep its limits")
        fine = {"p50": 0.0, "p90": 0.0, "p99": 0.0}
        run = ProofRun(
            counts=(1,), rate=40.0, requests=1, ttft=fine, tpot=fine, hand_over=0.0, lost=0, holds_ttft=True,
            holds_tpot=True,
        )  # fmt: skip
        return Proof(planned=run, final=run, design=replace(design, cost=float(need)), runs=1)

    monkeypatch.setattr(module, "prove", stood_in)
    monkeypatch.setattr(module, "designs_at", lambda *_: [])
    best = designs[0]
    other = next((each for each in designs if each.mode != best.mode), None)
    rest = tuple(each for each in designs if each is not best)
    found, _ = module.proven(replace(planned, best=best, other=other, runners_up=rest))
    return found, asked


def test_another_design_of_the_mode_is_proven_where_the_cheapest_as_planned_needs_more(planned, monkeypatch):
    needs = [(JOINT, 10, 14), (SPLIT, 12, 12), (JOINT, 12, 12), (JOINT, 13, 11)]
    found, asked = answered(planned, monkeypatch, needs)
    assert asked == [(SPLIT, 12.0), (JOINT, 10.0), (JOINT, 12.0)]  # 13 could not be cheaper than 12
    assert (found.best.mode, found.best.cost, found.other.cost, found.gain) == (JOINT, 12.0, 12.0, 1.0)
    assert found.cheapest.cost == 12.0


def test_a_proven_layout_that_was_run_comes_first_up_to_a_tenth_above_the_cheapest(planned, monkeypatch):
    for room in (module, ranking):
        monkeypatch.setattr(room, "was_run", lambda design: design.cost not in (16, 18))
    found, asked = answered(planned, monkeypatch, [(SPLIT, 16, 16), (SPLIT, 17, 17), (SPLIT, 18, 18), (JOINT, 26, 26)])
    assert [cost for _, cost in asked] == [16.0, 17.0, 26.0]
    assert (found.best.cost, found.cheapest.cost) == (17.0, 16.0)
    found, _ = answered(planned, monkeypatch, [(SPLIT, 16, 16), (SPLIT, 17, 19), (JOINT, 26, 26)])
    assert found.best.cost == 16.0


def test_the_other_mode_is_the_answer_where_all_of_one_need_more(planned, monkeypatch):
    found, asked = answered(planned, monkeypatch, [(JOINT, 10, 15), (SPLIT, 12, 12), (JOINT, 14, 14)])
    assert len(asked) == 3
    assert (found.best.mode, found.best.cost) == (SPLIT, 12.0)
    assert found.gain == pytest.approx(14 / 12)


def test_designs_of_other_systems_are_proven_in_the_order_of_their_cost(planned, monkeypatch):
    """Each system's designs are a list of their own; a dearer one of the first does not end the search."""
    needs = [(JOINT, 10, 14), (JOINT, 15, 15), (JOINT, 11, 11)]
    found, asked = answered(planned, monkeypatch, needs)
    assert asked == [(JOINT, 10.0), (JOINT, 11.0)]
    assert found.best.cost == 11.0


def test_designs_that_cannot_be_simulated_are_left_out(planned, monkeypatch):
    found, _ = answered(planned, monkeypatch, [(JOINT, 10, None), (SPLIT, 12, 13)])
    assert (found.best.mode, found.other) == (SPLIT, None)
    with pytest.raises(InfeasibleError, match="no request"):
        answered(planned, monkeypatch, [(JOINT, 10, None)])


def test_a_proof_has_the_links_that_may_be_used_and_the_fastest_tiers_first(planned):
    design = next(each for each in (planned.best, planned.other) if each.mode == SPLIT)
    assert run_options(design, 1e9).link.bandwidth == 1e9  # of 450 GB/s
    assert run_options(design, None).link == LinkSpec()
    past = Reuse(share=ConstantShare(share=0.5), tiers=(("ssd", 0.5), ("hbm", 0.2), ("dram", 0.3)))
    lengths = ds.lengths(2048, 256, cached=past)
    found = run_options(replace(design, work=replace(design.work, lengths=lengths)), None)
    assert found.tiers == ("dram", "ssd")
    assert found.reuse == past


@pytest.fixture(scope="module")
def found():
    """Eight ranks with attention each for itself serve prompts and tokens: as planned on half of the GPUs."""
    options = ds.PlanOptions(within=None)
    return ds.plan("kimi_k2", "h100_sxm", ds.lengths(8192, 256), ttft="1 s", tpot="50 ms", rate=1.2, options=options)


def flattered(plan):
    return next(each for each in plan.runners_up if each.mode == ServingMode.COLOCATED)


def test_attention_dp_holds_under_every_draw_and_not_with_one_instance_fewer(found):
    design = flattered(found)
    assert design.flattered
    assert design.simulated is not None
    assert all(prove(found, design, adapt=False, seed=seed).planned.holds for seed in DRAWS)
    fewer = resized(found, design, tuple(pool.instances - 1 for pool in design.pools), design.rate)
    assert not all(prove(found, fewer, adapt=False, seed=seed).planned.holds for seed in DRAWS)


def test_a_check_adds_gpus_never_takes_them_away(found):
    planned = answer(replace(found, best=None), lambda design: design).best
    assert planned.simulated is None
    assert planned.gpus < flattered(found).gpus
    larger = resized(found, planned, tuple(3 * pool.instances for pool in planned.pools), planned.rate)
    assert checked(found, larger, {}) is larger


def test_what_no_counts_hold_is_not_told(found):
    planned = flattered(found)
    strict = replace(planned.work, tpot=replace(planned.work.tpot, seconds=planned.work.tpot.seconds / 100))
    assert checked(found, replace(planned, work=strict, simulated=None), {}) is None


def test_with_gpus_given_the_rate_gives_way_and_not_the_counts():
    """Of two instances that hold up to 8 requests/s: asked for 10, they serve nearly 8; asked for 6, 6."""

    class Runs:
        done = 0

        def at(self, counts, rate):
            self.done += 1
            times = dict.fromkeys(("p50", "p90", "p99"), 1.0)
            return ProofRun(
                counts=counts, rate=rate, requests=1000, ttft=times, tpot=times, hand_over=0.0, lost=0,
                holds_ttft=rate <= 4.0 * counts[0], holds_tpot=True,
            )  # fmt: skip

    found = _holding(Runs(), (2,), 10.0, by_rate=False)
    assert found.counts == (2,)
    assert 8.0 / (1.0 + RATE_STEP) <= found.rate <= 8.0
    assert _holding(Runs(), (2,), 6.0, by_rate=False).rate == 6.0


def test_the_capacity_of_a_simulated_design_is_that_of_one_instance_more(found):
    design = flattered(found)
    count = design.pools[0].instances
    assert design.rate <= design.capacity <= design.rate * count / (count - 1)


def test_others_are_told_as_planned_and_without_the_simulator(monkeypatch):
    def missing(*_):
        raise MissingExtraError("simulation needs numba")

    monkeypatch.setattr("disagg_sim.planning.prove.checked", missing)
    constant = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), tpot="20 ms", rate=40)
    assert constant.best.simulated is None
    assert not constant.best.flattered
    varied = ds.load_traffic("azure_2023_conversation").cases[0]
    assert ds.plan("llama_3_1_8b", "h100_sxm", varied, rate=40).best.flattered
