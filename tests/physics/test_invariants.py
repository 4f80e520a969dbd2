"""What must hold at every point, whatever the model, system, profile and mapping."""

from dataclasses import replace

import numpy as np
import pytest
from cases import cached_setting, cases, scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.facts.efficiency import SECTIONS
from disagg_sim.facts.load import load_efficiency
from disagg_sim.facts.schema import units_of
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.rates import resolve_rates
from disagg_sim.physics.roofline import blend
from disagg_sim.physics.setup import Setup

quick = settings(max_examples=100)
batches = st.integers(1, 3000)
lengths = st.integers(1, 100_000)
CLOSE = 1 + 1e-12  # rounding of sums taken in another order


def ttl_of(at: Setup, mapping: Sharding, batch: float, context: float) -> float:
    return float(decode_step(at, mapping, batch=float(batch), context=float(context)).ttl)


def ftl_of(at: Setup, mapping: Sharding, batch: float, isl: float, chunk: int = 0) -> float:
    args = at, mapping
    if chunk:
        done = chunked_prefill_pass(*args, batch=float(batch), isl=float(isl), chunk_tokens=float(chunk))
    else:
        done = prefill_pass(*args, batch=float(batch), isl=float(isl))
    return float(done.ftl)


@quick
@given(cases(), batches, batches, lengths, lengths)
def test_ttl_never_falls_as_batch_or_context_grows(case, batch, more, context, longer):
    at, mapping = case
    base = ttl_of(at, mapping, batch, context)
    assert base <= ttl_of(at, mapping, batch + more, context) * CLOSE
    assert base <= ttl_of(at, mapping, batch, context + longer) * CLOSE


@quick
@given(cases(), st.integers(1, 64), st.integers(1, 64), lengths, lengths)
def test_ftl_never_falls_as_batch_or_prompt_grows(case, batch, more, isl, longer):
    at, mapping = case
    base = ftl_of(at, mapping, batch, isl)
    assert base <= ftl_of(at, mapping, batch + more, isl) * CLOSE
    assert base <= ftl_of(at, mapping, batch, isl + longer) * CLOSE


@quick
@given(
    cases(),
    st.sampled_from(["hbm_bandwidth", "nvlink_bandwidth", "nic_bandwidth", "peak_flops"]),
    st.floats(1.0, 10.0),
    batches,
    st.integers(1, 30_000),
)
def test_faster_hardware_is_never_slower(case, what, factor, batch, length):
    at, mapping = case
    faster = at.changed(system=scaled(at.system, what, factor))
    prompts = 1 + batch % 32
    assert ttl_of(faster, mapping, batch, length) <= ttl_of(at, mapping, batch, length) * CLOSE
    assert ftl_of(faster, mapping, prompts, length) <= ftl_of(at, mapping, prompts, length) * CLOSE
    in_chunks = [ftl_of(one, mapping, prompts, 4000, 512) for one in (faster, at)]
    assert in_chunks[0] <= in_chunks[1] * CLOSE


@quick
@given(cases(profiles=("measured",)), batches, st.integers(1, 30_000))
def test_nothing_beats_the_speed_of_light(case, batch, length):
    """``ideal`` is below the others at every point: no fitted efficiency passes 1 of the arithmetic it counts."""
    at, mapping = case
    prompts = 1 + batch % 32
    for profile in ("optimistic", "measured"):
        slow, fast = of_profile(at, profile), of_profile(at, "ideal")
        assert ttl_of(fast, mapping, batch, length) <= ttl_of(slow, mapping, batch, length) * CLOSE
        assert ftl_of(fast, mapping, prompts, length) <= ftl_of(slow, mapping, prompts, length) * CLOSE


def of_profile(at: Setup, profile: str) -> Setup:
    return cached_setting(at.model.name, at.system.name, profile)


@quick
@given(cases(), batches, lengths)
def test_one_gpu_does_not_communicate(case, batch, length):
    at, _ = case
    for sums in (
        decode_step(at, Sharding(), batch=float(batch), context=float(length)).sums,
        prefill_pass(at, Sharding(), batch=1.0, isl=float(length)).sums,
        chunked_prefill_pass(at, Sharding(), batch=1.0, isl=3000.0, chunk_tokens=512.0).sums,
    ):
        assert float(sums.communication) == 0.0


@quick
@given(cases(), st.integers(1, 2000), lengths)
def test_pipelines_never_lower_ttl_below_the_unsharded_sum(case, batch, context):
    at, mapping = case
    flat = replace(mapping, pp=1)
    micro = -(-batch // min(mapping.pp, batch))
    assert ttl_of(at, mapping, batch, context) >= ttl_of(at, flat, micro, context) / CLOSE


@quick
@given(cases(), st.integers(256, 4000), st.integers(2, 8))
def test_mixed_steps_without_decodes_are_a_prompt_in_chunks(case, chunk, chunks):
    """A mixed step stands for the mean chunk; in the chunked pass of bare kernels host is paid once.

    The ramp of the attention kernel and the maximum of its compute and memory time are not quite
    affine in the past: 1 %.
    """
    at = replace(case[0], overheads=None)
    args, isl, form = (at, Sharding()), float(chunks * chunk), "cached"
    step = mixed_step(*args, batch=0.0, context=1.0, chunk=Chunk(float(chunk), isl), mla_form=form)
    whole = chunked_prefill_pass(*args, batch=1.0, isl=isl, chunk_tokens=float(chunk), mla_form=form)
    ends = (chunks - 1) * at.profile.host
    assert chunks * float(step.time) - ends == pytest.approx(float(whole.ftl), rel=0.01)


PROFILE_TIMES = (
    *("gemm_t0", "gemm_t0_cap_static_scales", "attention_t0", "moe_t0", "all_reduce_latency", "all_to_all_latency"),
    *("elementwise_latency", "host", "p2p_latency_inside", "p2p_latency_across", "nic_latency"),
    "all_reduce_step_latency",
)


UNITS = {section: units_of(kind) for section, kind in SECTIONS.items()}


def in_another_unit(section: str, row, c: float):
    """A fit with its times divided by ``c`` and its rates multiplied."""
    factors = {"s": 1.0 / c, "B/s": c}
    return replace(
        row,
        **{
            name: getattr(row, name) * factors[unit]
            for name, unit in UNITS[section].items()
            if unit and getattr(row, name) is not None
        },
    )


@settings(max_examples=100)
@given(cases(), st.sampled_from([1e-3, 60.0, 4.0]), st.integers(1, 500), st.integers(2, 30_000))
def test_changing_the_unit_of_time_scales_every_time(case, c, batch, length):
    """Rates times c and latencies over c: every time is divided by c, or a second has slipped into a formula."""
    at, mapping = replace(case[0], overheads=None), case[1]
    system = at.system
    for what in ("peak_flops", "hbm_bandwidth", "nvlink_bandwidth", "nic_bandwidth"):
        system = scaled(system, what, c)
    profile = replace(
        at.profile,
        **{name: getattr(at.profile, name) / c for name in PROFILE_TIMES if getattr(at.profile, name) is not None},
    )
    fits = load_efficiency(at.system.name)
    tables = {name: tuple(in_another_unit(name, row, c) for row in getattr(fits, name)) for name in SECTIONS}
    rates = resolve_rates(at.model, system, at.precision, profile, replace(fits, **tables))
    there = replace(at, system=system, profile=profile, rates=rates)
    prompts = 1 + batch % 8
    assert ttl_of(there, mapping, batch, length) == pytest.approx(ttl_of(at, mapping, batch, length) / c, rel=1e-9)
    for chunk in (0, 512):
        both = [ftl_of(one, mapping, prompts, min(length, 9000), chunk) for one in (there, at)]
        assert both[0] == pytest.approx(both[1] / c, rel=1e-9)


@pytest.mark.parametrize("q", [1.0, 2.0, 3.7, np.inf])
def test_blend_lies_between_maximum_and_sum(q):
    for compute, memory in ((1.0, 2.0), (0.0, 3.0), (5.0, 5.0)):
        both = blend(compute, memory, q)
        assert max(compute, memory) / CLOSE <= both <= (compute + memory) * CLOSE
        assert float(blend(compute, memory, np.array([q]))[0]) == pytest.approx(float(both), rel=1e-12)
