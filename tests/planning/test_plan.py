"""Plans: what they promise, how they move with the question, and what errors say."""

import math
import re
from dataclasses import replace
from statistics import NormalDist
from unittest.mock import Mock

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.domain import ServingMode
from disagg_sim.errors import InputError
from disagg_sim.planning.assurance import GAIN_ERROR, RATE_ERROR, OwnTimes, _chance, _spread, assurance, surer
from disagg_sim.planning.flips import _asked_at, _axes, flips
from disagg_sim.planning.kv_links import transfer_between
from disagg_sim.planning.limits import SHARES, Limit, limit_of
from disagg_sim.planning.plan import demand_of, unevenness
from disagg_sim.planning.prove import prove, resized
from disagg_sim.planning.question import PlanOptions
from disagg_sim.planning.ranking import passed_over, ranked, standing, standing_of_pool
from disagg_sim.report.plan import design_json
from disagg_sim.report.plan_facts import checked_rows
from disagg_sim.report.plan_rows import runner_rows, verdict, why_rows

LENGTHS = ds.lengths(4096, 512)
ASK = {"ttft": "2 s", "tpot": "30 ms"}


def asked(model="llama_3_1_70b", system="h200_sxm", **changes):
    return ds.plan(model, system, LENGTHS, **(ASK | changes))


@pytest.fixture
def flips_along(monkeypatch):
    """Flips of a plan along one axis, or by price alone: the search along another takes as long."""

    def found(plan, axis):
        def one(*of):
            return (each for each in _axes(*of) if each[0] == axis)

        monkeypatch.setattr("disagg_sim.planning.flips._axes", one)
        return [each for each in flips(plan) if each.axis == axis]

    return found


@pytest.fixture(scope="module")
def twenty():
    return asked(rate=20)


def test_a_limit_that_every_design_keeps_has_error_bars_too():
    sure = assurance(ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), tpot="30 s", gpus=2))
    assert 0 <= sure.probability <= 1
    assert sure.capacity[0] < 1 < sure.capacity[1]


def test_pools_do_what_arithmetic_says(twenty):
    """Little: sequences in decode are rate x gaps x TPOT; the KV rate is that of a prompt a GPU."""
    decode = twenty.best.pools[-1]
    held = decode.sequences * decode.instances
    assert held == pytest.approx(20 * 511 * twenty.best.tpot["p50"], rel=0.05)
    kv = 80 * 2 * 8 * 128 * 4096  # layers, K and V, heads, width, tokens; one byte each
    assert twenty.best.kv_rate == pytest.approx(20 * kv / min(pool.gpus for pool in twenty.best.pools), rel=1e-6)


def test_a_mode_that_serves_nothing_within_the_limits_leaves_the_other_one():
    """With 2.65 ms a token no instance of both phases serves any rate; two pools do."""
    options = PlanOptions(max_nic=1e9)
    found = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(8192, 64), tpot="2.65 ms", gpus=8, options=options)
    assert found.best.mode == ServingMode.DISAGGREGATED
    assert found.other is None


def test_infeasible_limits_are_an_answer():
    found = asked(rate=20, tpot="1 ms")
    assert found.best is None
    assert "no mapping decodes in the TPOT limit of 1 ms (p90); the best step is" in found.infeasible
    assert "too few; the smallest deployment has 16" in asked(model="deepseek_r1", system="h100_sxm", gpus=8).infeasible


def test_prompts_that_are_in_time_only_alone_leave_no_number_of_instances():
    """A pass a hundredth below the limit leaves no room for a queue: of no pool is there a smallest deployment."""

    def said(ttft):
        lengths, options = ds.lengths(4096, 64), PlanOptions(prefill_system="h100_sxm")
        found = ds.plan("llama_3_1_8b", "h200_sxm", lengths, ttft=ttft, tpot="30 ms", gpus=8, options=options)
        return found.infeasible.split("; llama_3_1_8b in")[0]

    alone = float(re.search(r"the best pass with the host's share is (.*) ms", said(1e-3))[1])
    assert "h100_sxm: no number of instances keeps both limits with queueing; a TTFT limit of" in said(1.01e-3 * alone)


@pytest.mark.parametrize(
    ("text", "limit"),
    [("2", Limit(2.0)), ("500 ms@p99", Limit(0.5, 0.99)), ("1.5s p50", Limit(1.5, 0.5)), (0.03, Limit(0.03))],
)
def test_limits_are_read(text, limit):
    assert limit_of(text, "ttft") == limit


@pytest.mark.parametrize("text", ["", "fast", "2 s@p95", "-1", "0", "nan", "1..5"])
def test_other_limits_are_one_clear_line(text):
    with pytest.raises(InputError, match=r"ttft .* is no limit of latency; allowed: seconds above 0 or '500 ms'"):
        limit_of(text, "ttft")


def test_systems_without_a_price_are_left_out_where_others_have_one():
    found = asked(system="gb200_nvl72,h200_sxm", rate=20, options=PlanOptions(objective="usd"))
    assert {pool.setup.system.name for pool in found.best.pools} == {"h200_sxm"}
    assert found.left_out == ("no price is known of gb200_nvl72",)
    with pytest.raises(InputError, match="usd_per_gpu_hour of gb200_nvl72 is not known"):
        asked(system="gb200_nvl72", rate=20, options=PlanOptions(objective="usd"))


def test_layouts_are_those_that_the_engine_of_the_times_can_start():
    """TensorRT-LLM has attention DP over all GPUs of a stage or none, and shares no caches on Hopper."""
    question = ("deepseek_r1", "h200_sxm", ds.lengths(8192, 1024))
    found = ds.plan(*question, ttft="5 s", tpot="25 ms", gpus=64)
    pools = [pool for each in (found.best, *found.runners_up) for pool in each.pools]
    assert all(1 in (pool.mapping.tp_attn, pool.mapping.dp_attn) for pool in pools)
    said = "max_dcp 4: trtllm starts no such layout of deepseek_r1 on h200_sxm; engines that do: sglang, vllm"
    with pytest.raises(InputError, match=said):
        ds.plan(*question, gpus=64, options=PlanOptions(max_dcp=4))
    with pytest.raises(InputError, match="max_dcp 4: llama_3_1_70b on h200_sxm has no such layout; leave it out"):
        asked(rate=1, options=PlanOptions(max_dcp=4))


def test_a_pool_without_room_for_bursts_says_so():
    """At a load of 96 % a burst of 5 % takes a step to the TPOT limit; at 82 % one of a fifth does not."""
    full = ds.plan("qwen3_32b", "h100_sxm", ds.lengths(1024, 1024), rate=100)
    roomy = ds.plan("qwen3_32b", "h100_sxm", ds.lengths(1024, 1024), rate=100, options=ds.PlanOptions(headroom=0.2))
    for found, told in ((full, True), (roomy, False)):
        (pool,) = found.best.pools
        assert (pool.utilisation >= 0.95) == told
        ((_, why),) = why_rows(found, found.best)
        assert (
            f"at a load of {pool.utilisation:.0%} a burst takes a step to the TPOT limit: --headroom" in why
        ) == told


def test_a_narrower_link_flips_the_answer_where_it_is_said_to(flips_along):
    """At 4 GB/s a GPU two pools still win; at the bandwidth of the flip they do not."""
    asked = {"ttft": "2 s", "rate": 20}
    case = "llama_3_1_70b", "h100_sxm", ds.lengths(4096, 256)
    found = ds.plan(*case, **asked, options=ds.PlanOptions(max_nic=4e9))
    (flip,) = flips_along(found, "nic")
    assert flip.value == pytest.approx(4e9 * flip.factor)
    assert flip.factor < 1
    again = ds.plan(*case, **asked, options=ds.PlanOptions(max_nic=flip.value))
    assert (found.best.mode, again.best.mode, flip.mode) == ("disaggregated", "colocated", "colocated")


def test_limits_hold_as_far_as_the_bands_beside_them_say(twenty):
    """Slower passes than its limit over the latency at this rate miss it, and their share is that of the band."""
    best, sure = twenty.best, assurance(twenty)
    assert sure.holds <= min(sure.ttft_holds, sure.tpot_holds)
    room = {"ttft": twenty.work.ttft.seconds / best.ttft["p90"], "tpot": twenty.work.tpot.seconds / best.tpot["p90"]}
    for band, holds, limit in ((sure.ttft, sure.ttft_holds, room["ttft"]), (sure.tpot, sure.tpot_holds, room["tpot"])):
        sigma = math.log(band[1] / band[0]) / (2 * NormalDist().inv_cdf(0.9))
        assert holds < NormalDist().cdf(math.log(limit) / sigma) + 0.05
    sizes = [best.keeping(twenty.work.ttft.seconds / slower, math.inf) for slower in (0.5, 1.0, 1.2, 10.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] >= best.rate
    assert sizes[-1] == 0.0


def test_a_median_meets_the_decode_steps_of_the_mean_rate(twenty):
    """Prompts queue as in a surge for any share; a hand-over waits for steps that are longer in it but in a median."""

    def kept(percentile, surge):
        work = replace(twenty.work, ttft=replace(twenty.work.ttft, share=SHARES[percentile]), surge=surge)
        return surge * replace(twenty.best, work=work).keeping(twenty.best.ttft[percentile], math.inf)

    assert kept("p90", 1.5) == pytest.approx(kept("p90", 1.0), rel=2e-3)
    assert kept("p50", 1.5) > 1.01 * kept("p50", 1.0)


@pytest.mark.parametrize(("slower", "late_s"), [(1.0, 0.0), (1.2, 0.0), (1.0, 0.3), (1.15, -0.02), (1.0, 9.0)])
def test_what_is_kept_is_what_slower_passes_and_later_engines_keep(twenty, slower, late_s):
    """Passes that take 1.2 times as long, and requests that spend more beside them, by the queues of such a pool.

    The hand-over is as long as planned: its steps and its transfer have factors of their own.
    """
    best, limit = twenty.best, twenty.work.ttft.seconds
    pool = best.pools[0]
    late = replace(
        pool.choice, busy=slower * pool.choice.busy, ftl=slower * pool.choice.ftl, host=pool.choice.host + late_s
    )
    expected = replace(best, pools=(replace(pool, choice=late), *best.pools[1:])).keeping(limit, math.inf)
    own = OwnTimes(prefill=np.array([slower]), step=np.ones(1), throughput=np.ones(1), beside=np.array([late_s]))
    decode = best.keeping(math.inf, math.inf)  # which does not change
    assert min(float(own.kept(best)[0][0]) * best.rate, decode) == pytest.approx(
        min(expected, decode), rel=4e-3
    )  # decode takes as long


def test_causes_of_a_first_token_add_up_to_it_and_move_by_themselves(twenty):
    best = twenty.best
    causes = assurance(twenty).ttft_causes
    assert [each.cause for each in causes] == ["engine", "pass", "queue", "transfer", "decode steps"]
    assert sum(each.forecast for each in causes) == pytest.approx(best.ttft["p90"])
    assert all(each.band[0] < each.forecast < each.band[1] for each in causes)
    one, none = np.ones(1), np.zeros(1)
    planned = OwnTimes(one, one, one, none).causes(best)
    time = transfer_between(best.first.choice, best.pools[-1].choice)
    for name, own, more in (
        ("transfer", OwnTimes(one, one, one, none, transfer=2 * one), time),
        ("engine", OwnTimes(one, one, one, none + 0.1), 0.1),
        ("encoding", OwnTimes(one, one, one, none, encoding=2 * one), 0.0),
    ):
        moved = own.causes(best)
        assert {each for each in planned if moved[each] != planned[each]} == {name} - {"encoding"}
        assert sum(moved.values())[0] - sum(planned.values())[0] == pytest.approx(more)
    slower = OwnTimes(one, 1.1 * one, one, none).causes(best)
    assert slower["decode steps"] == pytest.approx(1.1 * planned["decode steps"])
    later = OwnTimes(1.1 * one, one, one, none).causes(best)
    assert later["pass"] == pytest.approx(1.1 * planned["pass"])
    assert later["queue"] > 1.1 * planned["queue"], "slower passes fill the pool, too"


def test_a_surer_plan_has_the_least_headroom_that_makes_it_so():
    """With more headroom other layouts win, which are surer than asked for: half of these GPUs would do."""
    plan = ds.plan("glm_5_1", "b200_sxm", ds.lengths(8000, 1000), rate=10)
    sure = surer(plan, 0.9)
    assert assurance(sure).holds >= 0.9
    for headroom in (0.25, 0.5, 1.0, 2.0):
        other = plan.ask(options=replace(plan.options, headroom=headroom))
        assert other.best.gpus >= sure.best.gpus or assurance(other).holds < 0.9


def test_a_surer_plan_of_given_gpus_serves_a_lower_rate():
    plan = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), gpus=8)
    odds, sure = assurance(plan), surer(plan, 0.9)
    assert odds.holds < 0.9 <= assurance(sure).holds
    assert sure.best.rate == pytest.approx(odds.capacity[0] * plan.best.rate, rel=0.02)
    assert sure.best.rate < plan.best.rate
    assert sure.best.gpus == plan.best.gpus


def test_headroom_is_no_help_where_a_prompt_alone_may_be_too_slow():
    plan = ds.plan("llama_3_1_405b", "h100_sxm", ds.lengths(8192, 512), rate=3, ttft="0.8 s")
    assert assurance(plan).within_reach < 0.95
    assert surer(plan, 0.95) is plan


def test_simulation_proves_the_plan(twenty):
    """The closed forms are near what is simulated, and the counts within an instance of a pool.

    TTFT at the percentile of the limit; fewer wait for the shortest of many queues than Erlang's C says, so that
    medians of TTFT are planned too long.
    """
    proof = prove(twenty)
    assert proof.proven
    assert proof.planned.ttft["p90"] == pytest.approx(twenty.best.ttft["p90"], rel=0.15)
    assert 0.7 * twenty.best.ttft["p50"] < proof.planned.ttft["p50"] < 1.1 * twenty.best.ttft["p50"]
    assert proof.planned.tpot["p50"] == pytest.approx(twenty.best.tpot["p50"], rel=0.1)
    assert abs(proof.design.gpus - twenty.best.gpus) <= 2


def test_a_proof_adds_instances_until_the_limits_hold(twenty):
    """From two pools that are too small simulation finds the counts of the plan again."""
    small = resized(twenty, twenty.best, tuple(pool.instances - 1 for pool in twenty.best.pools), 20.0)
    proof = prove(twenty, small)
    assert not proof.planned.holds
    assert proof.proven
    assert abs(proof.design.gpus - twenty.best.gpus) <= 2


def test_surges_of_a_trace_count_by_their_requests():
    """900 s at 5 requests/s and 100 s at 50: more than half of the requests see 50, the mean is 9.5."""
    quiet, busy = np.arange(0, 900, 0.2), np.arange(900, 1000, 0.02)
    times = np.concatenate([quiet, busy])
    trace = ds.Trace(arrival=times, input_tokens=np.full(times.size, 500), output_tokens=np.full(times.size, 50))
    dispersion, surge = unevenness(trace, trace.rate, 1.0, 0.9)
    assert surge == pytest.approx(50 / 9.5, rel=0.05)
    assert dispersion == 1.0  # within a surge requests come evenly
    calm = unevenness(trace, trace.rate, 1.0, 0.4)[1]
    assert calm == 1.0  # the mean is sized for at least
    for ttft, tpot in (("1 s@p90", "40 ms@p50"), ("1 s@p50", "40 ms@p90")):  # the stricter of both percentiles
        work, _ = demand_of(trace, ttft=ttft, tpot=tpot, rate=None, options=PlanOptions())
        assert work.surge == surge


def test_the_systems_of_a_plan_may_be_named_in_any_order():
    """The system that serves the most with so many GPUs is the answer of each mode, first named or last."""
    names = ["h100_sxm", "l40s", "b200_sxm"]
    found = [ds.plan("llama_3_1_8b", order, ds.lengths(2048, 256), gpus=2) for order in (names, names[::-1])]
    for design in ("best", "other"):
        first, last = (getattr(each, design) for each in found)
        assert (first.pools[0].setup.system.name, first.mode, first.rate) == (
            last.pools[0].setup.system.name,
            last.mode,
            last.rate,
        )
    assert found[0].best.pools[0].setup.system.name == "b200_sxm"


def test_a_proven_design_has_simulated_latencies(twenty):
    proof = prove(twenty, adapt=False)
    assert (proof.design.ttft, proof.design.tpot) == (proof.final.ttft, proof.final.tpot)
    shown = replace(twenty, best=proof.design)
    assert all(row[5].endswith(", planned") for row in runner_rows(shown))
    assert design_json(shown, shown.best)["simulated"]
    assert "simulated" not in design_json(twenty, twenty.best)
    assert resized(twenty, proof.design, proof.final.counts, 20.0).ttft == twenty.best.ttft


def test_modes_that_are_as_good_are_told_so(twenty):
    """A verdict takes 10 % and a probability of 90 %; below 10 % the simpler mode comes first."""
    odds = replace(assurance(twenty), probability=0.89, holds=0.61, ttft_holds=0.62, tpot_holds=0.7, within_reach=0.92)
    assert twenty.gain >= 1.1
    assert verdict(twenty, odds)[0].startswith("EITHER WILL DO: ")
    assert verdict(twenty, odds)[2].endswith("is named first: its forecast is ahead, with a probability below 90 %")
    for chance in (0.89, 0.896, 0.8999):  # not rounded up to the 90 % that it is below
        assert "a probability of 89 %" in verdict(twenty, replace(odds, probability=chance))[-1]
    assert ", 1.09 times as many" in verdict(replace(twenty, gain=1.099), odds)[0]
    holds = "the limits hold at this rate with a probability of 61 % (TTFT 62 %, TPOT 70 %)"
    odds = replace(odds, capacity=(0.75, 1.2))  # 20 requests/s as planned, 15 with 90 %
    assert verdict(twenty, odds)[1] == f"{holds}, at 15 requests/s with 90 %; --confidence 0.9 plans for 90 %"
    assert verdict(twenty, replace(odds, within_reach=0.8))[1] == f"{holds}; no headroom makes it more than 80 %"
    assert verdict(replace(twenty, other=None), odds)[1].startswith(holds), "told where only one mode is feasible, too"
    sure = replace(odds, probability=0.9)
    assert "EITHER" not in verdict(twenty, sure)[0]
    assert verdict(replace(twenty, gain=1.09), sure)[0].startswith("EITHER WILL DO: ")
    dearer = verdict(replace(twenty, gain=0.95, best=twenty.other, other=twenty.best), None)
    assert dearer[-1] == "co-located is named first: one pool, and no caches to move"


@pytest.mark.parametrize(("error", "ahead"), [(GAIN_ERROR, 0.13), (RATE_ERROR, 0.12)])
def test_chances_count_what_simulations_found(error, ahead):
    """A forecast one s.d. ahead holds with the probability of one s.d., 84.1 %."""
    assert _chance(np.exp([ahead]), error) == pytest.approx(0.8413, abs=1e-4)
    assert _chance(np.exp([ahead, ahead - error.deviation]), error) == pytest.approx((0.8413 + 0.5) / 2, abs=1e-4)
    assert np.median(_spread(np.ones(1), error)) == pytest.approx(np.exp(error.mean), rel=0.02)
    assert np.isnan(_chance(np.zeros(0), error))


@pytest.mark.parametrize(("axis", "means"), [("isl", (8192, 512)), ("osl", (4096, 1024))])
def test_a_question_asked_again_changes_one_length(twenty, axis, means):
    ask = Mock()
    _asked_at(replace(twenty, ask=ask), axis, 2.0)
    law = ask.call_args.kwargs["lengths"]
    assert (law.mean_isl, law.mean_osl) == means


@pytest.mark.parametrize("isl", [1, 2])
def test_flips_of_the_shortest_prompts_ask_for_none_without_a_token(flips_along, isl):
    found = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(isl, 128), rate=10)
    assert all(flip.value >= 1 for flip in flips_along(found, "isl"))


@pytest.mark.parametrize(("engine", "unjudged"), [("sglang", True), ("vllm", False)])
def test_an_engine_that_mixes_steps_only_if_told_was_never_judged_so(engine, unjudged):
    """Runs of SGLang stop decode for prefill; a plan of one pool puts prompts into the steps of decodes."""
    found = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), rate=10, options=PlanOptions(engine=engine))
    (pool,) = found.best.pools
    assert pool.role == "colocated"
    ((_, said, _),) = checked_rows(assurance(found))
    assert ("no run of this engine judged" in said) == unjudged
    noted = any("no served run has judged" in line for line in ds.launch(found.best, engine=engine).notes)
    assert noted == unjudged


def test_systems_that_share_their_kernels_are_not_told_apart():
    """GB300 has no kernels of its own, and gpt-oss leaves its larger memory empty; H200 was timed by itself."""
    said = "; not told apart: times of gb300_nvl72 are those of gb200_nvl72"
    for systems, more in (("gb200_nvl72,gb300_nvl72", said), ("b200_sxm,h200_sxm", "")):
        found = ds.plan("gpt_oss_120b", systems, ds.lengths(1024, 512), tpot="20 ms", rate=50)
        best = found.best.pools[0].setup.system.name
        second = next(each for each in found.runners_up if each.pools[0].setup.system.name != best)
        assert passed_over(found.best, second).partition(";")[2] == more.lstrip(";")


@pytest.mark.parametrize("systems", ["h100_sxm,h200_sxm", "h200_sxm,h100_sxm"])
def test_of_as_many_gpus_those_of_the_lower_price_come_first(systems):
    """One GPU of either serves it, H200 sooner; the market asks less for H100."""
    found = ds.plan("llama_3_1_8b", systems, ds.lengths(2048, 256), tpot="20 ms", rate=10)
    second = next(each for each in found.runners_up if each.gpus == 1)
    assert [each.pools[0].setup.system.name for each in (found.best, second)] == ["h100_sxm", "h200_sxm"]
    assert second.ttft["p90"] < found.best.ttft["p90"]
    assert passed_over(found.best, second) == "GPUs of a higher price"


def test_a_cheaper_gpu_wins_where_its_deployment_costs_as_little(flips_along):
    """20 H100 against 16 H200: at 20/16 of the price of an H100 both cost the same."""
    options = PlanOptions(objective="usd", prices={"h100_sxm": 3.0, "h200_sxm": 5.0})
    plan = asked(system="h100_sxm,h200_sxm", rate=20, tpot="50 ms", options=options)
    second = next(each for each in plan.runners_up if each.pools[-1].setup.system.name == "h200_sxm")
    (flip,) = flips_along(plan, "price")
    assert (plan.best.pools[-1].setup.system.name, flip.system) == ("h100_sxm", "h200_sxm")
    assert flip.value * second.gpus == pytest.approx(3.0 * plan.best.gpus)
    assert flip.value == pytest.approx(5.0 * flip.factor)


def test_a_plan_without_a_frontier_of_its_layouts_says_nothing_of_how_sure_it_is():
    lengths = ds.lengths(8192, 256)
    sure = assurance(ds.plan("llama_3_1_70b", "h100_sxm", lengths, ttft="480 ms", tpot="25 ms", rate=0.3))
    assert math.isnan(sure.probability)
    assert math.isnan(sure.holds)


def test_a_pool_that_was_run_counts_beside_one_that_was_not(twenty):
    """Of two designs with a decode pool that nobody ran, the one whose prefill pool was run comes first."""
    prefill, decode = twenty.best.pools if len(twenty.best.pools) == 2 else twenty.other.pools
    design = twenty.best if len(twenty.best.pools) == 2 else twenty.other
    known = standing_of_pool(prefill)._replace(unknown=0)
    unknown = {decode.role: known._replace(unknown=1), prefill.role: known}
    both = standing(design, of_pool=lambda pool: known._replace(unknown=1, late=0.1))
    one = standing(design, of_pool=lambda pool: unknown[pool.role])
    assert (one.unknown, both.unknown) == (1, 2)
    assert one < both


@pytest.mark.parametrize(
    ("costs", "run", "expected"),
    [
        ({"disaggregated": (100, 109), "colocated": (118,)}, (109, 118), 109),  # 1.18 of the cheapest of all
        ({"disaggregated": (100, 109), "colocated": (110,)}, (109, 110), 110),
        ({"disaggregated": (100,), "colocated": (109,)}, (100,), 100),
        ({"disaggregated": (100,), "colocated": (109,)}, (), 109),
        ({"disaggregated": (100,), "colocated": (112,)}, (112,), 100),
        ({"disaggregated": (112,), "colocated": (100,)}, (112,), 100),
    ],
)
def test_what_was_run_and_what_is_simpler_cost_together_at_most_a_tenth_more(twenty, monkeypatch, costs, run, expected):
    """Layouts that were run come first, then co-located serving, of what costs at most 1.1 times the cheapest."""
    of_mode = {each.mode: each for each in (twenty.best, twenty.other)}
    designs = [replace(of_mode[ServingMode(mode)], cost=cost) for mode, every in costs.items() for cost in every]
    monkeypatch.setattr("disagg_sim.planning.ranking.was_run", lambda design: design.cost in run)
    assert ranked(designs)[0].cost == expected


def told_of_gpus(monkeypatch, run):
    """A plan for 4 GPUs of one of two systems, where only some designs were run."""
    for room in ("ranking", "answer"):
        monkeypatch.setattr(f"disagg_sim.planning.{room}.was_run", run)
    return ds.plan("llama_3_1_8b", "h100_sxm,h200_sxm", ds.lengths(8192, 16), gpus=4)


def system_of(design):
    return design.pools[-1].setup.system.name


def test_of_the_systems_that_serve_as_much_the_one_whose_layouts_were_run_comes_first(monkeypatch):
    """Both have the same arithmetic, which binds a prompt of 8,192 tokens; H200 serves a little more."""
    found = {
        name: told_of_gpus(monkeypatch, lambda design, name=name: system_of(design) == name)
        for name in ("h100_sxm", "h200_sxm")
    }
    assert {name: system_of(plan.best) for name, plan in found.items()} == {name: name for name in found}
    assert found["h100_sxm"].best.rate < found["h200_sxm"].best.rate < 1.1 * found["h100_sxm"].best.rate


def test_a_plan_for_gpus_lists_a_design_that_was_run_where_the_best_was_not(monkeypatch):
    """Instances of 4 GPUs, which serve less than those of one."""
    plan = told_of_gpus(monkeypatch, lambda design: all(pool.mapping.gpus == 4 for pool in design.pools))
    assert plan.best.pools[0].mapping.gpus == 1
    assert [each.gpus for each in plan.runners_up if each.pools[0].mapping.gpus == 4] == [4]


def test_a_layout_that_its_weights_fill_is_not_planned():
    """Weights of R1 in NVFP4 take 95 % of two GB200; with buffers and the cache of a prompt 1 % is left."""
    at, asked = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"), ds.lengths(4096, 1024)
    (whole,) = ds.prefill_grid(at, ds.Sharding(tp_attn=2, ep=2), asked, batch=[1]).memory_bytes.ravel()
    assert 0.97 < whole / at.system.hbm_reported < 1.0
    found = ds.plan("deepseek_r1", "gb200_nvl72", asked, rate=10.0)
    pools = [pool for design in (found.best, *found.runners_up) for pool in design.pools]
    assert min(pool.mapping.gpus for pool in pools) == 4


def test_the_gpus_of_a_plan_for_a_rate_serve_that_rate():
    """The decode pool of the fewest GPUs has the slowest steps, and may leave prefill no time: others are tried."""
    asked = {"lengths": ds.lengths(2048, 256), "ttft": "120 ms", "tpot": "50 ms"}
    rated = ds.plan("llama_3_1_8b", "h100_sxm", **asked, rate=400.0).best
    most = ds.plan("llama_3_1_8b", "h100_sxm", **asked, gpus=rated.gpus).best
    assert (rated.mode.value, most.mode.value) == ("disaggregated",) * 2
    assert 1.1 * most.rate >= 400.0  # layouts that were run come first up to a tenth
