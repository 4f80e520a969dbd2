"""Power of kernels: what a GPU draws between waiting and its limit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_power
from disagg_sim.facts.power import PowerLaw
from disagg_sim.physics.blocks.sparse import part_operator
from disagg_sim.physics.cost import kernel_cost
from disagg_sim.physics.power import class_of, kernel_power, power_at, watts_of
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import AttentionShape, Work, all_reduce, gemm

FIT = {"engine": "vllm", "version": "1", "points": 1, "median_error": 0.0, "p90_error": 0.0}
LAWS = [law for name in ("h200_sxm", "b200_sxm", "gb200_nvl72") for law in load_power(name).laws]
SHARE = st.floats(0.0, 2.0)
TIME = st.floats(1e-7, 1.0)


def law(**numbers):
    return PowerLaw(kind="gemm", form="bf16", **FIT, **({"base": 0.0} | numbers))


def test_a_kernel_far_below_the_limit_draws_what_its_parts_draw():
    # 0.1 + 0.4*0.5 + 0.2*0.25^0.5 = 0.4 above 0.2 of waiting: bent by 1/(1 + (0.4/0.8)^4)^(1/4) = 0.98496
    half = law(base=0.1, compute=0.4, memory=0.2, memory_power=0.5)
    assert kernel_power(half, compute=0.5, memory=0.25, time=1.0, idle=0.2) == pytest.approx(
        0.2 + 0.4 * 0.98496, rel=1e-5
    )


def test_gaps_as_long_as_a_kernel_take_half_of_what_it_draws_above_waiting():
    some = law(base=0.1, gap=20e-6)
    short, long = kernel_power(some, compute=0.0, memory=0.0, time=np.array([20e-6, 1.0]), idle=0.0)
    assert short == pytest.approx(0.05, rel=1e-4)
    assert long == pytest.approx(0.1, rel=1e-4)


def test_the_limit_binds_where_a_kernel_would_draw_more():
    assert kernel_power(law(compute=100.0), compute=1.0, memory=0.0, time=1.0, idle=0.2) == pytest.approx(1.0, rel=1e-6)


def test_a_kernel_that_draws_nothing_is_a_gpu_that_waits():
    assert kernel_power(law(), compute=1.0, memory=1.0, time=1.0, idle=0.19) == 0.19


@settings(max_examples=60)
@given(st.sampled_from(LAWS), SHARE, SHARE, TIME, st.floats(0.05, 0.5))
def test_power_is_between_waiting_and_the_limit(one, compute, memory, time, idle):
    drawn = kernel_power(one, compute=compute, memory=memory, time=time, idle=idle)
    assert idle <= drawn <= 1.0 + 1e-12


def test_a_large_multiply_is_at_the_limit_and_a_small_one_is_not():
    at = setup("llama_3_1_70b", "h200_sxm", "bf16")
    sizes = np.array([1.0, 8192.0])
    op = gemm("gate, up", sizes, 8192.0, 8192.0, at.precision.ffn)
    small, large = watts_of(at)(op, kernel_cost(op, at))
    assert power_at(at).idle < small < 600
    assert 680 < large <= 700


def test_a_transfer_draws_more_the_longer_its_message_is():
    at = setup("llama_3_1_70b", "h200_sxm", "bf16")
    op = all_reduce("all-reduce", np.array([1.0, 1e5]), at.model, at.precision, 8.0)
    short, long = watts_of(at)(op, kernel_cost(op, at))
    assert power_at(at).idle <= short < long < 700.0


def test_parts_of_attention_draw_by_the_law_of_their_kernel():
    """An index of sparse attention as scores do, not as a GPU that waits."""
    at, shape = setup("deepseek_v3_2", "h200_sxm", "fp8"), AttentionShape(64.0, 1.0, 65_535.0, 1.0, 1.0, 0.0)
    op = part_operator("index", "dsa index_step", Work(1e12, 8e9), shape)
    assert class_of(op) == ("attention_part", "index_step")
    assert power_at(at).idle < watts_of(at)(op, kernel_cost(op, at)) < 700.0


def test_systems_without_measurements_draw_the_share_of_their_own_tdp():
    h200, h100_nvl = (setup("llama_3_1_8b", name, "bf16") for name in ("h200_sxm", "h100_nvl"))
    assert power_at(h100_nvl).spec.inherited
    assert power_at(h100_nvl).idle / 400.0 == pytest.approx(power_at(h200).idle / 700.0)
    # a median error of 26 % of another system's laws: 1.2816 / 0.6745 of it with a probability of 80 %
    assert power_at(h100_nvl).factor == pytest.approx(1.639, abs=1e-3)


def test_a_system_without_a_power_file_is_told_in_one_line():
    at = setup("llama_3_1_8b", "h200_sxm", "bf16")
    with pytest.raises(InputError, match="the power of 'mine' is not known: hw_specs/power/ has no file of it"):
        power_at(replace(at, system=replace(at.system, name="mine")))
