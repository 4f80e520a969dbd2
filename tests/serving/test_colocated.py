"""Co-located modes: their limits, one request by hand, published rows, the choice among options."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from disagg_sim.certainty.rows import rescore
from disagg_sim.domain import Sharding
from disagg_sim.errors import InfeasibleError, InputError
from disagg_sim.physics.memory import instance_bytes
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.residents import Residents
from disagg_sim.physics.setup import setup
from disagg_sim.search.blocks import BLOCK_POINTS
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.serving.colocated import colocated, search_colocated
from disagg_sim.serving.colocation import ColocatedCase, Colocation
from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.piggyback import piggyback
from disagg_sim.serving.points import COLUMNS, INTERACTIVITY, THROUGHPUT, pareto_front
from disagg_sim.techniques.prefill_delay.law import delayed_passes
from disagg_sim.workload.lengths import lengths

SYSTEM, RECIPE = "gb200_nvl72", "nvfp4_fp8kv"
LLAMA, R1 = "llama_3_1_70b", "deepseek_r1"
TP4 = Sharding(tp_attn=4, tp_ffn=4)
DEP8 = Sharding(dp_attn=8, ep=8)
MODES = {"colocated": colocated, "piggyback": piggyback}


def mappings(model=LLAMA, max_gpus=16):
    return enumerate_mappings(setup(model, SYSTEM, RECIPE), max_gpus=max_gpus)


LIMITS = ("ftl_limit", "ttl_limit")


def run(mode, model=LLAMA, table=TP4, *, isl=4096, osl=512, **more):
    limits, options = ({k: v for k, v in more.items() if (k in LIMITS) == wanted} for wanted in (True, False))
    at = setup(model, SYSTEM, RECIPE)
    return MODES[mode](at, table, lengths(isl, osl), **limits, options=Colocation(**options))


def ttl_at(batch, model=LLAMA, table=TP4, isl=4096, osl=512):
    """Of decode alone. [s]"""
    return decode_grid(setup(model, SYSTEM, RECIPE), table, lengths(isl, osl), batch=batch).latency[0, 0]


def only(table: pd.DataFrame) -> pd.Series:
    assert len(table) == 1
    return table.iloc[0]


# One request at a time, by hand.


def test_one_request_a_batch_by_hand():
    t_d = ttl_at(1)
    t_p = prefill_grid(setup(LLAMA, SYSTEM, RECIPE), TP4, lengths(4096, 512), batch=1).latency[0, 0]
    row = only(run("colocated", batch=1))
    assert row.ftl_s == pytest.approx(t_p)
    assert row.ttl_s == pytest.approx(t_d)  # the prompt comes before the tokens
    assert row.ttl_mean_s == pytest.approx(t_d + t_p / 511)
    assert row.ttl_largest_gap_s == pytest.approx(t_d + t_p)
    cycle = 511 * t_d + t_p  # a prompt, then 511 steps
    assert row.request_rate_per_s == pytest.approx(1 / cycle)
    assert row.tokens_per_s_per_gpu == pytest.approx(512 / (4 * cycle))
    assert row.ftl_with_slot_wait_s == pytest.approx(t_p + cycle / 2)


def test_the_tokens_of_a_request_do_not_wait_for_its_own_prompt():
    """Of four residents three others begin while one decodes; a slot sees all four. They rarely end in the same step,
    so that passes have one prompt, however many they may take."""
    for together in (1, 2, 4):
        row = only(run("colocated", batch=4, prefill_batch=[together], ftl_limit=1e3))
        assert row.ttl_s == pytest.approx(ttl_at(4) + 3 * row.ftl_s / 511, rel=1e-3)
        mean = only(run("colocated", batch=4, prefill_batch=[together], ftl_limit=1e3, ttl_measure="mean"))
        assert mean.ttl_s == row.ttl_mean_s == pytest.approx(ttl_at(4) + 4 * row.ftl_s / 511, rel=1e-3)
        assert mean.tokens_per_s_per_gpu == row.tokens_per_s_per_gpu


def test_ranks_take_turns_by_hand():
    """64 residents on 8 ranks: each ends in a step with the probability 1/511, and all ranks wait for those that end.

    A pass of r prompts, one a rank, takes A + e*r. There is one where any of the 64 ends, and another where two of the
    8 of a rank end together.
    """
    row = only(run("colocated", R1, DEP8, batch=64, prefill_batch=8, ftl_limit=100.0))
    decode = ttl_at(64, model=R1, table=DEP8)
    one, eight = prefill_grid(setup(R1, SYSTEM, RECIPE), DEP8, lengths(4096, 512), batch=[1, 8]).latency[0]
    each, stays = (eight - one) / 7, 1 - 1 / 511
    any_ends, two_end = 1 - stays**64, 1 - (stays**8 + 8 / 511 * stays**7) ** 8
    passes = (one - each) * (any_ends + two_end) + each * 64 / 511
    assert row.ttl_mean_s == pytest.approx(decode + passes, rel=1e-4)  # without three that end together
    assert row.ttl_s == pytest.approx(row.ttl_mean_s - row.ftl_s / 511)
    assert one < row.ftl_s < one + 7 / 8 * (64 / 511) * (eight - one)


def test_requests_that_end_together_share_passes():
    """Answers of two tokens: all 64 end in each step, and 8 of a pass are 8 passes of a prompt a rank."""
    row = only(run("colocated", R1, DEP8, batch=64, prefill_batch=8, osl=2, ftl_limit=1e3))
    eight = prefill_grid(setup(R1, SYSTEM, RECIPE), DEP8, lengths(4096, 2), batch=8).latency[0, 0]
    assert row.ftl_s == pytest.approx(eight)
    assert row.ttl_mean_s == pytest.approx(ttl_at(64, model=R1, table=DEP8, osl=2) + 8 * eight)


def test_one_request_a_batch_piggybacked_by_hand():
    """8 chunks of 512 tokens for every 511 steps, and as many where 4096 tokens before them are cached."""
    at = setup(LLAMA, SYSTEM, RECIPE)
    t_mix = mixed_step(
        at, Sharding(tp_attn=4.0, tp_ffn=4.0), batch=1.0, context=4096 + 256.0, chunk=Chunk(512.0, 4096.0)
    ).time
    rows = run("piggyback", batch=1, rank_chunk_tokens=512, ttl_measure="p99")
    row = only(rows[rows.mixed_chunk_tokens == 512])
    assert row.mixed_step_share == pytest.approx(8 / 511)
    assert row.ttl_s == row.ttl_largest_gap_s == pytest.approx(t_mix)
    assert row.ttl_mean_s == pytest.approx((8 * t_mix + 503 * ttl_at(1)) / 511)
    assert row.ftl_s == pytest.approx(8 * t_mix)
    assert row.tokens_per_s_per_gpu == pytest.approx(512 / (4 * (8 * t_mix + 503 * ttl_at(1))))
    options = Colocation(batch=1, rank_chunk_tokens=512, ttl_measure="p99")
    row = piggyback(at, TP4, lengths(8192, 512, cached=0.5), options=options).query("mixed_chunk_tokens == 512").iloc[0]
    assert row.mixed_step_share == pytest.approx(8 / 511)
    assert row.ftl_s == pytest.approx(8 * row.ttl_largest_gap_s)


def test_no_chunk_waits_for_a_second_prompt():
    """A budget of 8192 takes a prompt of 4096 tokens; of shorter ones as many as keep the batch full."""
    few, many = {"batch": 16}, {"batch": 2048, "isl": 256, "osl": 33}
    for options in (few, many):
        whole, twice = (
            run("piggyback", **options, rank_chunk_tokens=size) for size in (options.get("isl", 4096), 8192)
        )
        pd.testing.assert_frame_equal(whole, twice)
    assert only(run("piggyback", **few, rank_chunk_tokens=8192)).mixed_chunk_tokens <= 4096
    assert only(run("piggyback", **many, rank_chunk_tokens=8192)).mixed_chunk_tokens == pytest.approx(2048 * 256 / 32)


def test_every_data_parallel_rank_prefills_a_prompt_of_its_own():
    """256 requests on 8 ranks, every step mixed: 256*4096/511 tokens a step, an eighth of them each prompt."""
    row = only(run("piggyback", R1, DEP8, batch=256, every_step_mixed=True, ftl_limit=100.0))
    chunk = 256 * 4096 / 511
    assert (row.mixed_step_share, row.mixed_chunk_tokens) == pytest.approx((1.0, chunk))
    assert row.ttl_mean_s == row.ttl_largest_gap_s
    assert row.ftl_s == pytest.approx(4096 / (chunk / 8) * row.ttl_s)
    assert row.ftl_s == pytest.approx(511 / (256 / 8) * row.ttl_s)


@pytest.mark.parametrize("isl", [512, 4096])
def test_decode_waits_until_a_pass_has_left_the_last_stage(isl):
    """Four stages; 512 tokens are not cut, 4096 are. The pass is the FTL of a prefill instance, not its busy time."""
    table = Sharding(tp_attn=2, tp_ffn=2, pp=4)
    row = only(run("colocated", table=table, batch=64, prefill_batch=4, isl=isl, osl=2))
    grid = prefill_grid(setup(LLAMA, SYSTEM, RECIPE), table, lengths(isl, 2), batch=4)
    assert row.ftl_s == pytest.approx(grid.latency.min())
    assert row.prefill_chunk_tokens == grid.mappings.chunk_tokens[grid.latency.argmin()]
    assert (row.prefill_chunk_tokens > 0) == (isl == 4096)
    assert row.ttl_mean_s == pytest.approx(ttl_at(64, table=table, isl=isl, osl=2) + 16 * row.ftl_s)


def test_fewer_requests_than_ranks_are_prefilled_in_one_pass():
    row = only(run("colocated", R1, DEP8, batch=3))
    assert row.prefill_batch == 3


def test_several_passes_between_two_steps_are_one_gap():
    """64 prompts one by one for 15 steps: 4.3 passes between two of them, so 5 at most."""
    row = only(run("colocated", batch=64, prefill_batch=1, osl=16))
    assert row.ttl_largest_gap_s == pytest.approx(ttl_at(64, osl=16) + 5 * row.ftl_s)
    assert row.ttl_mean_s == pytest.approx(ttl_at(64, osl=16) + 64 / 15 * row.ftl_s)


def test_a_balance_below_one_token_is_one_token_in_some_of_the_steps():
    row = only(run("piggyback", batch=2, isl=16, osl=1025, every_step_mixed=True))
    assert (row.mixed_chunk_tokens, row.mixed_step_share) == (1.0, pytest.approx(2 * 16 / 1024))


@pytest.mark.parametrize(("mode", "live"), [("colocated", 4096), ("piggyback", 64 + 1024)])
def test_memory_holds_the_live_tokens_of_the_largest_pass(mode, live):
    """One prompt of 4096 tokens apart from 64 decodes, or 1024 tokens of it in their step."""
    option = {"colocated": {"prefill_batch": 1}, "piggyback": {"rank_chunk_tokens": 1024}}
    rows = run(mode, batch=64, **option[mode], ttl_measure="p99")
    row = only(rows[rows.mixed_chunk_tokens == (1024 if mode == "piggyback" else 0)])
    at = setup(LLAMA, SYSTEM, RECIPE)
    residents = Residents(
        sequences=65.0,
        tokens=64 * (4096 + 256) + 2 * 8 * 512 / 12**0.5 + 4096,
        live=float(live),
        live_total=float(live),
        emitted=65.0 if mode == "piggyback" else 64.0,
    )
    held = instance_bytes(at, Sharding(tp_attn=4.0, tp_ffn=4.0), residents, at.profile.prefill_imbalance)
    assert row.decode_memory_bytes == row.prefill_memory_bytes == pytest.approx(float(held), rel=1e-12)


# Measured rows: Llama-3.1-70B on H100, vLLM, fp8 weights, bf16 cache (InferenceX); physics page, W2. Lengths of the
# requests are 0.9 of the columns in the mean.
W2 = [
    # tp, isl, osl, in flight; measured TPOT ms, shipped fits over it
    (2, 1024, 1024, 4, 17.41, 0.011),
    (2, 1024, 1024, 64, 28.77, -0.022),
    (2, 8192, 1024, 16, 34.63, -0.045),
    (8, 8192, 1024, 4, 10.22, -0.089),
    (8, 8192, 1024, 64, 34.48, -0.066),
    (8, 1024, 1024, 64, 15.45, -0.111),
]


@pytest.mark.parametrize(("tp", "isl", "osl", "batch", "measured", "stated"), W2)
def test_measured_rows_are_met_within_the_stated_error(tp, isl, osl, batch, measured, stated):
    """Shipped fits, no engine profile: kernels alone take less than an engine with its host and its scheduler."""
    at = replace(setup(LLAMA, "h100_sxm", "fp8_bf16kv", engine="vllm"), overheads=None)
    shape, options = lengths(round(0.9 * isl), round(0.9 * osl)), Colocation(batch=batch, prefill_batch=1)
    row = only(colocated(at, Sharding(tp_attn=tp, tp_ffn=tp), shape, options=options))
    assert row.ttl_s / (measured * 1e-3) - 1 == pytest.approx(stated, abs=2e-3)


# Limits.


def test_without_piggyback_the_seconds_of_a_request_add_up():
    """1/X = 1/p + 1/r: the instance does one phase or the other."""
    rows = run("colocated", R1, mappings(R1))
    x, p, r = (rows[name] for name in ("request_rate_per_s", "prefill_request_rate_per_s", "decode_request_rate_per_s"))
    np.testing.assert_allclose(1 / x, 1 / p + 1 / r, rtol=1e-9)


# The choice among options.


def frontier(rows: pd.DataFrame) -> np.ndarray:
    return pareto_front(rows)[[INTERACTIVITY, THROUGHPUT]].to_numpy()


@pytest.mark.parametrize("measure", ["tpot", "mean", "p99"])
@pytest.mark.parametrize(
    ("mode", "axis", "sizes"),
    [("colocated", "prefill_batch", (8, 16, 64)), ("piggyback", "rank_chunk_tokens", (64, 256, 2048))],
)
def test_the_frontier_of_a_search_is_that_of_all_its_options_apart(mode, axis, sizes, measure):
    """Batches from 64, so that every option exists at each; the balance of piggyback is in every part.

    Of options that are equal to some millionths the one with more throughput need not have the lower TTL.
    """
    table, common = mappings(R1, 8), {"batch": [64, 100, 512], "ttl_measure": measure, "mla_form": "auto"}
    together = run(mode, R1, table, **{axis: sizes}, **common)
    parts = pd.concat([run(mode, R1, table, **{axis: size}, **common) for size in sizes], ignore_index=True)
    np.testing.assert_allclose(frontier(together), frontier(parts), rtol=1e-12)
    key = ["decode_tp_attn", "decode_dp_attn", "decode_tp_ffn", "decode_ep", "decode_pp", "decode_batch"]
    if measure != "p99":
        assert not together.duplicated(key).any()
        lowest = parts.groupby(key)["ttl_s"].min()
        np.testing.assert_allclose(together.set_index(key)["ttl_s"].sort_index(), lowest.sort_index(), rtol=1e-5)
    for _, rows in together.groupby(key):
        ordered = rows.sort_values("ttl_s")
        assert (np.diff(ordered["tokens_per_s_per_gpu"]) > 0).all()


def test_a_wait_by_hand():
    """64 residents on 8 ranks, 128 steps: s prompts a pass, T steps between two. A pass takes t1 + (s-1)/7*(t8-t1), 64
    requests (T*step + pass)*64/s, and each token its step and the passes of others."""
    case = {"isl": 8192, "osl": 1024, "batch": [64], "ftl_limit": 100.0}
    rows = run("colocated", R1, DEP8, hold_steps=(128,), **case)
    row = only(rows[rows.hold_steps == 128])
    found = delayed_passes(np.array([64]), np.array([8]), np.array([1 / 1023]), np.array([128]))
    prompts, steps, left = (float(each[0]) for each in found[:3])
    at = setup(R1, SYSTEM, RECIPE)
    times = prefill_grid(at, DEP8, lengths(8192, 1024), batch=[1, 8]).latency[0]
    time = times[0] + (prompts - 1) / 7 * (times[1] - times[0])
    own = times[0] + prompts / 8 * (times[1] - times[0])
    step = ttl_at(64, R1, DEP8, 8192, 1024)
    assert row.request_rate_per_s == pytest.approx(prompts / (steps * step + time), rel=1e-6)
    assert row.ttl_s == pytest.approx(step + ((64 - left) * time / prompts - own) / 1023, rel=1e-6)
    assert row.ftl_s == pytest.approx(own, rel=1e-6)
    assert row.ftl_with_slot_wait_s == pytest.approx(own + prompts / (2 * row.request_rate_per_s), rel=1e-6)


def test_engines_that_hold_no_prompts_back_are_not_told_to():
    points = {}
    for engine in ("vllm", "sglang", "kernels"):
        at = setup(R1, "h200_sxm", "fp8", engine=engine)
        options = Colocation(batch=(64,), hold_steps=None)
        points[engine] = colocated(at, DEP8, lengths(8192, 1024), ftl_limit=20.0, options=options)
    assert {name: bool((found.hold_steps > 0).any()) for name, found in points.items()} == {
        "vllm": False,
        "sglang": True,
        "kernels": True,
    }


def test_a_design_that_waits_is_scored_again():
    rows = run("colocated", R1, mappings(R1, 8), isl=8192, osl=1024, hold_steps=None, ftl_limit=20.0)
    waits = rows[rows.hold_steps > 0].iloc[:40]
    again = rescore(waits)
    for name in (THROUGHPUT, "ttl_s", "ftl_s"):
        np.testing.assert_allclose(again[name], waits[name], rtol=1e-9)


def test_limits_act_on_the_latencies_they_name():
    free = run("colocated", table=mappings(), ftl_limit=100.0)
    tight = run("colocated", table=mappings(), ftl_limit=0.2, ttl_limit=0.02, ttl_measure="p99")
    assert (tight.ftl_s <= 0.2).all()
    assert (tight.ttl_s <= 0.02).all()
    assert (free.ftl_s > 0.2).any()
    at, options = setup(LLAMA, SYSTEM, RECIPE), Colocation(ttl_measure="p99")
    case = ColocatedCase(at=at, lengths=lengths(4096, 512), ftl_limit=0.2, ttl_limit=0.02, options=options)
    seen = search_colocated(case, mappings()).tally
    assert seen.feasible <= seen.design_points
    assert 0 < seen.above_ftl_limit + seen.above_ttl_limit <= seen.feasible


# The table.


def test_all_modes_stand_in_one_table():
    table = mappings()
    at, shape = setup(LLAMA, SYSTEM, RECIPE), lengths(4096, 512)
    prefill, decode = prefill_grid(at, table, shape), decode_grid(at, table, shape)
    tables = [disaggregated(prefill, decode), run("colocated", table=table), run("piggyback", table=table)]
    for each in tables:
        assert [(c.name, c.dtype) for c in COLUMNS] == [(n, str(t)) for n, t in each.dtypes.items()]
        assert not each.isna().any().any()
        gpus = each.prefill_instances * each.prefill_gpus + each.decode_instances * each.decode_gpus
        assert (each.total_gpus == gpus).all()
        assert (each.ftl_with_slot_wait_s > each.ftl_s).all()
    joined = pd.concat(tables, ignore_index=True)
    assert set(pareto_front(joined)["mode"]) == {"disaggregated", "colocated", "piggyback"}
    zero = ["prefill_instances", "ctx_gen_gpu_ratio", "kv_egress_bytes_per_s_per_gpu", "kv_ingress_bytes_per_s_per_gpu"]
    assert (joined.loc[joined["mode"] != "disaggregated", zero] == 0).all().all()


def test_the_ftl_limit_counts_the_wait_for_a_slot():
    """32 residents end in every step, passes of 8 or 16: one of b starts every b/X, half of that is the mean wait."""
    eight, sixteen = (only(run("colocated", batch=32, prefill_batch=[b], osl=2, ftl_limit=1e3)) for b in (8, 16))
    for row, b in ((eight, 8), (sixteen, 16)):
        assert row.ftl_with_slot_wait_s == pytest.approx(row.ftl_s + b / (2 * row.request_rate_per_s))
    assert sixteen.tokens_per_s_per_gpu > eight.tokens_per_s_per_gpu
    limit = 0.5 * (eight.ftl_with_slot_wait_s + sixteen.ftl_with_slot_wait_s)
    assert sixteen.ftl_s < limit  # its pass alone would do
    assert only(run("colocated", batch=32, prefill_batch=[8, 16], osl=2, ftl_limit=limit)).prefill_batch == 8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("limit", "column"), [("ftl_limit", "ftl_with_slot_wait_s"), ("ttl_limit", "ttl_s")])
def test_a_limit_keeps_what_just_meets_it_and_nothing_beyond(mode, limit, column):
    free = run(mode, table=mappings(), ftl_limit=1.0)
    assert (free.ftl_with_slot_wait_s <= 1.0).all()
    most = float(free[column].sort_values().iloc[len(free) // 2])
    assert run(mode, table=mappings(), **{"ftl_limit": 1.0, limit: most})[column].max() == most


@pytest.mark.parametrize("mode", MODES)
def test_faults_are_told_in_one_line(mode):
    with pytest.raises(InfeasibleError, match="no co-located mapping fits in memory; the closest lacks"):
        run(mode, "llama_3_1_405b", Sharding())
    with pytest.raises(InfeasibleError, match="FTL limit of 1e-06 s; the best FTL, with the wait for a slot, is"):
        run(mode, ftl_limit=1e-6)
    with pytest.raises(InputError, match="osl 1 is out of range"):
        run(mode, osl=1)
    sizes = {"colocated": "prefill_batch", "piggyback": "rank_chunk_tokens"}[mode]
    with pytest.raises(InputError, match=rf"{sizes} 1\.5 is out of range; allowed: whole numbers from 1"):
        run(mode, **{sizes: [1.5]})


def test_passes_above_every_batch_are_refused():
    with pytest.raises(InputError, match=r"prefill_batch \[8\] is above every batch"):
        run("colocated", batch=4, prefill_batch=8)


# Mappings that are searched together.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [BLOCK_POINTS, 8])
def test_each_mapping_has_the_points_that_it_has_alone(mode, block, monkeypatch):
    """Whatever its neighbours are: ranks, depths and batches of their own, prompts as short as answers, so that either
    phase may have more tokens in a step; and however few points are scored at once."""
    table = [
        DEP8,
        TP4,
        Sharding(tp_attn=8, tp_ffn=8),
        Sharding(dp_attn=2, ep=2, pp=8),
        Sharding(dp_attn=8, ep=8, pp=2),
        Sharding(tp_attn=2, tp_ffn=2, pp=4),
    ]
    options = {"isl": 600, "osl": 1200, "batch": (1, 16, 48, 640)}
    for module in ("search.blocks", "serving.piggyback"):
        monkeypatch.setattr(f"disagg_sim.{module}.BLOCK_POINTS", block)
    together = run(mode, R1, table, **options)
    monkeypatch.undo()
    apart = pd.concat([run(mode, R1, each, **options) for each in table])
    by = ["decode_tp_attn", "decode_dp_attn", "decode_pp", "decode_batch"]
    both = [points.sort_values(by).reset_index(drop=True) for points in (together, apart)]
    pd.testing.assert_frame_equal(*both, check_exact=True)
