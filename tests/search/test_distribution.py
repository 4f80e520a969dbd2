"""Grids under joint laws of lengths: limits, convexity, quadrature, sampling, the P50 approximation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import DisaggSimError
from disagg_sim.physics.gemm import TILE_M
from disagg_sim.physics.passes.chunked import Chunks, chunk_plan, chunked_prefill_pass
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.setup import setup
from disagg_sim.search import grid as grids
from disagg_sim.search.blocks import groups_of
from disagg_sim.search.grid import decode_grid, decode_grids, prefill_grid, prefill_grids
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.workload.distributions import Constant, LogNormal
from disagg_sim.workload.lengths import independent_lengths, lengths

SYSTEM, RECIPE, TRAFFIC = "gb200_nvl72", "nvfp4_fp8kv", "log_normal_4096_512"
#: TP, a pipeline, and for an MoE model DP attention with EP.
DENSE = [Sharding(tp_attn=4, tp_ffn=4), Sharding(tp_attn=2, tp_ffn=2, pp=4)]
MOE = [Sharding(tp_attn=2, dp_attn=8, ep=16), Sharding(tp_attn=4, tp_ffn=4, pp=8)]
BATCH = [1, 2, 8, 64]
CHUNKS = [512, 2048]
TWO_MODELS = pytest.mark.parametrize(("model", "mappings"), [("llama_3_1_70b", DENSE), ("deepseek_r1", MOE)])


def narrow(isl, osl, sigma):
    return independent_lengths(LogNormal(median=isl, sigma=sigma), LogNormal(median=osl, sigma=sigma))


def gap(one, other):
    """Largest relative difference of two arrays."""
    return float(np.max(np.abs(one / other - 1)))


# --- the law itself -------------------------------------------------------------------------------------


def test_log_normal_law_has_the_moments_of_its_closed_form():
    """E[X^k] = m^k exp(k^2 s^2/2): context E[I] + E[(O-1)O]/(2 E[O-1]), and so on for the second moment."""
    m_i, s_i, m_o, s_o = 4096.0, 0.985, 512.0, 0.859
    law = independent_lengths(LogNormal(median=m_i, sigma=s_i), LogNormal(median=m_o, sigma=s_o))
    i1, i2 = m_i * math.exp(s_i**2 / 2), m_i**2 * math.exp(2 * s_i**2)
    o1, o2, o3 = (m_o**k * math.exp(k**2 * s_o**2 / 2) for k in (1, 2, 3))
    context = i1 + (o2 - o1) / (2 * (o1 - 1))
    second = i2 + i1 * (o2 - o1) / (o1 - 1) + (o3 - o2) / (3 * (o1 - 1))
    # the law ends at 6 standard deviations, where the third moment of OSL still has 3e-4 of its weight
    assert law.mean_isl == pytest.approx(i1, rel=1e-5)
    assert law.mean_osl == pytest.approx(o1, rel=1e-5)
    assert law.context == pytest.approx(context, rel=1e-5)
    assert law.resident.deviation == pytest.approx(math.sqrt(second - context**2), rel=1e-3)
    assert law.isl_deviation == pytest.approx(math.sqrt(i2 - i1**2), rel=1e-3)
    assert law.isl_quantile(0.5) == pytest.approx(m_i, rel=1e-3)
    assert law.isl_quantile(0.9) == pytest.approx(m_i * math.exp(s_i * 1.2815516), rel=1e-3)


def test_two_requests_by_hand():
    """(100, 3) and (200, 5): of 6 steps 2 belong to the first, at 100 + 1.5, and 4 to the second, at 200 + 2.5."""
    law = lengths(np.array([100, 200]), np.array([3, 5]))
    assert (law.mean_isl, law.mean_osl, law.resident.most) == (150.0, 4.0, 205.0)
    assert law.context == pytest.approx((2 * 101.5 + 4 * 202.5) / 6)
    variance = (2 * (101.5 - law.context) ** 2 + 4 * (202.5 - law.context) ** 2) / 6 + (2 * 9 + 4 * 25) / 6 / 12
    assert law.resident.deviation == pytest.approx(math.sqrt(variance))


def test_residents_of_a_simulated_queue_follow_the_length_biased_law():
    """One slot, requests in a row (seeded): the caches seen step by step have the mean and deviation of the law."""
    rng = np.random.default_rng(7)
    isl, osl = rng.integers(50, 150, 4000), rng.integers(2, 400, 4000)
    seen = np.concatenate([i + np.arange(1, o) for i, o in zip(isl.tolist(), osl.tolist(), strict=True)])
    law = lengths(isl, osl)
    assert law.context == pytest.approx(seen.mean(), rel=1e-12)  # uniform on 1 ... O-1 has mean O/2
    assert law.resident.deviation == pytest.approx(seen.std(), rel=1e-2)  # its variance is O(O-2)/12, not O^2/12


@settings(max_examples=50)
@given(prompts=st.lists(st.integers(1, 10**6), min_size=1, max_size=40), step=st.sampled_from([64.0, 512.0, 8192.0]))
def test_nodes_keep_total_and_mean_of_any_law(prompts, step):
    law = lengths(np.array(prompts), np.full(len(prompts), 2))
    nodes, weight = law.isl_nodes()
    assert weight.min() >= 0
    assert weight.sum() == pytest.approx(1)
    if len(set(prompts)) <= nodes.size:  # then the nodes are the law
        assert weight @ nodes == pytest.approx(law.mean_isl, rel=1e-6)
    share = law.isl_nodes(step)[1]
    assert share.min() >= -1e-12
    assert share.sum() == pytest.approx(1)


def test_constant_lengths_need_one_node():
    law = independent_lengths(Constant(tokens=4096), Constant(tokens=512))
    for nodes, weight in (law.isl_nodes(), law.isl_nodes(512.0)):
        assert nodes.tolist() == [pytest.approx(4096)]
        assert weight.tolist() == [1.0]
    assert law.context == pytest.approx(4096 + 256)
    assert law.resident.deviation == pytest.approx(512 / math.sqrt(12))
    assert lengths(4096, 512).requests.reach == 4096 + 512  # the tokens of the longest request at its end


def timed_passes(at, lengths, chunk):
    """FTL and busy time of a prompt of each length on eight stages of TP 4; (lengths, 2). [s]"""
    mapping = Sharding(tp_attn=4.0, tp_ffn=4.0, pp=8.0)
    if chunk:
        timed = [chunked_prefill_pass(at, mapping, batch=1.0, isl=s, chunk_tokens=chunk) for s in lengths.tolist()]
    else:
        timed = [prefill_pass(at, mapping, batch=1.0, isl=s) for s in lengths.tolist()]
    return np.array([(float(t.ftl), float(t.busy)) for t in timed])


def stairs_at(at, lengths, chunk):
    """What the first token of a row of tiles costs more than the last one of the row before, near each length. [s]"""
    edge = np.maximum(np.round(lengths / TILE_M), 1) * TILE_M
    before, last, first = (timed_passes(at, edge + step, chunk) for step in (-1, 0, 1))
    return np.abs((first - last) - (last - before))


def quadrature_error(at, traffic, chunk):
    """Of the expectation over the law, against that over 210 lengths. [1]"""
    law = lengths(traffic)
    dense, share = law.isl[::8], law.isl_weight[::8] / law.isl_weight[::8].sum()
    dense, share = dense[share > 1e-7], share[share > 1e-7]
    nodes, weight = law.isl_nodes(chunk)
    return gap(weight @ timed_passes(at, nodes, chunk), share @ timed_passes(at, dense, chunk))


def half_a_stair(at, traffic, chunk):
    """Half a stair of tiles in the mean over the law, over the expectation. [1]"""
    nodes, weight = lengths(traffic).isl_nodes(chunk)
    return float(np.max(weight @ stairs_at(at, nodes, chunk) / 2 / (weight @ timed_passes(at, nodes, chunk))))


@pytest.mark.parametrize(("model", "traffic"), [("llama_3_1_70b", "azure_2023_conversation"), ("deepseek_r1", TRAFFIC)])
def test_tiles_add_at_most_half_a_stair_to_the_error_of_the_quadrature(model, traffic):
    """A pass rises by 3 % at 65 ... 385 tokens, 1.7 % near 1,000 and 0.7 % near 4,000 (Llama, rows of 64 tokens).

    A node stands anywhere on its stair, half a stair off at most; measured: 0.18 % unchunked where half a stair is 0.8.
    """
    at = setup(model, SYSTEM, RECIPE, engine="kernels")
    for chunk, limit in ((0.0, 1e-3), (512.0, 5e-3)):
        stair = half_a_stair(at, traffic, chunk)
        assert quadrature_error(at, traffic, chunk) < limit + stair, chunk
        assert stair < 0.02


# --- grids ----------------------------------------------------------------------------------------------


def check_limit(model, mappings, sigma, stair):
    """Grids under a narrow law against those of its medians; ``stair`` is what a row of tiles may add. [1]"""
    at, law = setup(model, SYSTEM, RECIPE), narrow(4000, 512, sigma)
    pairs = (
        (
            prefill_grid(at, mappings, law, chunk_tokens=CHUNKS, batch=BATCH),
            prefill_grid(at, mappings, lengths(4000, 512), chunk_tokens=CHUNKS, batch=BATCH),
        ),
        (decode_grid(at, mappings, law, batch=BATCH), decode_grid(at, mappings, lengths(4000, 512), batch=BATCH)),
    )
    limits = {"latency": 0.4 * sigma + stair, "request_rate": 4 * sigma**2 + stair, "memory_bytes": sigma}
    for under, constant in pairs:
        assert np.array_equal(under.mappings.chunk_tokens, constant.mappings.chunk_tokens)
        assert np.array_equal(under.status, constant.status)
        assert np.array_equal(under.bound, constant.bound)
        for name, limit in limits.items():
            assert gap(getattr(under, name), getattr(constant, name)) <= limit + 1e-9, (name, sigma)
        assert under.kv_bytes_per_request == pytest.approx(constant.kv_bytes_per_request, rel=sigma**2 + 1e-9)
        assert np.array_equal(under.unique_gpus, constant.unique_gpus)


@TWO_MODELS
@pytest.mark.usefixtures("seed_fits")
def test_smooth_grids_become_those_of_constant_lengths_as_the_variance_goes_to_zero(model, mappings):
    """At sigma = 0 to rounding; before, rates differ by O(sigma^2), memory, through its cap, by O(sigma).

    So does the FTL of CPP where it bends: at 4000 tokens the last of two chunks becomes the largest.

    ISL 4000 is 8 deviations from the next multiple of a chunk, where the count of chunks steps up.
    """
    for sigma in (0.0, 1e-3, 3e-3):
        check_limit(model, mappings, sigma, stair=0.0)


@TWO_MODELS
def test_grids_with_tiles_are_those_of_constant_lengths_without_variance_and_a_stair_off_with_little(model, mappings):
    """8 prompts of 4000 tokens fill their last row of 64; the same law spread by half a token begins another one.

    Half the weight of the law lies beyond, so half a stair stays however small the spread: 0.23 % (70B), 0.05 % (R1).
    """
    check_limit(model, mappings, 0.0, stair=0.0)
    for sigma in (1e-4, 3e-3):
        check_limit(model, mappings, sigma, stair=0.003)


# --- claim C28 ------------------------------------------------------------------------------------------


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: lengths("beyond_the_buzz"), "9 cases"),
        (lambda: lengths(np.array([5, 2]), np.array([1, 1])), "prefill only"),
        (lambda: decode_grid(setup("opt_30b", SYSTEM, "bf16"), DENSE, lengths(TRAFFIC)), "context limit of opt_30b"),
        (
            lambda: prefill_grid(setup("llama_3_1_70b", SYSTEM, RECIPE), DENSE, lengths(TRAFFIC), ftl_quantile=1.0),
            "quantile 1.0",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(call, words):
    with pytest.raises(DisaggSimError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


ARRAYS = ("batch", "latency", "request_rate", "memory_bytes", "microbatches", "bound", "mla_form", "drafts")

#: Lengths that share prompts, contexts (2048 + 512/2 = 2240 + 128/2) or nothing, and some that go by themselves.
LOADS = [
    *(ds.lengths(isl, osl) for isl, osl in ((700, 64), (2048, 512), (2048, 1000), (2240, 128), (12_000, 300))),
    ds.lengths(8192, 512, cached=0.5),
    ds.lengths("log_normal_4096_512", rank_imbalance="least_load"),
]

SETUPS = [
    ("llama_3_1_8b", "h200_sxm", "fp8", {}),
    ("llama_3_1_70b", "h100_sxm", "fp8", {"engine": "vllm"}),
    ("deepseek_r1", "h200_sxm", "fp8", {"engine": "sglang", "speculation": "deepseek_r1_mtp"}),
    ("gpt_oss_120b", "h200_sxm", "fp8", {}),
]


@pytest.mark.parametrize(("model", "system", "precision", "more"), SETUPS)
@pytest.mark.parametrize(("one", "many"), [(decode_grid, decode_grids), (prefill_grid, prefill_grids)])
def test_many_lengths_are_scored_as_one_by_one(model, system, precision, more, one, many):
    at = ds.setup(model, system, precision, **more)
    table = enumerate_mappings(at, max_gpus=4)
    loads = LOADS if one is decode_grid else LOADS[:-1]  # prefill takes laws of lengths by themselves, and long
    for load, found in zip(loads, many(at, table, loads), strict=True):
        alone = one(at, table, load)
        assert found.lengths == alone.lengths
        assert found.mappings == alone.mappings
        for name in ARRAYS:
            assert getattr(found, name).tobytes() == getattr(alone, name).tobytes(), name


def test_prompts_that_are_equal_are_scored_once(monkeypatch):
    """Answers of other lengths take other decode instances, and the same prefill ones."""
    asked = []
    points = grids.prefill_points

    def counted(at, several, *more, **named):
        asked.extend(several.cases)
        return points(at, several, *more, **named)

    monkeypatch.setattr(grids, "prefill_points", counted)
    at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8")
    loads = [ds.lengths(isl, osl) for isl in (1024, 2048) for osl in (128, 256, 512)]
    found = prefill_grids(at, ds.Sharding(), loads, batches=[[1, 2, 4]] * 6)
    assert [load.mean_isl for load in asked] == [1024, 2048]
    assert [grid.lengths.mean_osl for grid in found] == [128, 256, 512] * 2


def test_groups_hold_grids_whose_batches_are_the_first_of_the_longest():
    few, more, others = np.arange(1, 4), np.arange(1, 9), np.arange(2, 6)
    assert list(groups_of([5] * 4, [few, more, others, few], [True] * 4)) == [[1], [2], [0, 3]]
    assert list(groups_of([5] * 3, [few, more, few], [True] * 3)) == [[1, 0, 2]]
    assert list(groups_of([5] * 3, [few, more, few], [True, False, True])) == [[1], [0, 2]]
    assert list(groups_of([10_000] * 2, [more, more], [True] * 2)) == [[0], [1]]  # 80,000 points each


def test_chunks_lie_one_after_the_other():
    """A prompt of 1000 tokens in chunks of 512 and 256 tokens, 24 of each before it: two chunks and four."""
    size = np.array([[512.0], [256.0]])
    chunks = Chunks(chunk_plan(1000.0, size), (1.0, 1.0, 1.0, np.array([[1.0, 2.0, 3.0]]), 24.0))
    (rows,) = chunks.blocks()
    here = chunks.of(rows)
    assert here.tokens.new.ravel().tolist() == [512, 488, 256, 256, 256, 232]
    assert here.tokens.past.ravel().tolist() == [24, 536, 24, 280, 536, 792]
    assert here.tokens.latent.ravel().tolist() == [24, 0, 24, 0, 0, 0]
    total = here.tokens.new * here.tokens.prompts
    assert here.summed(total).tolist() == [[1000, 2000, 3000]] * 2
    assert here.at(total, here.full).tolist() == [[512, 1024, 1536], [256, 512, 768]]
    assert here.at(total, here.last).tolist() == [[488, 976, 1464], [232, 464, 696]]


def test_a_sum_over_chunks_does_not_depend_on_the_rows_beside_it():
    """Numbers are added in pairs, so zeros behind them would move the last digit."""
    rng, lone = np.random.default_rng(1), chunk_plan(64_000.0, np.array([[512.0], [4096.0]]))
    new = np.array([[64_000.0], [64_000.0], [200_000.0]])
    beside = chunk_plan(new, np.array([[512.0], [4096.0], [512.0]]))
    most = np.array([[125.0], [125.0], [391.0]])
    alone = Chunks(lone, (1.0, 1.0, 1.0, 1.0, 0.0)).of(slice(None))
    among = Chunks(beside, (1.0, 1.0, 1.0, 1.0, 0.0), most).of(slice(None))
    values = rng.random((among.row.size, 1))
    assert alone.row.size == 125 + 16
    assert among.summed(values)[:2].tolist() == alone.summed(values[: alone.row.size]).tolist()
