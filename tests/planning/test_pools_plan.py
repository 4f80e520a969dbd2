"""Plans of more pools: counts with queues, what binds each pool, what simulations and the command say."""

import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.certainty.pool_parts import encode_spent
from disagg_sim.cli.main import run
from disagg_sim.errors import InputError
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.physics.power import power_at
from disagg_sim.planning.energy import drawn, planned_prices, watts_of_pools
from disagg_sim.planning.limits import Demand, Limit
from disagg_sim.planning.pools_plan import PoolsQuestion, plan_more_pools
from disagg_sim.planning.proven import deployed_pools, play_pools
from disagg_sim.planning.question import PlanOptions, Size
from disagg_sim.report.plan import plan_json
from disagg_sim.report.schemas import json_schema
from disagg_sim.serving.pool_names import Images
from disagg_sim.techniques.encode.physics import EncodeStep
from disagg_sim.techniques.encode.plan import EncodeChoice
from disagg_sim.techniques.encode.play import Encoders

FIVE = ("encode", "prefill", "attention", "ffn", "decode")
IMAGES = Images(images=2, height=1120, width=1120)
MODEL, SYSTEM, LENGTHS = "qwen3_5_35b_a3b", "gb200_nvl72", ds.lengths(4096, 256)
COMMAND = ("plan", "--model", MODEL, "--system", SYSTEM, "--isl", "4096", "--osl", "256")


def asked(pools=FIVE, images=IMAGES, size=Size(gpus=32), options=PlanOptions(), system=SYSTEM, **limits):  # noqa: B008
    question = PoolsQuestion(pools=pools, images=images, size=size, **limits)
    return plan_more_pools(MODEL, system, LENGTHS, question, options)


def without_queues(size, images=2, **limits):
    """What the integer program fills over the same candidates by hand, without queues and hand-over."""
    at = ds.setup(MODEL, SYSTEM, "nvfp4_fp8kv")
    cuts = ds.enumerate_mappings(at, layouts="launchable")
    step = ds.encode_step(at, images=images, height=1120, width=1120)
    grids = ds.prefill_grid(at, cuts, LENGTHS), ds.decode_grid(at, cuts, LENGTHS)
    return ds.plan_pools([step, *grids, ds.split_grid(at, LENGTHS, max_gpus=32)], gpu_budget=size, **limits)


def test_queues_and_the_hand_over_cost_what_the_integer_program_leaves_out():
    """Never more than its rate; nearly it where limits leave much room."""
    tight, loose = asked(ttft=0.25, tpot=0.03), asked(ttft=20.0, tpot=0.03)
    for found, least, ttft in ((tight, 0.3, 0.25), (loose, 0.85, 20.0)):
        best = without_queues(32, ftl_limit=ttft, ttl_limit=0.03)
        assert least * best.request_rate < found.plan.request_rate <= best.request_rate * (1 + 1e-9)
    assert loose.plan.request_rate > tight.plan.request_rate


IN_SSD = Reuse(share=ConstantShare(share=0.75), tiers=(("dram", 0.5), ("ssd", 0.5)))


@pytest.mark.long
@pytest.mark.parametrize(("lengths", "rate"), [(LENGTHS, 200.0), (ds.lengths(4096, 256, cached=IN_SSD), 100.0)])
def test_pools_beside_a_tiny_image_are_those_of_the_plan_of_two(lengths, rate):
    """An image of one token costs microseconds: prefill and decode are the disaggregated design of ``ds.plan``."""
    tiny = Images(images=1, height=14, width=14)
    question = PoolsQuestion(pools=("encode", "prefill", "decode"), images=tiny, size=Size(rate=rate))
    found = plan_more_pools(MODEL, SYSTEM, lengths, question)
    plain = ds.plan(MODEL, SYSTEM, lengths, rate=rate)
    (two,) = [each for each in (plain.best, plain.other) if each is not None and len(each.pools) == 2]
    assert [pool.gpus for pool in found.design.pools[1:]] == [pool.gpus for pool in two.pools]
    assert found.design.ttft["p90"] == pytest.approx(two.ttft["p90"], rel=0.1)
    assert found.design.tpot["p90"] == pytest.approx(two.tpot["p90"], rel=0.1)


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
    assert [*choice.counts(0.9 / choice.each_s / work.spare)] == list(range(1, most + 1))


def test_ttft_is_told_at_the_planned_rate_of_both_queues():
    """Its mean is that of encoding and that of prefill, each at that rate and not at the one with headroom."""
    found = asked(("encode", "prefill", "decode"), size=Size(rate=300.0), options=PlanOptions(headroom=0.3))
    encode, prefill = found.stages[0], found.design.first
    step = ds.encode_step(encode.setup, images=2, height=1120, width=1120)
    before = EncodeChoice(step=step, work=found.design.work).delay(300.0, encode.instances)
    after = replace(prefill.choice, encode=None).mean_ttft(300.0, prefill.instances)
    assert before.held_share[0] > 0.01
    assert prefill.choice.mean_ttft(300.0, prefill.instances) == pytest.approx(before.mean + after, rel=2e-3)


@pytest.mark.parametrize("decode", [("decode",), ("attention", "ffn")])
def test_a_simulation_meets_what_is_planned(decode):
    pytest.importorskip("numba")
    found = asked(("encode", "prefill", *decode), size=Size(rate=300.0), ttft=0.6, tpot=0.02)
    run = play_pools(found, seed=1)
    assert run.holds
    assert 0.85 * found.design.ttft["p90"] < run.ttft["p90"] < 1.02 * found.design.ttft["p90"]
    assert run.tpot["p90"] == pytest.approx(found.design.tpot["p90"], rel=0.03)
    assert deployed_pools(found).all_gpus == found.plan.total_gpus


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
    assert found.plan.status == "feasible"
    assert found.plan.request_rate == 100.0
    assert {stage.pool for stage in found.stages} <= set(pools)
    assert sum(stage.gpus for stage in found.stages) == found.plan.total_gpus
    assert 0.3 < max(stage.load for stage in found.stages) < 1.0
    assert found.design.ttft["p90"] <= 2.0
    assert found.design.tpot["p90"] <= 0.05
    for stage in found.stages:
        assert stage.rate * stage.load == pytest.approx(found.plan.request_rate)
    encode = next(stage for stage in found.stages if stage.pool == "encode")
    one = ds.encode_step(encode.setup, images=2, height=1120, width=1120)
    assert encode.instances >= -(-found.plan.request_rate // one.request_rate)  # fewer GPUs would not keep up


def test_halves_of_an_instance_share_its_batch_and_step():
    attention, ffn = (
        next(stage for stage in asked(("prefill", "attention", "ffn"), None).stages if stage.pool == name)
        for name in ("attention", "ffn")
    )
    assert (attention.instances, attention.batch, attention.microbatches) == (
        ffn.instances,
        ffn.batch,
        ffn.microbatches,
    )
    assert attention.seconds == ffn.seconds
    assert 0 <= min(attention.idle, ffn.idle) < max(attention.idle, ffn.idle) < 1


def test_a_request_that_meets_no_other_costs_halves_as_much_however_seldom_it_comes():
    """Power above that of waiting GPUs, over the rate."""
    each = []
    for rate in (0.01, 0.05):
        found = asked(("prefill", "attention", "ffn"), None, Size(rate=rate))
        waiting = sum(stage.gpus * power_at(stage.setup).idle for stage in found.stages)
        each.append((drawn(found.design).watts - waiting) / rate)
    assert each[1] == pytest.approx(each[0], rel=0.1)


def test_what_binds_a_batch_is_what_a_looser_limit_moves():
    """A decode pool held by TTL serves more within twice the limit; one held by memory does not."""
    tight = asked(("encode", "prefill", "decode"), tpot=0.004)
    decode = next(stage for stage in tight.stages if stage.pool == "decode")
    assert decode.held_by == "ttl"
    at, mapping = decode.setup, decode.mapping
    grid = ds.decode_grid(at, mapping, LENGTHS)
    places = [i for i, size in enumerate(grid.batch) if size > decode.batch]
    assert grid.latency[0, places[0]] > 0.004 >= decode.seconds
    loose = asked(("encode", "prefill", "decode"), tpot="10 s")
    assert {stage.held_by for stage in loose.stages if stage.pool == "decode"} <= {"memory", "kv_link", ""}


def test_the_best_of_several_systems_is_told_first():
    found = asked(("encode", "prefill", "decode"), system="h100_sxm,gb200_nvl72")
    ((names, other),) = found.others
    assert names == "h100_sxm"
    assert found.plan.request_rate > other.request_rate > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pools": ("prefill", "attention")}, "attention and ffn decode together"),
        ({"pools": ("encode", "prefill", "decode"), "images": None}, "encode needs them"),
        (
            {"pools": ("encode", "prefill", "decode"), "ffn_system": "h200_sxm"},
            "ffn_system: needs attention and ffn among the pools",
        ),
    ],
)
def test_faults_say_what_is_allowed(changes, said):
    with pytest.raises(InputError, match=said):
        asked(**changes)


def test_limits_that_only_queues_miss_say_so(capsys):
    extra = ("--pools", "encode,prefill,decode", "--images", "2x1120x1120", "--gpus", "32", "--ttft", "60 ms")
    assert run([*COMMAND, *extra]) == 2
    assert "with their queues and the hand-over of caches" in capsys.readouterr().out


def test_what_the_rate_rests_on_is_said(capsys):
    """Caches and drafts change the rate by multiples; the screen and JSON name them.

    Of the three quarters of 4,096 tokens that are cached one piece of 2,096 is taken up again, from one state.
    """
    asked = ("--pools", "encode,prefill,decode", "--images", "2x1120x1120", "--gpus", "32", "--cached", "0.75")
    drafts = ("--tiers", "dram", "--speculate", "2", "--acceptance", "mtp 0.8 0.6")
    assert run([*COMMAND, *asked, *drafts]) == 0
    text = capsys.readouterr().out
    cached = "51.2 % of a prompt cached (in dram, in whole pieces of 2,096 tokens), drafts of"
    assert cached in text.replace("\n", " ")
    assert run([*COMMAND, *asked, *drafts, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    jsonschema.validate(made, json_schema("pools"))
    question = made["question"]
    assert question["mean_cached"] == pytest.approx(0.75 * question["mean_isl"], abs=16)
    assert question["cached_tiers"] == {"dram": 1.0}
    assert {pool["draft_tokens"] for pool in made["pools"] if pool["pool"] == "decode"} == {2}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (("--pools", "prefil,attention,ffn"), "did you mean 'prefill'"),
        (("--pools", "prefill"), "prefill serve no request"),
        (("--images", "2x1120x1120"), "--images and --ffn-system need --pools"),
        (("--pools", "encode,prefill,decode", "--images", "2x1120"), "COUNTxHEIGHTxWIDTH"),
        (("--pools", "encode,prefill,decode", "--images", "2x1120x1120@1.0"), "COUNTxHEIGHTxWIDTH"),
        (
            ("--pools", "prefill,attention,ffn", "--hold-prompts", "8"),
            "hold_prompts: only co-located instances hold prompts back",
        ),
        (("--pools", "prefill,attention,ffn", "--confidence", "0.9"), "attention and ffn pools have no error bars"),
        (("--pools", "prefill,attention,ffn", "--tpot", "30 ms@p98"), "p90 where none is said"),
        (("--pools", "prefill,attention,ffn", "--speculate", "2", "--acceptance", "mtp 0.8 0.6"), "no drafts"),
    ],
)
def test_faults_of_the_command_are_one_line(extra, said, capsys):
    assert run([*COMMAND, "--gpus", "32", *extra]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_pools_draw_and_cost_what_their_parts_do():
    """Encoders work on each request, prefill and decode are those of a plan; prompts pay for two pools."""
    priced = PlanOptions(prices={SYSTEM: 4.0})
    found = asked(("encode", "prefill", "decode"), size=Size(rate=40.0), options=priced)
    power, stages = drawn(found.design), {stage.pool: stage for stage in found.stages}
    encode = next(member for member, _ in found.plan.members if isinstance(member, EncodeStep))
    spent, idle = encode_spent(encode), power_at(encode.setup).idle
    work = 40.0 * (spent.joules - idle * spent.seconds) + stages["encode"].gpus * idle
    rest = sum(float(watts_of_pools([pool], found.design.work.lengths)[0]) for pool in found.design.pools[1:])
    assert power.watts == pytest.approx(work + rest)
    assert power.band[0] < power.watts < power.band[1]
    prices = planned_prices(found.design, priced.prices, 0.5)
    second = 4.0 / 3600 / 0.5 / 40.0  # of a GPU for a request
    prompts = stages["encode"].gpus + stages["prefill"].gpus
    assert float(prices.new) == pytest.approx(second * prompts / 4096 * 1e6)
    assert float(prices.output) == pytest.approx(second * stages["decode"].gpus / 256 * 1e6)
    split = asked(("prefill", "attention", "ffn"), None, Size(rate=40.0))
    gpus = split.plan.total_gpus
    assert gpus * idle < drawn(split.design).watts < gpus * encode.setup.system.tdp
