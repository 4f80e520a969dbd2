"""A deployment that is given by hand: the same physics as a plan's, the verdict, and what is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import DisaggSimError
from disagg_sim.planning.evaluate import Evaluation, _sequences, evaluate
from disagg_sim.planning.prove import prove
from disagg_sim.planning.question import PlanOptions
from disagg_sim.simulation.deployment import Replicas

LENGTHS = ds.lengths(4096, 512)
PREFILL = Replicas(mapping=Sharding(), instances=13, batch=2)
DECODE = Replicas(mapping=Sharding(tp_attn=4, tp_ffn=4), instances=2, batch=160)
PAIR = {"prefill": PREFILL, "decode": DECODE}
BOTH = {"colocated": Replicas(mapping=Sharding(tp_attn=4, tp_ffn=4), instances=8, batch=64)}


def under(rate: float, pools: dict[str, Replicas] | None = None, **said: object) -> Evaluation:
    settings: dict[str, object] = {"tpot": "30 ms", **said}
    return evaluate("llama_3_1_70b", "h100_sxm", pools or PAIR, LENGTHS, rate=rate, **settings)


@pytest.fixture(scope="module")
def planned() -> ds.Plan:
    return ds.plan("llama_3_1_70b", "h100_sxm", LENGTHS, ttft="2 s", tpot="30 ms", rate=20)


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_pools_of_a_plan_do_what_the_plan_says(planned: ds.Plan, mode: str) -> None:
    design = next(each for each in (planned.best, planned.other) if each is not None and each.mode == mode)
    found = under(20, {pool.role: pool.replicas for pool in design.pools}).design
    for ours, theirs in zip(found.pools, design.pools, strict=True):
        assert (ours.instances, ours.batch, ours.gpus) == (theirs.instances, theirs.batch, theirs.gpus)
        assert ours.choice.memory == pytest.approx(theirs.choice.memory)
    assert found.tpot == pytest.approx(design.tpot)
    assert found.ttft == pytest.approx(design.ttft)  # caches wait for what runs in their own decode pool
    assert found.capacity == pytest.approx(design.capacity, rel=1e-3)
    assert found.kv_rate == pytest.approx(design.kv_rate)


@pytest.mark.parametrize(
    ("pools", "rate"),
    [(PAIR, 10.0), (BOTH, 12.0), ({"prefill": PREFILL, "decode": replace(DECODE, instances=3)}, 16.0)],
)
def test_it_is_what_a_simulation_meets(pools: dict[str, Replicas], rate: float) -> None:
    found = under(rate, pools)
    run = prove(found.given, found.design, adapt=False).planned
    assert run.lost == 0
    for share in ("p50", "p90"):
        assert found.tpot[share] == pytest.approx(run.tpot[share], rel=0.08)
    assert found.ttft["p50"] == pytest.approx(run.ttft["p50"], rel=0.05)


@pytest.mark.parametrize("phases", [("prefill", "decode"), ("colocated",)])
def test_percentiles_of_ttft_are_those_of_the_prompts_at_them(phases: tuple[str, ...]) -> None:
    """Without a queue: half of log-normal prompts have up to 4,096 tokens, 90 % of them 14,497, and 99 % 40,500.

    Eight Gauss nodes that stand for means would have 20,496 tokens at the latter two. In co-located steps each has its
    own past behind it: with the mean one of all prompt tokens the longest would be 30 % too fast.
    """
    pools = {phase: Replicas(mapping=Sharding(), instances=1, batch=4) for phase in phases}
    asked: dict[str, Any] = {"rate": 0.001, "ttft": "60 s", "tpot": "1 s"}

    def ttft(*lengths: Any) -> dict[str, float]:
        return evaluate("llama_3_1_8b", "h100_sxm", pools, ds.lengths(*lengths), **asked).ttft

    spread = ttft("log_normal_4096_512")
    for share, tokens in (("p50", 4096), ("p90", 14_497), ("p99", 40_500)):
        assert spread[share] == pytest.approx(ttft(tokens, 512)["p50"], rel=0.03)


def test_a_queue_without_end_is_told_as_such() -> None:
    calm, flooded = under(10), under(40)
    assert (calm.overloaded, calm.missed) == ((), ())
    assert flooded.overloaded == ("prefill", "decode")
    assert set(flooded.ttft.values()) == {math.inf}
    assert flooded.missed == ("ttft", "seats")  # a step with all seats taken is in time
    assert flooded.sure is None
    assert flooded.capacity == calm.capacity  # it is of the deployment, not of its load
    narrow = under(18, {"prefill": PREFILL, "decode": replace(DECODE, batch=64)})
    assert narrow.overloaded == ("decode",)


def test_seats_run_out_by_the_percentile_of_tpot() -> None:
    """All 64 seats of both instances are taken for 35 % of the time: more than one request in ten, less than half."""
    pools = {"prefill": PREFILL, "decode": replace(DECODE, batch=64)}
    for ttft, tpot, missed in (("2 s@p50", "30 ms@p90", ("seats",)), ("2 s@p90", "30 ms@p50", ())):
        found = under(14, pools, ttft=ttft, tpot=tpot)
        assert 0.1 < found.full < 0.5
        assert found.missed == missed


def test_what_it_can_take_lies_where_a_limit_begins_to_be_missed() -> None:
    most = under(10).capacity
    assert under(0.99 * most).missed == ()
    assert under(1.01 * most).missed != ()
    more = under(10, {"prefill": replace(PREFILL, instances=14), "decode": replace(DECODE, instances=3)})
    assert more.capacity > most
    for pools in (PAIR, BOTH):  # no step is so fast
        none = under(10, pools, tpot="1 ms")
        assert (none.capacity, none.missed) == (0.0, ("tpot",))


def test_limits_that_are_missed_leave_the_bands_of_its_times() -> None:
    asked, missed = under(10), under(10, ttft="10 ms", tpot="1 ms")
    assert missed.missed == ("ttft", "tpot")
    assert missed.ttft == asked.ttft
    assert missed.sure.ttft == pytest.approx(asked.sure.ttft, rel=0.05)
    assert missed.sure.tpot == pytest.approx(asked.sure.tpot, rel=0.05)
    assert missed.sure.holds < 0.01
    assert missed.sure.most == missed.capacity == 0.0


def test_without_a_batch_it_is_that_of_the_engine_or_of_memory() -> None:
    alone = {"colocated": Replicas(mapping=Sharding(tp_attn=2, tp_ffn=2), instances=4)}
    pool = under(1, alone).design.pools[0]
    assert (
        pool.batch <= pool.choice.memory_seats < pool.setup.overheads.max_running
    )  # a step of prompts takes room, too
    assert pool.choice.budget == pool.setup.overheads.chunk_tokens
    small = evaluate("llama_3_1_8b", "h100_sxm", {"colocated": Replicas(mapping=Sharding(), instances=1)},
                     ds.lengths(64, 64), rate=1.0).design.pools[0]  # fmt: skip
    assert small.batch == small.setup.overheads.max_running


def test_batches_stand_on_both_sides_of_the_last_captured_step() -> None:
    """512 tokens, with a draft each 256 sequences: 257 are timed, too."""
    at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8", engine="vllm")
    assert at.overheads is not None
    at = replace(at, overheads=replace(at.overheads, captured=512))
    two = Replicas(mapping=Sharding(draft_tokens=1), instances=1, batch=400)
    assert {256, 257} <= set(_sequences(at, two).tolist())


def test_a_server_as_started_by_default_launches_large_steps_kernel_by_kernel() -> None:
    """vLLM captures 512 sequences: 32 layers of 16 kernels of Llama 8B at 51 us are 26.1 ms."""
    own = Replicas(mapping=Sharding(), instances=1, batch=560)
    default, told, full, idle = (
        evaluate("llama_3_1_8b", "h200_sxm", {"prefill": PREFILL, "decode": each}, ds.lengths(64, 64), rate=rate,
                 options=PlanOptions(engine="vllm"))
        for each, rate in ((own, 1e5), (replace(own, captured=1024), 1e5), (replace(own, batch=512), 1e5), (own, 1.0))
    )  # fmt: skip
    assert [each.uncaptured for each in (default, told, full, idle)] == [512, 0, 0, 0]
    slow, fast = (each.design.pools[-1].choice for each in (default, told))
    assert slow.step[-1] == pytest.approx(512 * 51e-6, rel=1e-6)
    small = slow.batch <= 512
    assert slow.step[small] == pytest.approx(np.interp(slow.batch[small], fast.batch, fast.step))
    assert (slow.step[~small] > fast.step[-1]).all()


def test_drafts_are_tokens_of_a_step() -> None:
    """48 sequences with two draft tokens each verify 144, which leave no room for a prompt in steps of 128."""
    said = ds.PlanOptions(speculation=ds.load_speculation("mtp 0.75 0.5").trying((2,)))
    drafting = Replicas(mapping=Sharding(tp_attn=4, tp_ffn=4, draft_tokens=2), instances=8, batch=48, token_budget=256)
    assert under(1, {"colocated": drafting}, options=said).design.pools[0].batch == 48
    with pytest.raises(DisaggSimError, match="batch 48 and steps of 128 tokens does not fit; at most "):
        under(1, {"colocated": replace(drafting, token_budget=128)}, options=said)


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ({"prefill": PREFILL}, "pools prefill; allowed: colocated, or prefill and decode"),
        ({"prefill": PREFILL, "decode": replace(DECODE, batch=5000)}, "decode: an instance with batch 5,000 lacks "),
        ({"colocated": replace(BOTH["colocated"], batch=64, token_budget=64)}, "steps of 64 tokens"),
        (
            {"prefill": PREFILL, "decode": replace(DECODE, mapping=replace(DECODE.mapping, draft_tokens=2))},
            "there is no drafter; give options.speculation",
        ),
    ],
)
def test_what_cannot_be_is_one_line(pools: dict[str, Replicas], said: str) -> None:
    with pytest.raises(DisaggSimError) as told:
        under(10, pools)
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_what_lacks_memory_is_told_of_the_smallest_batch() -> None:
    """70.6e9 weights of two bytes in 85.9 GB: more than 55 GB are lacking, and not 30 more for caches of a batch."""
    with pytest.raises(DisaggSimError, match=r"an instance with batch 1 lacks (\d+\.\d) GB of memory a GPU$") as told:
        under(10, {"colocated": Replicas(mapping=Sharding(), instances=1)}, options=PlanOptions(precision="bf16"))
    assert 55 < float(re.search(r"lacks (\S+)", str(told.value))[1]) < 85


def test_a_cache_is_handed_over_in_steps_of_what_runs_not_of_all_seats() -> None:
    """With 10 sequences running TTFT is the same however many seats decode instances have."""
    pools = {phase: Replicas(mapping=Sharding(tp_attn=4, tp_ffn=4), instances=1, batch=8) for phase in PAIR}
    some, many = (
        evaluate(
            "llama_3_1_70b", "b200_sxm", pools | {"decode": replace(pools["decode"], batch=seats)},
            ds.lengths(1024, 256), rate=5,
        ).ttft
        for seats in (64, 512)
    )  # fmt: skip
    assert many == pytest.approx(some, rel=1e-6)


@pytest.mark.parametrize("max_nic", [1e9, None])
def test_a_deployment_has_the_latencies_and_the_capacity_of_the_plan_that_chose_it(max_nic: float | None) -> None:
    """At 1 GB/s 1.3 GB take 1.34 s from one GPU and 0.34 s from four to four, and every design keeps 2 s."""
    options, lengths = ds.PlanOptions(max_nic=max_nic), ds.lengths(8192, 512)
    found = ds.plan("llama_3_1_70b", "h100_sxm", lengths, rate=20, options=options)
    assert found.best is not None
    designs = [each for each in (found.best, *found.runners_up) if len(each.pools) == 2]
    assert len(designs) > 1
    for design in designs:
        pools = {pool.role: pool.replicas for pool in design.pools}
        again = evaluate("llama_3_1_70b", "h100_sxm", pools, lengths, rate=20, options=options)
        assert again.ttft == pytest.approx(design.ttft, rel=1e-9)
        assert again.tpot == pytest.approx(design.tpot, rel=1e-9)
        assert again.capacity == pytest.approx(design.capacity, rel=1e-9)
        assert design.ttft["p90"] <= 2.0
