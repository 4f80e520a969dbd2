"""Placements of experts that age between moves: analytic and simulated throughput, limits, and what is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.certainty.designs import cycle_of, times_of
from disagg_sim.certainty.rows import Origin, designs_of
from disagg_sim.cli.main import run as command
from disagg_sim.errors import InputError
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.rebalance import loss_at, rebalancing, staleness
from disagg_sim.planning.aging import moves_of
from disagg_sim.planning.prove import deployed
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.search.aging import aged, aged_together
from disagg_sim.simulation.placed import Aging, FfnPool, placed

BOUND = 0.02
COPIED = ds.Mapping(dp_attn=8, ep=8, redundant_slots=16)
ISL, OSL, BATCH = 2048, 513, 512


@pytest.fixture(scope="module")
def at():
    pytest.importorskip("numba")
    return ds.setup("deepseek_r1", "h200_sxm", "fp8", "measured_skew1")


def table(at, aging=None, mapping=COPIED):
    from disagg_sim.simulation.kernel.step_table import StepTable

    return StepTable.build(at, placed(mapping, None, None, aging), max_sequences=BATCH)


def emitted(steps, seconds, lengths, *, residents, **limits):
    """Tokens that an instance with a full queue emits in some time, the first ones of ages of their own."""
    from disagg_sim.simulation.kernel.fleet import Fleet, InstanceSpec
    from disagg_sim.simulation.kernel.layout import CLOSES, NOTIFY

    (context, prompt, generate), heard = lengths, NOTIFY | CLOSES
    fleet, now, last = Fleet([InstanceSpec(table=steps, blocks=10**6, **limits)]), 0.0, 0.0 if context else math.nan
    for request, age in enumerate(np.random.default_rng(0).integers(0, generate, residents).tolist()):
        fleet.submit(0, request, (context + prompt + age, 0, generate - age), 0.0, flags=heard, last_token_s=0.0)
    for request in range(BATCH):
        fleet.submit(0, request, lengths, 0.0, flags=heard, last_token_s=last)
    while now < seconds:
        _, now = fleet.run_until(seconds)
        if now < seconds:
            last = now if context else math.nan
            fleet.submit(0, len(fleet.segments), lengths, now, flags=heard, last_token_s=last)
    fleet.refresh(now)
    return fleet.views.decode_tokens[0] + fleet.views.first_tokens[0]


@pytest.mark.parametrize("of_best", [1.0, 0.1])
def test_a_decode_pool_loses_what_the_law_says(at, of_best):
    """Over whole periods, the best one and a tenth of it; what is lost within 5 % of itself, too."""
    exact = float(decode_step(at, COPIED, batch=float(BATCH), context=ISL + OSL / 2).ttl)
    found = rebalancing(at, COPIED, tokens=float(BATCH), seconds=exact, drift=120.0)
    period = of_best * float(found.period)
    loss = float(loss_at(period, found.move, found.growth, 120.0))
    seconds, lengths = round(0.5 / of_best + 0.5) * (period + float(found.move)), (ISL, 0, OSL - 1)
    fresh, aged = (
        emitted(table(at, aging), seconds, lengths, residents=BATCH, max_sequences=BATCH)
        for aging in (None, Aging(drift=120.0, period=period))
    )
    assert aged / seconds == pytest.approx(BATCH / exact / (1 + loss), rel=BOUND)
    assert loss > 0.01
    assert fresh / aged - 1 == pytest.approx(loss, rel=0.05)


def test_a_pipeline_loses_what_its_micro_batches_lose(at):
    """Four stages, each with a quarter of the sequences at once; of placements that are stale after a second."""
    piped = ds.Mapping(dp_attn=16, ep=16, pp=4, redundant_slots=16)
    grid = ds.decode_grid(at, piped, ds.lengths(ISL, OSL), batch=[BATCH])
    loss = float((aged(grid, 1.0).latency / grid.latency)[0, 0]) - 1.0
    whole = float(grid.latency[0, 0])
    by_hand = rebalancing(at, piped, tokens=BATCH / 4, seconds=whole / 4, drift=1.0)
    assert np.isinf(by_hand.period)
    assert loss == pytest.approx(float(by_hand.growth))
    fresh, stale = (
        emitted(table(at, aging, piped), 300.0, (ISL, 0, OSL - 1), residents=BATCH, max_sequences=BATCH)
        for aging in (None, Aging(drift=1.0, period=math.inf))
    )
    assert fresh / stale - 1 == pytest.approx(loss, rel=0.1)
    assert float(rebalancing(at, piped, tokens=float(BATCH), seconds=whole, drift=1.0).growth) > 1.2 * loss


def test_a_prefill_pool_loses_what_the_law_says(at):
    from disagg_sim.simulation.kernel.layout import Mode

    exact = float(prefill_pass(at, COPIED, batch=8.0, isl=ISL).busy)
    found = rebalancing(at, COPIED, tokens=8.0 * ISL, seconds=exact, drift=120.0)
    seconds = 2 * float(found.period + found.move)
    limits = {"mode": Mode.PREFILL_FIRST, "token_budget": 10**6, "max_prompts": 8}
    fresh, aged = (
        emitted(table(at, aging), seconds, (0, ISL, 1), residents=0, **limits)
        for aging in (None, Aging(drift=120.0, period=float(found.period)))
    )
    assert found.loss > 0.03
    assert aged / seconds == pytest.approx(8 / exact / (1 + float(found.loss)), rel=BOUND)
    assert fresh / aged - 1 == pytest.approx(float(found.loss), rel=0.05)


def test_a_co_located_instance_loses_what_the_law_says(at):
    """One placement for passes and steps, moved at the best period of both."""
    from disagg_sim.simulation.kernel.layout import Mode

    law, options = ds.lengths(4096, 1024), ds.Colocation(batch=(256,), prefill_batch=(8,))
    still, drifts = (
        ds.colocated(at, COPIED, law, options=replace(options, popularity_drift=drift)) for drift in (math.inf, 120.0)
    )
    (designs,) = designs_of(still, Origin(lengths=law))
    period = float(np.squeeze(aged_together(at, COPIED, cycle_of(designs, times_of(designs)), 120.0).period))
    seconds = 8 * (period + float(staleness(at, COPIED, 1.0)[1]))  # of two the loss is known to a fifth alone
    limits = {"mode": Mode.PREFILL_FIRST, "token_budget": 10**6, "max_prompts": 8, "max_sequences": 256}
    fresh, aged = (
        emitted(table(at, aging), seconds, (0, 4096, 1024), residents=256, **limits)
        for aging in (None, Aging(drift=120.0, period=period))
    )
    exact, before = (each.tokens_per_s_per_gpu.item() * COPIED.gpus for each in (drifts, still))
    assert aged / seconds == pytest.approx(exact, rel=BOUND)
    assert fresh / aged - 1 == pytest.approx(before / exact - 1, rel=0.1)
    assert before / exact > 1.01


def test_limits_of_drift_and_of_moves(at):
    """Never moved: copies lie anywhere. Moved at once and for nothing, or hardly drifting: nothing is lost."""
    asked = {"seconds": 60.0, "lengths": (ISL, 0, OSL - 1), "residents": BATCH, "max_sequences": BATCH}
    fresh, never = table(at), table(at, Aging(drift=120.0, period=math.inf))
    more = float(staleness(at, COPIED, float(BATCH))[0])
    step = fresh.step_time(BATCH, ISL + OSL / 2)
    tokens = emitted(fresh, **asked)
    assert tokens / emitted(never, **asked) == pytest.approx(1 + more / step, rel=1e-3)
    for aging in (Aging(drift=120.0, period=0.5), Aging(drift=1e9, period=30.0)):
        moved = table(at, aging)
        head = moved.head.copy()
        head["move_s"] = 0.0
        assert emitted(replace(moved, head=head), **asked) == pytest.approx(tokens, rel=1e-4)


def test_what_decodes_waits_for_a_move(at):
    """A request alone: one of the gaps between its tokens is longer by a move, and no time of work is."""
    from disagg_sim.simulation.kernel.fleet import Fleet, InstanceSpec

    steps = table(at, Aging(drift=1e9, period=10.0))
    fleet = Fleet([InstanceSpec(table=steps, blocks=10**6)])
    fleet.submit(0, 0, (ISL, 0, OSL - 1), 0.0, last_token_s=0.0)
    fleet.run_until(math.inf)
    (finish,), (busy,) = fleet.segments.finish_s, fleet.views.busy_s
    move = float(staleness(at, COPIED, 1.0)[1])
    assert 5.0 < busy < 15.0  # the placement is half a period old at the start: one move
    assert finish - busy == pytest.approx(move)
    last = np.flatnonzero(fleet.itl_counts)[-1]
    gap = move + steps.step_time(1, ISL + OSL / 2)
    assert fleet.itl_edges[last] * 0.98 < gap < fleet.itl_edges[last + 1] * 1.02


SCENARIO = """
{name: ages, model: deepseek_r1, system: h200_sxm, precision: fp8, profile: PROFILE, slo: {ttft_s: 9, tpot_s: 1},
 trace: {kind: synthetic, name: even, lengths: {isl: 1024, osl: 64}, rate_per_s: 4, requests: 20},
 policies: [vllm], deployments: {one: {colocated: {dp: 8, ep: 8, PART}}}}
"""
PART = "redundant_slots: 16, popularity_drift_s: 600, rebalance_s: 3"


def simulated(folder, part=PART, profile="measured_skew1"):
    (folder / "s.yaml").write_text(SCENARIO.replace("PART", part).replace("PROFILE", profile))
    return command(["simulate", str(folder / "s.yaml"), "--out", str(folder / "out"), "--no-figures", "--jobs", "1"])


def test_a_scenario_ages_and_is_written_again(at, tmp_path):
    assert simulated(tmp_path) == 0
    scenario = load_scenario(str(tmp_path / "s.yaml"))
    (deployment,), (source,) = scenario.deployments, scenario.traces
    assert deployment.colocated[0].aging == Aging(drift=600.0, period=3.0)
    served = replace(deployment, setup=at)
    found = ds.simulate(served, source.load(0), "vllm", slo=scenario.slo)
    still = replace(served, colocated=(replace(served.colocated[0], aging=None),))
    plain = ds.simulate(still, source.load(0), "vllm", slo=scenario.slo)
    assert found.summary().ttft_p90_s > plain.summary().ttft_p90_s + 0.1  # prompts wait for moves
    (again,) = load_scenario(str(ds.write_scenario(found, tmp_path / "written.yaml"))).deployments
    assert again.colocated[0].aging == deployment.colocated[0].aging


@pytest.mark.parametrize(
    ("part", "profile", "said"),
    [
        ("popularity_drift_s: 600, rebalance_s: 30", "measured_skew1", "acts with redundant_slots above 0"),
        (PART.replace(", rebalance_s: 3", ""), "measured_skew1", "rebalance_s is missing"),
        ("redundant_slots: 16, rebalance_s: 3", "measured_skew1", "acts with popularity_drift_s only"),
        (PART.replace("3", "0"), "measured_skew1", "0 is out of range"),
        (PART, "measured", "experts of profile 'measured' are all alike"),
    ],
)
def test_what_cannot_age_is_one_line(tmp_path, capsys, part, profile, said):
    assert simulated(tmp_path, part, profile) != 0
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_instances_that_cannot_age_are_refused():
    aging = Aging(drift=600.0, period=30.0)
    ffn = FfnPool(mapping=ds.Mapping(dp_attn=8, ep=8))
    for mapping, pool in ((ds.Mapping(dp_attn=8, ep=8), None), (COPIED, ffn)):
        with pytest.raises(InputError, match="redundant_slots above 0, and without ffn"):
            ds.Replicas(mapping=mapping, instances=1, ffn=pool, aging=aging)
    for drift, period in ((0.0, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.nan)):
        with pytest.raises(InputError, match=r"drift|period"):
            Aging(drift=drift, period=period)


def test_a_plan_made_with_drift_is_simulated_with_it():
    options = ds.PlanOptions(expert_skew=1.0, max_redundant_experts=64, popularity_drift=3600.0, engine="sglang")
    best = ds.plan("deepseek_r1", "h200_sxm", ds.lengths(4096, 1024), rate=60, options=options).best
    (moves,) = moves_of(best)
    served = deployed(best)
    parts = {"prefill": served.prefill, "decode": served.decode, "colocated": served.colocated}
    assert parts.pop(moves.role)[0].aging == Aging(drift=3600.0, period=moves.period)
    assert all(each.aging is None for entries in parts.values() for each in entries)
