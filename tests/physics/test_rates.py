"""From peaks, fits and profile to rates: which fit is taken, what a profile changes, what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_efficiency, load_engine, load_model, load_profile, load_system, resolve_precision
from disagg_sim.physics.cost import expert_cost
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.rates import Rates, resolve_rates
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import Operator, Work
from disagg_sim.units import US

GB200 = ("gb200_nvl72", "nvfp4_fp8kv")
pytestmark = pytest.mark.usefixtures("seed_fits_throughout")  # numbers by hand from fits that do not change


def rates_of(model: str, profile: str = "measured", engine: str | None = None, system=GB200) -> Rates:
    return setup(model, *system, profile, engine).rates


def test_ideal_is_the_vendors_peak():
    rates = rates_of("deepseek_r1", "ideal")
    assert rates.gemm["nvfp4"].flops == 10e15
    assert rates.gemm["fp8_block"].flops == 5e15
    assert rates.gemm["bf16"].flops == 2.5e15
    assert rates.decode_attention["mla"].flops == 5e15  # fp8 arithmetic
    for rate in (*rates.gemm.values(), *(r for kernels in rates.moe.values() for r in kernels)):
        assert rate.bandwidth == 8e12
        assert rate.t0 == 0
        assert np.isinf(rate.blend)
    assert rates.all_reduce.at(8.0) == (0.0, 900e9)
    assert setup("deepseek_r1", *GB200, "ideal").profile.host == 0


def test_measured_takes_the_fits_of_tensorrt_llm_first():
    """Shares of the peaks as fitted; decode MLA in fp8 reaches 0.978 of the BF16 peak."""
    rates = rates_of("deepseek_r1")
    assert rates.gemm["nvfp4"].flops == pytest.approx(0.389 * 10e15)
    assert rates.gemm["nvfp4"].bandwidth == pytest.approx(0.597 * 8e12)
    assert rates.decode_attention["mla"].flops == pytest.approx(0.978 * 2.5e15)
    assert rates.prefill_attention["mla"].flops == pytest.approx(0.832 * 2.5e15)
    assert rates.prefill_attention["mla"].s_half == pytest.approx(3480.7, abs=0.1)


def test_mla_alone_multiplies_in_another_format_than_its_cache_has():
    """In decode: 0.606 of the BF16 peak as on a bf16 cache, and 0.684 in fp8; GQA waits for its cache alone."""
    recipes = {"bf16_fp8kv": 0.606, "bf16": 0.606, "fp8": 0.684}
    for name, share in recipes.items():
        latent, grouped = (rates_of(model, system=("h200_sxm", name)) for model in ("deepseek_r1", "llama_3_1_8b"))
        assert latent.decode_attention["mla"].flops == pytest.approx(share * 989.4e12)
        own = [taken.what for each in (latent, grouped) for taken in each.used if "decode arithmetic" in taken.what]
        assert own == ["bf16 MLA decode arithmetic"] * (name == "bf16_fp8kv")


def test_floor_of_gemm_with_static_scales_is_capped_at_4_us():
    """Scales of blocks (NVFP4) need the values first, bf16 has none: both keep what was fitted."""
    rates = rates_of("deepseek_r1")
    assert rates.gemm["nvfp4"].t0 == pytest.approx(10.05 * US, rel=0.01)
    assert rates.gemm["bf16"].t0 == pytest.approx(3.307 * US)
    assert rates_of("llama_3_1_70b", system=("h100_sxm", "fp8")).gemm["fp8"].t0 == pytest.approx(4 * US)
    on_a100 = rates_of("llama_3_1_70b", system=("a100_sxm_80gb", "bf16"))
    assert on_a100.gemm["bf16"].t0 > 4 * US


def test_optimistic_changes_floors_and_not_efficiencies():
    fitted, hopeful = rates_of("deepseek_r1"), rates_of("deepseek_r1", "optimistic")
    for name, rate in fitted.gemm.items():
        assert hopeful.gemm[name].flops == rate.flops
        assert hopeful.gemm[name].bandwidth == rate.bandwidth
        assert hopeful.gemm[name].t0 == pytest.approx(2 * US)
    assert hopeful.decode_attention["mla"].t0 == hopeful.prefill_attention["mla"].t0 == pytest.approx(6 * US)
    assert hopeful.all_reduce.at(64.0)[0] == pytest.approx(5 * US)
    assert all(rate.t0 == pytest.approx(15 * US) for kernels in hopeful.moe.values() for rate in kernels)
    assert hopeful.dispatch["decode"].inside.at(64.0)[0] == pytest.approx(15 * US)
    assert hopeful.prepare is None


def test_an_engine_comes_first_where_it_has_a_fit():
    rates = rates_of("llama_3_1_70b", engine="vllm")
    assert rates.gemm["nvfp4"].bandwidth == pytest.approx(0.784 * 8e12)
    assert any(taken.text.startswith("nvfp4 GEMM: vllm") for taken in rates.used)
    # vLLM has no fp8-cache MLA kernels on GB200: the next engine in order has
    fits = [taken.text for taken in rates_of("deepseek_r1", engine="vllm").used]
    assert any(fit.startswith("fp8-cache MLA decode attention: trtllm") for fit in fits)


def test_all_reduce_on_gb200_above_four_gpus_is_the_stated_assumption():
    """6 us at 8 ranks, 1.5 us more a doubling, 0.6 of the link."""
    at_8, at_64 = (rates_of("llama_3_1_70b").all_reduce.at(n) for n in (8.0, 64.0))
    assert (at_8[0], at_64[0]) == (pytest.approx(6 * US), pytest.approx(10.5 * US))
    assert at_8[1] == at_64[1] == pytest.approx(0.6 * 900e9)


@pytest.mark.parametrize(
    ("system", "recipe", "inherited"),
    [
        ("h100_sxm", "fp8", False),
        ("h200_sxm", "fp8", False),
        ("gb200_nvl72", "nvfp4_fp8kv", False),
        ("a100_sxm_80gb", "bf16", False),
        ("h800_sxm", "fp8", True),
        ("gb300_nvl72", "nvfp4_fp8kv", True),
        ("mi300x", "fp8", True),
    ],
)
def test_fits_of_another_system_are_marked(system, recipe, inherited):
    rates = rates_of("llama_3_1_70b", system=(system, recipe))
    assert rates.inherited is inherited
    assert any("inherited from" in taken.text for taken in rates.used) is inherited
    assert not rates_of("llama_3_1_70b", "ideal", system=(system, recipe)).inherited


def test_the_faster_of_two_expert_kernels_counts_at_every_point():
    """A kernel that starts sooner for few tokens, the fitted one, which is faster, for many."""
    at = setup("deepseek_r1", *GB200)
    rates, (fitted, *_) = at.rates, at.rates.moe["ep16_256"]
    kernels = (fitted, replace(fitted, t0=fitted.t0 / 4, bandwidth=fitted.bandwidth / 4))
    rates = replace(rates, moe={**rates.moe, "ep16_256": kernels})
    moved = np.array([1e6, 1e7, 1e8, 1e9, 1e10])
    operator = Operator("routed experts", "experts", Work(np.zeros(5), moved), "nvfp4")
    single = [replace(rates, moe={**rates.moe, "ep16_256": (kernel,)}) for kernel in kernels]
    together, *alone = (
        expert_cost(operator, np.full(5, 64.0), np.ones(5), replace(at, rates=r)).time for r in (rates, *single)
    )
    np.testing.assert_allclose(together, np.minimum(*alone), rtol=1e-12)
    assert np.any(alone[0] < alone[1])
    assert np.any(alone[1] < alone[0])


@pytest.mark.parametrize(
    ("ep", "tp_ffn", "regime"),
    [(1, 1, "single"), (1, 8, "tp"), (8, 2, "ep2_8"), (2, 1, "ep2_8"), (16, 1, "ep16_256"), (64, 1, "ep16_256")],
)
def test_regime_of_the_expert_kernel(ep, tp_ffn, regime):
    at = setup("mixtral_8x7b", "h100_sxm", "bf16")
    operator = Operator("routed experts", "experts", Work(0.0, 0.0), "bf16")
    cost = expert_cost(operator, np.float64(ep), np.float64(tp_ffn), at)
    assert float(cost.time) == min(rate.t0 for rate in at.rates.moe[regime])


def test_a_system_without_fits_has_only_the_ideal_profile():
    model = load_model("llama_3_1_70b")
    system = replace(load_system("h100_sxm"), name="new_gpu")
    recipe = resolve_precision("fp8", model, system)
    with pytest.raises(InputError, match="'new_gpu' has no fitted efficiencies: only profile 'ideal' can be used"):
        resolve_rates(model, system, recipe, load_profile("measured"), None)
    ideal = resolve_rates(model, system, recipe, load_profile("ideal"), None)
    assert ideal.gemm["fp8"].flops == system.peak_flops["fp8"]


def test_a_missing_fit_is_named():
    at = setup("llama_3_1_70b", "h100_sxm", "fp8")
    fits = replace(load_efficiency("h100_sxm"), gemm=())
    with pytest.raises(InputError, match=r"'h100_sxm' has no fitted .* GEMM: use profile 'ideal' or add the fit"):
        resolve_rates(at.model, at.system, at.precision, at.profile, fits)


def test_hidden_all_reduce_is_an_option_of_prefill():
    """A fraction of 0.3 takes 0.3 of the wire time of prefill's all-reduce off, and leaves decode alone."""
    at = setup("llama_3_1_70b", "h100_sxm", "fp8", engine="kernels")
    split = at.changed(profile=replace(at.profile, all_reduce_hidden_fraction=0.3))
    mapping = Sharding(tp_attn=4.0, tp_ffn=4.0)
    serial, hidden = (prefill_pass(one, mapping, batch=1.0, isl=8192.0) for one in (at, split))
    assert serial.ftl - hidden.ftl == pytest.approx(0.3 * serial.sums.communication, rel=1e-9)
    steps = [decode_step(one, mapping, batch=8.0, context=100.0).ttl for one in (at, split)]
    assert steps[0] == steps[1]


def test_bf16_attention_over_an_fp8_cache_keeps_the_memory_side_and_takes_the_arithmetic_of_bf16():
    """GB200, MLA, from its table of fits: decode 0.52 and prefill 0.584 of the bf16 peak, 0.658 of HBM."""
    at = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv_bf16_attention")
    rates, peak = at.rates, at.system.peak_flops["bf16"]
    assert rates.decode_attention["mla"].flops == pytest.approx(0.52 * peak)
    assert rates.decode_attention["mla"].bandwidth == pytest.approx(0.658 * at.system.hbm_bandwidth)
    assert rates.prefill_attention["mla"].flops == pytest.approx(0.584 * peak)


def test_a_changed_setup_is_the_setup_of_the_changed_names():
    """One place to change: rates that follow from a profile or a system are resolved again; an adjustment stays."""
    at = setup("deepseek_r1", *GB200, engine="kernels")
    hopeful = at.changed(profile=load_profile("optimistic"))
    assert repr(hopeful) == repr(setup("deepseek_r1", *GB200, "optimistic", "kernels"))
    fast = replace(at.system, hbm_bandwidth=2 * at.system.hbm_bandwidth)
    assert at.changed(system=fast).rates.elementwise_bandwidth == 2 * at.rates.elementwise_bandwidth
    twice = replace(at, rates=replace(at.rates, adjust=lambda _, cost: cost * 2.0))
    slow, slower = (
        decode_step(one.changed(profile=at.profile), Sharding(), batch=8.0, context=100.0) for one in (at, twice)
    )
    assert slower.ttl - at.profile.host == pytest.approx(2 * (slow.ttl - at.profile.host))
    engine = load_engine("vllm")
    assert at.changed(overheads=engine).overheads is engine
