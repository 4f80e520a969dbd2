"""Plans of more pools: counts with queues, what binds each pool, what simulations and the command say."""

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.certainty.pool_parts import encode_spent, split_parts
from disagg_sim.certainty.trust import Trust
from disagg_sim.cli.evaluate import pools_of_plan
from disagg_sim.cli.main import run
from disagg_sim.errors import InputError
from disagg_sim.physics.power import power_at
from disagg_sim.planning.energy import drawn, planned_prices, watts_of_pools
from disagg_sim.planning.flips import _again, flips
from disagg_sim.planning.limits import Demand, Limit
from disagg_sim.planning.pool_evidence import evidence_of
from disagg_sim.planning.prove import deployed, prove, resized
from disagg_sim.planning.question import PlanOptions, Size
from disagg_sim.report.page.write import plan_content
from disagg_sim.report.plan import plan_json
from disagg_sim.report.plan_rows import flip_lines
from disagg_sim.serving.pool_names import Images
from disagg_sim.simulation.instance_variants import split_of
from disagg_sim.techniques.encode.plan import EncodeChoice
from disagg_sim.techniques.encode.play import Encoders

FIVE = ("encode", "prefill", "attention", "ffn", "decode")
IMAGES = Images(images=2, height=1120, width=1120)
MODEL, SYSTEM, LENGTHS = "qwen3_5_35b_a3b", "gb200_nvl72", ds.lengths(4096, 256)
COMMAND = ("plan", "--model", MODEL, "--system", SYSTEM, "--isl", "4096", "--osl", "256")


def asked(
    pools=FIVE,
    images=IMAGES,
    size=Size(gpus=32),  # noqa: B008
    options=PlanOptions(),  # noqa: B008
    system=SYSTEM,
    ffn_system=None,
    lengths=LENGTHS,
    **limits,
):
    options = replace(options, pools=pools, images=images, ffn_system=ffn_system, users=size.users)
    return ds.plan(MODEL, system, lengths, rate=size.rate, gpus=size.gpus, options=options, **limits)


def parts(found):
    """Parts of the best design's pools by role, each with its pool."""
    return {part.role: (pool, part) for pool in found.best.pools for part in pool.halves}


def test_queues_and_the_hand_over_cost_what_the_integer_program_leaves_out():
    """Never more than its rate over the same candidates; nearly it where limits leave much room."""
    at = ds.setup(MODEL, SYSTEM, "nvfp4_fp8kv")
    cuts = ds.enumerate_mappings(at, layouts="launchable")
    step = ds.encode_step(at, images=2, height=1120, width=1120)
    grids = ds.prefill_grid(at, cuts, LENGTHS), ds.decode_grid(at, cuts, LENGTHS)
    pools, few = [step, *grids, ds.split_grid(at, LENGTHS, max_gpus=16)], Size(gpus=16)
    tight, loose = asked(size=few, ttft=0.25, tpot=0.03), asked(size=few, ttft=20.0, tpot=0.03)
    for found, least, ttft in ((tight, 0.8, 0.25), (loose, 0.9, 20.0)):
        best = ds.plan_pools(pools, gpu_budget=few.gpus, ftl_limit=ttft, ttl_limit=0.03)
        assert least * best.request_rate < found.best.rate <= best.request_rate * (1 + 1e-9)
    assert loose.best.rate > tight.best.rate


def test_the_queue_of_encoders_is_that_of_the_simulation():
    at = ds.setup(MODEL, SYSTEM, "nvfp4_fp8kv")
    step = ds.encode_step(at, images=2, height=1120, width=1120)
    work = Demand(lengths=LENGTHS, ttft=Limit(2.0), tpot=Limit(0.05))
    for gpus, used in ((1, 0.7), (3, 0.85), (8, 0.9)):
        rate = used * gpus / step.time
        arrival = np.cumsum(np.random.default_rng(gpus).exponential(1 / rate, 200_000))
        taken = Encoders(step=step, instances=gpus).sent(arrival) - arrival
        law = EncodeChoice(step=step, work=work).delay(rate, gpus)
        for share in (0.5, 0.9):
            assert law.at(share) == pytest.approx(np.quantile(taken, share), rel=0.15)
        mean = law.calm[0] + law.held_share[0] * law.wait
        assert mean == pytest.approx(taken.mean(), rel=0.05)


@pytest.mark.parametrize(("share", "most"), [(0.9, 5), (0.99, 6)])
def test_encoders_are_tried_until_nearly_nobody_waits(share, most):
    """By Erlang's C, 1.4 % wait for one of four GPUs that have work for 0.9, 0.24 % of five and 0.03 % of six."""
    step = ds.encode_step(ds.setup(MODEL, SYSTEM, "nvfp4_fp8kv"), images=2, height=1120, width=1120)
    work = Demand(lengths=LENGTHS, ttft=Limit(2.0, share), tpot=Limit(0.05))
    choice = EncodeChoice(step=step, work=work)
    assert [*choice.counts(0.9 / choice.step.each_s / work.spare)] == list(range(1, most + 1))


def test_ttft_is_told_at_the_planned_rate_of_both_queues():
    """Its mean is that of encoding and that of prefill, each at that rate and not at the one with headroom."""
    found = asked(("encode", "prefill", "decode"), size=Size(rate=300.0), options=PlanOptions(headroom=0.3))
    encode, prefill = found.best.pools[0], found.best.first
    step = ds.encode_step(encode.setup, images=2, height=1120, width=1120)
    before = EncodeChoice(step=step, work=found.best.work).delay(300.0, encode.instances)
    after = replace(prefill.choice, encode=None, queued=None).mean_ttft(300.0, prefill.instances)
    assert before.held_share[0] > 0.01
    assert prefill.choice.mean_ttft(300.0, prefill.instances) == pytest.approx(before.mean + after, rel=2e-3)


@pytest.mark.parametrize("decode", [("decode",), ("attention", "ffn")])
def test_a_simulation_meets_what_is_planned(decode):
    pytest.importorskip("numba")
    found = asked(("encode", "prefill", *decode), size=Size(rate=300.0), ttft=0.6, tpot=0.02)
    run = prove(found, adapt=False, seed=1).planned
    assert run.holds
    assert 0.85 * found.best.ttft["p90"] < run.ttft["p90"] < 1.02 * found.best.ttft["p90"]
    assert run.tpot["p90"] == pytest.approx(found.best.tpot["p90"], rel=0.03)
    assert deployed(found.best).all_gpus == found.best.gpus


@pytest.mark.long
def test_prefill_and_decode_alone_are_the_plan_without_pools():
    """Limits of requests, queues and all; in the words of ``plan``."""
    for size in (Size(rate=40.0), Size(users=200)):
        found = asked(("decode", "prefill"), None, size, ttft=2.0, tpot=0.02)
        options = PlanOptions(users=size.users)
        plain = ds.plan(MODEL, SYSTEM, LENGTHS, ttft=2.0, tpot=0.02, rate=size.rate, options=options)
        assert plan_json(found) == plan_json(plain)


@pytest.mark.parametrize("pools", [FIVE, ("encode", "prefill", "decode"), ("encode", "prefill", "attention", "ffn")])
def test_every_pool_keeps_up_with_room_for_its_queue(pools):
    found = asked(pools, size=Size(rate=100.0))
    best = found.best
    assert best.rate == 100.0
    assert {*parts(found)} <= set(pools)
    assert sum(part.gpus for _, part in parts(found).values()) == best.gpus
    assert 0.3 < max(pool.utilisation for pool in best.pools) < 1.0
    assert best.ttft["p90"] <= 2.0
    assert best.tpot["p90"] <= 0.05
    one = ds.encode_step(best.pools[0].setup, images=2, height=1120, width=1120)
    assert best.pools[0].instances >= -(-best.rate // one.request_rate)  # fewer GPUs would not keep up


def test_halves_of_an_instance_are_told_apart():
    """Each with its GPUs, its memory and the share of a step in which it waits, of one instance."""
    found = asked(("prefill", "attention", "ffn"), None)
    (pool, attention), (_, ffn) = (parts(found)[name] for name in ("attention", "ffn"))
    assert attention.gpus + ffn.gpus == pool.gpus
    assert attention.microbatches == ffn.microbatches > 1
    assert 0 <= min(attention.idle, ffn.idle) < max(attention.idle, ffn.idle) < 1
    each = pool.batch // (pool.mapping.dp_attn * ffn.microbatches)
    step = split_parts(pool.setup, split_of(pool.mapping, pool.mapping.ffn), LENGTHS, each)
    assert [held for held, _ in step.memory] == pytest.approx([attention.memory, ffn.memory])
    assert float(step.step.attention_idle) == pytest.approx(attention.idle)
    shares = step.parts.groupby("trust")["share"].sum().drop(Trust.ASSUMED, errors="ignore")
    rests = evidence_of(found, pool).tpot  # links and the host are assumed; at the mean sequences in flight
    assert {label: rests[label] for label in map(Trust, shares.index)} == pytest.approx(shares.to_dict(), rel=2e-3)
    assert sum(rests.values()) == pytest.approx(1.0)
    made = {each["role"]: each for each in plan_json(found)["best"]["pools"]}
    assert [made[name]["gpus"] for name in ("attention", "ffn")] == [attention.gpus, ffn.gpus]
    assert made["ffn"]["memory_bytes"] == ffn.memory
    assert (made["attention"]["dp_attn"], made["attention"]["ep"]) == (pool.mapping.dp_attn, 1)
    assert (made["ffn"]["dp_attn"], made["ffn"]["ep"]) == (1, pool.mapping.ffn.mapping.ep)
    spared = [each.gpus for each in replace(pool, spares=pool.instances).halves]
    assert spared == [2 * attention.gpus, 2 * ffn.gpus]


def test_what_binds_counts_the_encoders_and_the_caches_on_their_way():
    """Three pools take three GPUs; a prompt that meets no other waits for images, and for 0.1 GB over 1 MB/s a GPU."""
    three, narrow = ("encode", "prefill", "decode"), PlanOptions(max_nic=1e6)
    few = asked(three, size=Size(gpus=2)).infeasible
    assert few.endswith("2 GPUs are too few; the smallest deployment has 3")
    assert asked(three, size=Size(gpus=3)).best.gpus == 3
    step = ds.encode_step(ds.setup(MODEL, SYSTEM, "nvfp4_fp8kv"), images=2, height=1120, width=1120)
    late = asked(three, ttft=0.02).infeasible
    assert f"the host's share and {1e3 * step.latency:.3g} ms of encoding is" in late
    assert "TTFT limit of 500 ms (p90); the best hand-over takes" in asked(three, options=narrow, ttft=0.5).infeasible


def test_limits_that_would_do_are_those_of_so_many_gpus():
    """Prefill of 16,384 tokens that keeps 160 ms takes several GPUs, so three keep a looser limit only."""
    asking, limits = {"pools": ("encode", "prefill", "decode"), "lengths": ds.lengths(16384, 256)}, {}
    for gpus in (3, 8):
        said = asked(**asking, size=Size(gpus=gpus), ttft=0.15).infeasible
        limits[gpus] = float(re.search(r"a TTFT limit of ([\d.]+) ms", said)[1]) / 1e3
        assert asked(**asking, size=Size(gpus=gpus), ttft=limits[gpus]).best is not None
    assert limits[8] < limits[3]
    assert asked(**asking, size=Size(gpus=3), ttft=limits[8]).best is None


def test_the_shortest_prompt_of_a_law_has_room_for_its_images():
    """2,450 tokens of two images are less than the mean of 4,096, and more than the shortest of such lengths."""
    law, options = ds.lengths("log_normal_4096_512"), PlanOptions(pools=("encode", "prefill", "decode"), images=IMAGES)
    with pytest.raises(
        InputError, match=f"2450 tokens of {MODEL} are more than the shortest prompt, {law.isl[0]:.0f},"
    ):
        ds.plan(MODEL, SYSTEM, law, gpus=32, options=options)


def test_ranks_that_no_memory_holds_say_so():
    """One GPU of each half for 671 billion parameters."""
    options = PlanOptions(pools=("prefill", "attention", "ffn"))
    found = ds.plan("deepseek_r1", "h100_sxm", LENGTHS, gpus=2, options=options)
    assert found.best is None
    assert "no attention and feed-forward ranks fit in memory" in found.infeasible


def test_pools_draw_and_cost_what_their_parts_do():
    """Encoders work on each request, prefill and decode are those of a plan; prompts pay for two pools."""
    priced = PlanOptions(prices={SYSTEM: 4.0})
    found = asked(("encode", "prefill", "decode"), size=Size(rate=40.0), options=priced)
    power, (encode, prefill, decode) = drawn(found.best), found.best.pools
    spent, idle = encode_spent(encode.choice.step), power_at(encode.setup).idle
    work = 40.0 * (spent.joules - idle * spent.seconds) + encode.gpus * idle
    rest = sum(float(watts_of_pools([pool], found.best.work.lengths)[0]) for pool in (prefill, decode))
    assert power.watts == pytest.approx(work + rest)
    assert power.band[0] < power.watts < power.band[1]
    prices = planned_prices(found.best, priced.prices, 0.5)
    second = 4.0 / 3600 / 0.5 / 40.0  # of a GPU for a request
    assert float(prices.new) == pytest.approx(second * (encode.gpus + prefill.gpus) / 4096 * 1e6)
    assert float(prices.output) == pytest.approx(second * decode.gpus / 256 * 1e6)
    split = asked(("prefill", "attention", "ffn"), None, Size(rate=40.0)).best
    assert split.gpus * idle < drawn(split).watts < split.gpus * encode.setup.system.tdp


@pytest.mark.usefixtures("without_changes")
def test_the_files_of_a_plan_have_a_row_for_each_pool_and_each_half(tmp_path, capsys):
    extra = ("--pools", "encode,prefill,attention,ffn", "--images", "2x1120x1120", "--rate", "40")
    assert run([*COMMAND, *extra, "--availability", "0.999", "--out", str(tmp_path)]) == 0
    made, table = json.loads((tmp_path / "plan.json").read_text()), pd.read_csv(tmp_path / "designs.csv")
    best = table[table["place"] == 0]
    assert best["role"].tolist() == ["encode", "prefill", "attention", "ffn"]
    assert best["gpus"].sum() == made["best"]["gpus"]
    encode, prefill, decode = made["best"]["spares"]["counts"]
    assert best["spares"].tolist() == [encode, prefill, decode, decode]
    text = (tmp_path / "plan.txt").read_text()
    assert text == capsys.readouterr().out
    shown = plan_content(tmp_path).facts["plan"]["best"]["pools"]
    assert all(re.search(rf"^{pool['role']} .* x {pool['mapping']}  ", text, re.M | re.I) for pool in shown)
    with pytest.raises(InputError, match="has pools of encode, attention, ffn; allowed: colocated, prefill, decode"):
        pools_of_plan(tmp_path)


def test_flips_do_not_ask_for_prompts_shorter_than_their_images():
    options = PlanOptions(pools=("encode", "prefill", "decode"), images=IMAGES, objective="usd")
    found = ds.plan(MODEL, "h200_sxm,b200_sxm", ds.lengths(4096, 256), rate=40.0, options=options)
    assert all(flip.value >= 2450 for flip in flips(found) if flip.axis == "isl")


def test_other_limits_and_lengths_keep_encoders_and_split_pools():
    """Flips ask for candidates again."""
    (case,) = asked(size=Size(gpus=8)).cases
    looser = _again(case, replace(case.work, ttft=replace(case.work.ttft, seconds=3.0)), None)
    longer = _again(case, replace(case.work, lengths=LENGTHS.at(8192, 256)), None)
    for made in (looser, longer):
        assert made.encode.step == case.encode.step
        assert made.further.names == FIVE
        assert {*map(type, made.across[1])} == {*map(type, case.across[1])}
    assert longer.further.split.lengths.mean_isl == 8192
    assert looser.further.split is case.further.split


def test_encoders_that_are_resized_send_no_more_caches():
    found = asked(("encode", "prefill", "decode"), size=Size(rate=40.0))
    counts = [pool.instances for pool in found.best.pools]
    fewer = resized(found, found.best, (2 * counts[0], *counts[1:]), found.best.rate)
    more = resized(found, found.best, (counts[0], *(2 * each for each in counts[1:])), found.best.rate)
    assert fewer.kv_rate == found.best.kv_rate == 2 * more.kv_rate


def test_whole_and_split_instances_are_answers_that_a_change_may_swap():
    """Asked again at the limit that is told, and at the last that was asked before it."""
    options = PlanOptions(pools=("prefill", "attention", "ffn", "decode"))

    def halves(tpot):
        lengths = ds.lengths(1024, 512)
        found = ds.plan("deepseek_r1", "gb300_nvl72", lengths, rate=1500.0, tpot=tpot, options=options)
        return found, len(found.best.pools[-1].halves)

    plan, parts_of_decode = halves(0.1)
    assert parts_of_decode == 2
    flip = next(each for each in flips(plan) if each.axis == "tpot")
    assert not flip.split
    assert halves(flip.value)[1] == 1
    assert halves(0.1 * flip.before)[1] == 2
    (line,) = [each for each in flip_lines(plan, (flip,)) if each.startswith("TPOT")]
    assert ": whole decode instances" in line
