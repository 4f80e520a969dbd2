"""Plans whose experts become others' popular: longer passes, and when copies are moved."""

import math
from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_launcher
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.launch.engines import sglang_flags, trtllm_config, vllm_flags
from disagg_sim.launch.weights import Weights
from disagg_sim.launch.workers import workers_of
from disagg_sim.physics.rebalance import rebalancing
from disagg_sim.planning.aging import moves_of
from disagg_sim.planning.choices import prefill_choices
from disagg_sim.report.plan import plan_json, screen

R1 = Weights(checkpoint="deepseek-ai/DeepSeek-R1")


def planned(drift):
    options = ds.PlanOptions(expert_skew=1.0, max_redundant_experts=64, popularity_drift=drift, engine="sglang")
    return ds.plan("deepseek_r1", "h200_sxm", ds.lengths(4096, 1024), rate=60, options=options)


@pytest.fixture(scope="module")
def plans():
    return {drift: planned(drift) for drift in (None, 3600.0)}


def test_passes_are_longer_by_what_is_lost(plans):
    """Of the pool of prefill: its best pass takes 1 + loss of what it takes with copies just placed."""
    moving = plans[3600.0].best.pools[0]
    assert moving.mapping.redundant_slots
    mapping, chunk = replace(moving.mapping, chunk_tokens=0), int(moving.mapping.chunk_tokens)
    batch = [int(moving.choice.batch[-1])]
    still = ds.prefill_grid(moving.setup, mapping, ds.lengths(4096, 1024), batch=batch, chunk_tokens=[chunk or 512])
    (row,) = np.flatnonzero(still.mappings.chunk_tokens == chunk)
    moves = next(each for each in moves_of(plans[3600.0].best) if each.role == "prefill")
    ratio = moving.choice.busy[-1] * still.request_rate[row, 0] / batch[0]
    assert ratio == pytest.approx(1 + moves.loss, rel=1e-2)  # told of the longer pass
    assert moves.loss < moves.usual < moves.never


def test_passes_whose_pasts_are_loaded_age_too(plans):
    """By the loss of what they compute: 2,048 tokens of each of 8 prompts; the other half comes from DRAM as before."""
    pool = plans[3600.0].best.pools[0]
    half = ds.lengths(4096, 1024, cached=Reuse(share=ConstantShare(share=0.5), tiers=(("dram", 1.0),)))
    copied = ds.Mapping(dp_attn=8, ep=8, redundant_slots=8)
    grid = ds.prefill_grid(pool.setup, copied, half, batch=[8])
    (still,), (moving,) = (prefill_choices(grid, replace(plans[drift].work, lengths=half)) for drift in (None, 3600.0))
    done = {"tokens": 8 * 2048.0, "seconds": float(grid.busy[0, 0])}
    loss = float(rebalancing(pool.setup, copied, **done, drift=3600.0).loss)
    assert loss > 1e-3
    assert moving.busy[0] == pytest.approx(still.busy[0] * (1 + loss), rel=1e-9)
    assert moving.ftl[0, 0] == pytest.approx(still.ftl[0, 0] * (1 + loss), rel=1e-9)
    assert moving.loads.link == pytest.approx(still.loads.link)


@pytest.mark.long
def test_what_ages_fast_needs_no_fewer_gpus(plans):
    fast = planned(30.0)
    assert plans[None].best.gpus <= plans[3600.0].best.gpus <= fast.best.gpus


def test_the_period_is_told_and_given_to_engines(plans):
    plan = plans[3600.0]
    (moves,) = moves_of(plan.best)
    told = {row[0]: row[1] for block in screen(plan) for row in block.rows if len(row) > 1}
    assert f"({moves.passes:,} passes)" in told["experts"]
    assert plan_json(plan)["rebalancing"][0]["passes"] == moves.passes
    prefill = workers_of(plan.best)[0]
    assert vllm_flags(prefill, R1)["--eplb-config"]["step_interval"] == moves.passes
    assert sglang_flags(prefill, R1)["--eplb-rebalance-num-iterations"] == moves.passes
    assert "rebalancing" not in plan_json(plans[None])
    before = workers_of(plans[None].best)[0]
    assert "--eplb-rebalance-num-iterations" not in sglang_flags(before, R1)


def test_copies_that_are_never_moved_stay_in_every_engine():
    """As the plan says: SGLang starts no balancer, vLLM comes to no move in a year, TensorRT-LLM updates no layer."""
    options = ds.PlanOptions(
        expert_skew=1.0, max_redundant_experts=32, popularity_drift=60.0, engine="sglang", hold_prompts="none"
    )
    plan = ds.plan("deepseek_r1", "h200_sxm", ds.lengths(16384, 1024), rate=10, ttft=5.0, options=options)
    sends = next(each for each in plan.cases[0].across[0] if each.mapping.redundant_slots)  # some size has copies
    copied = replace(plan.best, pools=(replace(plan.best.pools[0], choice=sends), plan.best.pools[1]))
    moves = moves_of(copied)[0]
    assert moves.passes is None
    prefill = workers_of(copied)[0]
    flags, slots = sglang_flags(prefill, R1), int(prefill.mapping.redundant_slots)
    assert (flags["--ep-num-redundant-experts"], flags["--ep-dispatch-algorithm"]) == (slots, "static")
    assert set(flags) <= set(load_launcher("sglang").options)
    assert not {"--enable-eplb", "--eplb-rebalance-num-iterations"} & set(flags)
    copies = vllm_flags(prefill, R1)["--eplb-config"]
    assert copies["num_redundant_experts"] == slots
    assert copies["step_interval"] / 4 * 1e-3 > 365 * 86400  # its first move comes after a quarter, steps of 1 ms
    balanced = trtllm_config(prefill, R1)["moe_config"]["load_balancer"]
    assert balanced == {"num_slots": 256 + slots, "layer_updates_per_iter": 0}
    notes = [note for note in ds.launch(plan.best, engine="sglang").notes if "copies of experts" in note]
    assert not [note for note in notes if note.startswith("prefill")]


def test_a_period_in_passes_is_that_in_seconds(plans):
    best = plans[3600.0].best
    (moves,), pool = moves_of(best), best.pools[0]
    share = min(float(pool.mapping.chunk_tokens) / 4096, 1.0) or 1.0  # of a pass that a stage has at once
    tokens, seconds = share * pool.batch * 4096, share * float(pool.choice.busy[-1])
    found = rebalancing(pool.setup, pool.mapping, tokens=tokens, seconds=seconds, drift=3600.0)
    assert moves.period == pytest.approx(float(found.period))
    assert moves.passes == round(moves.period / seconds)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"popularity_drift": 60.0}, "acts with expert_skew and max_redundant_experts above 0 only"),
        ({"popularity_drift": 0.0, "expert_skew": 0.5, "max_redundant_experts": 8}, "popularity_drift"),
        ({"popularity_drift": math.nan, "expert_skew": 0.5, "max_redundant_experts": 8}, "popularity_drift"),
    ],
)
def test_faults_are_one_line(options, said):
    with pytest.raises(InputError, match=said):
        ds.PlanOptions(**options)
