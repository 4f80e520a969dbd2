"""Claims of "Beyond the Buzz" (arXiv 2506.05508) that concern one phase or the KV transfer.

Numbers are those of the list of claims: C10, C18-C24, C32. Figures were read from pictures, to a few
percent. A miss is pinned with its reason, not tolerated away. GB200 NVL72, recipe nvfp4_fp8kv, unless said.
"""

from dataclasses import replace

import numpy as np
import pytest
from breakdown import seconds_by_operator

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_model
from disagg_sim.physics.counts import prefill_work
from disagg_sim.physics.kv_transfer import unique_gpus
from disagg_sim.physics.memory import kv_duplication
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.setup import setup as setup_of
from disagg_sim.physics.work import Tokens
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.units import GB
from disagg_sim.workload.lengths import lengths

SYSTEM, RECIPE = "gb200_nvl72", "nvfp4_fp8kv"
EVERY_PROFILE = ("ideal", "measured")


def setup(*names: str) -> Setup:
    """The setup with even expert ranks, as the paper has them."""
    at = setup_of(*names)
    return at.changed(profile=replace(at.profile, rank_skew=0.0))


def kv_bandwidth(grid: PhaseGrid) -> np.ndarray:
    """Egress of a prefill grid or ingress of a decode grid, per GPU with distinct cache. [B/s]"""
    return grid.request_rate * grid.kv_bytes_per_request / grid.unique_gpus[:, None]


def prefill(model: str, mappings, isl: int, profile: str = "measured", engine: str = "kernels", **more) -> PhaseGrid:
    return prefill_grid(
        setup(model, SYSTEM, RECIPE, profile, engine), mappings, lengths(isl, 2), allow_long_context=True, **more
    )


def decode(model: str, mappings, isl: int, osl: int = 2048, profile: str = "measured", **more) -> PhaseGrid:
    at = setup(model, SYSTEM, RECIPE, profile, "kernels")
    return decode_grid(at, mappings, lengths(isl, osl), allow_long_context=True, **more)


# C10 (figure 5): R1, ISL 256K, EP x PP = 64. PP 1 -> 32 cuts FTL 31 times at constant throughput.

QUARTER_MILLION = 262_144


def pipelines(
    profile: str, form: str, chunk: int = 512, engine: str = "kernels"
) -> dict[int, tuple[float, float, bool]]:
    """PP -> (FTL [s], requests/s of 64 GPUs, fits); PP 1 unchunked, one prompt a rank."""
    found = {}
    for pp in (1, 2, 4, 8, 16, 32):
        n = 64 // pp
        grid = prefill(
            "deepseek_r1",
            Sharding(dp_attn=n, ep=n, pp=pp),
            QUARTER_MILLION,
            profile=profile,
            batch=[n],
            chunk_tokens=[chunk],
            mla_form=form,
            engine=engine,
        )
        found[pp] = float(grid.latency[-1, 0]), float(grid.request_rate[-1, 0]), bool(grid.feasible[-1, 0])
    return found


@pytest.mark.parametrize(("profile", "factor"), [("measured", 21.4), ("optimistic", 21.6)])
def test_c10_pipelined_chunks_cut_ftl_20_to_32_times(profile, factor):
    """Accepted: a factor of 20-32, FTL 60-140 s at PP 1 and 2-5 s at PP 32. Ours: 95.1 s to 4.44 s, 21.4 times."""
    found = pipelines(profile, "cached")
    assert 20 <= found[1][0] / found[32][0] <= 32
    assert 60 <= found[1][0] <= 140
    assert 2 <= found[32][0] <= 5
    assert found[1][0] / found[32][0] == pytest.approx(factor, rel=0.005)
    assert [pp for pp, (_, _, fits) in found.items() if fits] == [1, 8, 16, 32]  # kept keys and values: PP 2, 4 too big


def test_c10_the_engine_stretches_all_but_attention_and_keeps_the_accepted_time():
    """TensorRT-LLM at PP 32: 4.57 s, inside the accepted 5 s. Attention is not stretched and takes most of a pass.

    All other kernels take 1.183 times as long: 12.2 of 94.7 s at PP 1, hence 1.024 times in all; 1.037 at PP 32, where
    small chunks spend more beside attention.
    """
    bare, found = (pipelines("measured", "cached", engine=engine) for engine in ("kernels", "trtllm"))
    assert 20 <= found[1][0] / found[32][0] <= 32
    assert 2 <= found[32][0] <= 5
    assert found[32][0] == pytest.approx(4.575, rel=0.005)
    assert found[1][0] / bare[1][0] == pytest.approx(1 + 0.183 * 12.2 / 94.7, rel=0.002)
    assert found[32][0] / bare[32][0] == pytest.approx(1.037, rel=0.002)


def relative_rates(profile: str, chunk: int) -> dict[int, float]:
    """PP -> request rate over that of PP 1. [1]"""
    found = pipelines(profile, "cached", chunk)
    return {pp: rate / found[1][1] for pp, (_, rate, _) in found.items()}


def test_c10_throughput_misses_ten_percent_in_chunks_of_512():
    """Accepted: within 10 % of PP 1. `measured` gives 0.82 at PP 2 and 0.737 at PP 32, `optimistic` 0.747.

    Where it goes (GPU-seconds a prompt at PP 1: 94.4; at PP 32: 122 before uneven layers): attention +15.8 s, as
    128 heads of 512 tokens are 256 thread blocks on 152 multiprocessors, which take two rounds; experts +12.7 s,
    since EP 2 reads 128 experts a GPU again for every 2 x 512 tokens; floors of GEMM and elementwise kernels +1.8 s;
    the narrower exchange -3.1 s. The slowest of 32 stages holds 2 MoE layers where 61/32 would be even: 0.953, and
    all MoE (a dense layer is cheaper): 0.994. Chunks of 2,048 tokens hold the bar at a factor of 20.8 and 4.53 s.
    """
    rates = relative_rates("measured", 512)
    assert [rates[pp] for pp in (2, 8, 32)] == pytest.approx([0.822, 0.789, 0.737], abs=0.002)
    assert relative_rates("optimistic", 512)[32] == pytest.approx(0.746, abs=0.002)
    assert relative_rates("measured", 1024)[32] == pytest.approx(0.796, abs=0.002)
    assert all(rate > 0.9 for rate in relative_rates("measured", 2048).values())
    coarse = pipelines("measured", "cached", chunk=2048)
    assert coarse[1][0] / coarse[32][0] == pytest.approx(20.8, rel=0.005)
    assert coarse[32][0] == pytest.approx(4.53, rel=0.005)


def test_c10_nearly_half_of_the_missing_throughput_is_the_second_round_of_attention(monkeypatch):
    """256 blocks on 128 multiprocessors of the same rate in all leave nothing idle. Nobody timed it on this past."""
    even = setup
    rate = even("deepseek_r1", SYSTEM, RECIPE).rates.prefill_attention["mla"]
    assert (rate.multiprocessors, rate.splits_keys) == (152, False)

    def filled(*names):
        at = even(*names)
        return replace(at, rates=replace(at.rates, prefill_attention={"mla": replace(rate, multiprocessors=128)}))

    monkeypatch.setitem(globals(), "setup", filled)
    assert relative_rates("measured", 512)[32] == pytest.approx(0.842, abs=0.002)


def test_c10_the_missing_throughput_is_experts_read_again():
    """The other terms of the explanation above, from the operators. [GPU s a prompt]

    Floors are 1.82 s: a GEMM in NVFP4 keeps its fitted start of 7-10 us in every chunk.
    """
    at = setup("deepseek_r1", SYSTEM, RECIPE)
    whole = seconds_by_operator(
        at,
        Sharding(dp_attn=64.0, ep=64.0),
        Tokens(prompts=1.0, new=float(QUARTER_MILLION), emitted=1.0),
        phase="prefill",
        stage_tokens=64.0 * QUARTER_MILLION,
        imbalance=None,
    )
    chunk = seconds_by_operator(
        at,
        Sharding(dp_attn=2.0, ep=2.0),
        Tokens(prompts=1.0, new=512.0, emitted=1.0),
        phase="prefill",
        stage_tokens=1024.0,
        imbalance=None,
    )
    extra = {name: seconds * 512 - whole[name] for name, seconds in chunk.items()}
    assert sum(whole.values()) == pytest.approx(94.4, rel=0.002)
    assert extra["routed experts"] == pytest.approx(12.73, abs=0.05)
    assert extra["dispatch"] + extra["combine"] == pytest.approx(-3.11, abs=0.05)
    floors = ("q_a, kv_a", "q_b", "kv_b", "o", "gate, up", "down", "router", "shared gate, up", "shared down")
    assert sum(extra[name] for name in (*floors, "elementwise")) == pytest.approx(1.82, abs=0.05)


def test_c10_naive_chunks_beside_it():
    """Reported without a bar: re-projection leaves 14.4 times and 0.50 of the throughput (by FLOP 16 and 0.55-0.58)."""
    found = pipelines("measured", "naive")
    assert found[1][0] / found[32][0] == pytest.approx(14.38, rel=0.005)
    assert found[32][1] / found[1][1] == pytest.approx(0.497, abs=0.002)


# C18: egress falls with ISL (accepted: strictly decreasing from 4k on).

LENGTHS = [4096, 8192, 16_384, 32_768, 65_536, 131_072]


@pytest.mark.parametrize("profile", EVERY_PROFILE)
@pytest.mark.parametrize(
    ("model", "mapping"),
    [
        ("deepseek_r1", Sharding(dp_attn=8, ep=8)),
        ("deepseek_r1", Sharding(tp_attn=8, ep=8)),
        ("deepseek_r1", Sharding(dp_attn=64, ep=64)),
        ("llama_3_1_70b", Sharding()),
        ("llama_3_1_70b", Sharding(tp_attn=4, tp_ffn=4)),
        ("llama_3_1_70b", Sharding(pp=4)),
    ],
)
def test_c18_egress_falls_with_isl(model, mapping, profile):
    egress = [
        kv_bandwidth(prefill(model, mapping, isl, profile=profile, batch=[64], chunk_tokens=[]))[0, 0]
        for isl in LENGTHS
    ]
    assert np.all(np.diff(egress) < 0)


def best_prefill(model: str, isl: int) -> float:
    """Egress per GPU of the mapping and batch with most requests/s per GPU under 10 s. [B/s]"""
    table = enumerate_mappings(setup(model, SYSTEM, RECIPE), max_gpus=64)
    grid = prefill(model, table, isl)
    usable = grid.feasible & (grid.latency <= 10.0)
    per_gpu = np.where(usable, grid.request_rate / grid.gpus[:, None], 0.0)
    return float(kv_bandwidth(grid).flat[np.argmax(per_gpu)])


@pytest.mark.parametrize("model", ["deepseek_r1", "llama_3_1_70b"])
def test_c18_egress_of_the_best_pool_falls_with_isl(model):
    egress = [best_prefill(model, isl) for isl in LENGTHS[:5]]
    assert np.all(np.diff(egress) < 0)


# C19: ingress hardly depends on ISL where the cache is what decode reads; it goes with 1/(OSL-1).


@pytest.mark.parametrize("profile", EVERY_PROFILE)
@pytest.mark.parametrize(
    ("model", "mapping", "at_64k"),
    [("deepseek_r1", Sharding(dp_attn=64, ep=64), 64 * 32), ("llama_3_1_70b", Sharding(tp_attn=8, tp_ffn=8), 64)],
)
def test_c19_ingress_hardly_moves_from_64k_to_1m(model, mapping, at_64k, profile):
    """The same cached tokens at every length: batch halves as ISL doubles. Accepted: below 25 %; ours 4-8 %."""
    ingress = []
    for isl in (65_536, 131_072, 262_144, 524_288, 1_048_576):
        grid = decode(model, mapping, isl, profile=profile, batch=[at_64k * 65_536 // isl])
        assert grid.feasible.all()
        ingress.append(kv_bandwidth(grid)[0, 0])
    assert max(ingress) / min(ingress) < 1.09


def test_c19_ingress_of_a_bandwidth_bound_decode_is_bandwidth_over_osl():
    """-> eta*BW/(OSL-1) whatever the model: 8e12/2047 = 3.9 GB/s at the speed of light; weights leave 77-95 % of it."""
    for model, mapping, batch in (
        ("deepseek_r1", Sharding(dp_attn=64, ep=64), 128),
        ("llama_3_1_70b", Sharding(tp_attn=8, tp_ffn=8), 4),
    ):
        grid = decode(model, mapping, 1_048_576, profile="ideal", batch=[batch])
        assert 0.75 < kv_bandwidth(grid)[0, 0] / (8e12 / 2047) < 1


@pytest.mark.parametrize("model", ["deepseek_r1", "llama_3_1_70b"])
def test_c19_ingress_goes_with_one_over_osl_minus_one(model):
    """At fixed TTL, batch and prompt, exactly."""
    fixed = []
    for osl in (2, 3, 256, 2048):
        grid = decode(model, Sharding(tp_attn=8, tp_ffn=8), 16_384, osl=osl, batch=[4, 16])
        fixed.append(kv_bandwidth(grid) * grid.latency * (osl - 1))
    for other in fixed[1:]:
        np.testing.assert_allclose(other, fixed[0], rtol=1e-12)


# C20: ingress per GPU falls as TTL tightens.


@pytest.mark.parametrize("profile", EVERY_PROFILE)
@pytest.mark.parametrize(
    ("model", "mapping"),
    [
        ("deepseek_r1", Sharding(dp_attn=64, ep=64)),
        ("deepseek_r1", Sharding(tp_attn=8, ep=8)),
        ("llama_3_1_70b", Sharding(tp_attn=8, tp_ffn=8)),
        ("llama_3_1_70b", Sharding(tp_attn=2, tp_ffn=2, pp=2)),
    ],
)
def test_c20_ingress_falls_as_ttl_tightens(model, mapping, profile):
    """Along the full batches of a mapping: a shorter TTL means fewer sequences and fewer bytes a second."""
    ranks = mapping.dp_attn * mapping.pp
    grid = decode(model, mapping, 16_384, profile=profile, batch=[ranks * 2**k for k in range(8)])
    assert np.all(np.diff(grid.latency[0]) > 0)
    assert np.all(np.diff(kv_bandwidth(grid)[0]) > 0)


@pytest.fixture(scope="module")
def sweeps():
    """Matched points of R1 at 2k output: 16k prompts under 10 s, and 1M prompts with the cut-off waived."""
    table = enumerate_mappings(setup("deepseek_r1", SYSTEM, RECIPE), max_gpus=64)
    return {
        isl: ds.disaggregated(prefill("deepseek_r1", table, isl), decode("deepseek_r1", table, isl), ftl_limit=limit)
        for isl, limit in ((16_384, 10.0), (1_048_576, 1e6))
    }


def test_c20_ingress_falls_along_the_frontier(sweeps):
    """Per decode GPU, duplicated caches included: R1 16k/2k, over two orders of magnitude, never up by a tenth."""
    front = ds.pareto_front(sweeps[16_384]).sort_values("tokens_per_s_per_user")
    unique = front["decode_unique_gpus"] / front["decode_gpus"]
    ingress = (front["kv_ingress_bytes_per_s_per_gpu"] * unique).to_numpy()
    assert np.all(ingress <= np.minimum.accumulate(ingress) * 1.1)
    assert ingress[0] / ingress[-1] > 100


# C21: R1 needs less egress than Llama-70B.


def test_c21_the_latent_cache_needs_a_fraction_of_the_egress():
    """Accepted: 2-6 times less. Best pools at 16k: 3.3 by FLOP and bytes, 4.6 with the efficiency of each."""
    ratio = best_prefill("llama_3_1_70b", 16_384) / best_prefill("deepseek_r1", 16_384)
    assert 2 <= ratio <= 6
    assert ratio == pytest.approx(4.60, rel=0.02)


# C22 (figure 12): max(egress, ingress) along R1's frontier.


@pytest.mark.parametrize(("isl", "band"), [(16_384, (0.4, 1.2)), (1_048_576, (1.0, 1.8))])
def test_c22_kv_bandwidth_stays_within_the_figure(sweeps, isl, band):
    """Accepted: within a factor of 3 of the band, below 10 GB/s everywhere (a NIC has 50).

    Ours: 1.47 falling to 0.70 GB/s at 16k (figure: 1.23 to 0.37-0.40); 0.8-1.7 at 1M (figure: 0.97-1.82).
    """
    points = sweeps[isl]
    columns = ["kv_egress_bytes_per_s_per_gpu", "kv_ingress_bytes_per_s_per_gpu"]
    along = ds.pareto_front(points)[columns].max(axis=1) / GB
    assert along.min() >= band[0] / 3
    assert along.max() <= band[1] * 3
    assert points[columns].max(axis=None) / GB < 10


def test_c22_the_loose_end_is_bound_by_ingress_and_the_tight_end_by_egress(sweeps):
    front = ds.pareto_front(sweeps[16_384]).sort_values("tokens_per_s_per_user")
    ratio = (front["kv_ingress_bytes_per_s_per_gpu"] / front["kv_egress_bytes_per_s_per_gpu"]).to_numpy()
    assert ratio[0] > 1 > ratio[-1]
    assert front["kv_ingress_bytes_per_s_per_gpu"].iloc[0] / GB == pytest.approx(1.47, rel=0.02)  # figure: 1.23


# C23: duplication of the cache, exactly.


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(("model", "kv_heads"), [("llama_3_1_70b", 8), ("qwen3_235b_a22b", 4), ("deepseek_r1", 1)])
def test_c23_cache_is_duplicated_above_the_number_of_kv_heads(model, kv_heads, tp):
    """max(1, tp/n_kv); one latent for all heads of MLA. What is not duplicated is unique."""
    spec = load_model(model)
    copies = float(kv_duplication(spec, float(tp)))
    assert copies == max(1.0, tp / kv_heads)
    assert float(unique_gpus(spec, Sharding(tp_attn=float(tp), dp_attn=4.0, pp=2.0))) * copies == tp * 4 * 2


# C24: what leaves the prefill pool arrives at the decode pool.


@pytest.mark.parametrize("pp", [1, 4])
@pytest.mark.parametrize("model", ["deepseek_r1", "llama_3_1_70b"])
def test_c24_balanced_pools_send_what_they_receive(model, pp):
    """n_p*p = n_d*r in real counts: N_p*egress = N_d*ingress, and both are the request rate times the cache."""
    isl, n_p = 16_384, 3.0
    senders = prefill(model, Sharding(tp_attn=4, tp_ffn=4, pp=pp), isl, batch=[8], chunk_tokens=[2048])
    takers = decode(model, Sharding(tp_attn=2, tp_ffn=2, pp=pp), isl, batch=[24])
    for row in range(len(senders.mappings)):
        n_d = n_p * senders.request_rate[row, 0] / takers.request_rate[0, 0]
        sent = n_p * senders.unique_gpus[row] * kv_bandwidth(senders)[row, 0]
        received = n_d * takers.unique_gpus[0] * kv_bandwidth(takers)[0, 0]
        cache = isl * load_model(model).kv_elements_per_token()  # one byte each in fp8
        assert sent == pytest.approx(received, rel=1e-9)
        assert sent == pytest.approx(n_p * senders.request_rate[row, 0] * cache, rel=1e-9)


# C32: FTL scales with active parameters, the cache does not.


def test_c32_flops_and_cache_of_405b_and_70b():
    large, small = (load_model(name) for name in ("llama_3_1_405b", "llama_3_1_70b"))
    assert prefill_work(large, isl=4096).flops / prefill_work(small, isl=4096).flops == pytest.approx(5.8, rel=0.01)
    assert large.kv_elements_per_token() / small.kv_elements_per_token() == pytest.approx(1.575, rel=1e-9)


def ftl_ratio(system: str, precision: str, mapping: Sharding, profile: str) -> float:
    done = [
        prefill_grid(setup(name, system, precision, profile), mapping, lengths(4096, 2), batch=[1], chunk_tokens=[])
        for name in ("llama_3_1_405b", "llama_3_1_70b")
    ]
    return float(done[0].latency[0, 0] / done[1].latency[0, 0])


@pytest.mark.parametrize("profile", EVERY_PROFILE)
@pytest.mark.parametrize(("system", "precision"), [("gb200_nvl72", RECIPE), ("h100_sxm", "fp8")])
@pytest.mark.parametrize("pp", [1, 2])
def test_c32_ftl_ratio_without_tensor_parallelism(system, precision, profile, pp):
    """Accepted: 5.8 within 15 %. One prompt of 4096 tokens at TP 1, in one or two stages: 5.1-5.5 in every profile.

    Elementwise bytes go with L*d (3.15 times), not with parameters (5.8), hence a ratio below 5.8.
    """
    assert ftl_ratio(system, precision, Sharding(pp=pp), profile) == pytest.approx(5.8, rel=0.15)


def test_c32_misses_under_tensor_parallelism():
    """TP 8, `measured`: 3.6 on GB200, 4.0 on H100.

    All-reduce and repeated elementwise bytes go with L*d too, their starts with L alone (1.58 times): 2.98 in all, and
    most of the small model's time. Multiplies and attention go 4.7 times up where their FLOP go 5.8: an eighth of 70B,
    8 heads of it, fills the multiprocessors less, and every GEMM has a start of 7-10 us. The claim is about
    arithmetic, the miss about sharding.
    """
    tp8 = Sharding(tp_attn=8, tp_ffn=8)
    assert ftl_ratio("gb200_nvl72", RECIPE, tp8, "measured") == pytest.approx(3.57, rel=0.02)
    assert ftl_ratio("h100_sxm", "fp8", tp8, "measured") == pytest.approx(3.99, rel=0.02)
    at, parts = {}, {}
    for name in ("llama_3_1_405b", "llama_3_1_70b"):
        at[name] = setup(name, "gb200_nvl72", RECIPE)
        tokens = Tokens(prompts=1.0, new=4096.0, emitted=1.0)
        mapping = Sharding(tp_attn=8.0, tp_ffn=8.0)
        parts[name] = seconds_by_operator(at[name], mapping, tokens, phase="prefill", stage_tokens=4096.0)
    large, small = parts.values()
    matmul = ("qkv", "o", "gate, up", "down", "prefill attention")
    assert sum(large[name] for name in matmul) / sum(small[name] for name in matmul) == pytest.approx(4.66, rel=0.02)
    rest = ("attention all-reduce", "FFN all-reduce", "elementwise")
    assert sum(large[name] for name in rest) / sum(small[name] for name in rest) == pytest.approx(2.98, rel=0.02)
