"""DistServe's placement search."""

import itertools

import numpy as np
import pytest
from sites import small_setting

from disagg_sim.domain import Mapping, Slo
from disagg_sim.errors import InfeasibleError
from disagg_sim.simulation.kernel.fleet import InstanceSpec
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.placement import distserve_placement, phase_goodput
from disagg_sim.workload.trace import Trace

EVEN = Trace(arrival=np.arange(50.0), input_tokens=np.full(50, 100), output_tokens=np.full(50, 11))


def test_evenly_spaced_prompts_fill_an_instance_to_its_service_rate():
    """A pass takes 0.1 s; at 10 requests/s nobody waits, above that the wait grows without bound."""
    spec = InstanceSpec(table=StepTable.affine(per_token=0.001), blocks=1000, mode=Mode.ONE_PROMPT)
    rate = phase_goodput(EVEN, spec, phase="prefill", slo=Slo(ttft=0.101, tpot=1.0), share=0.9)
    assert rate == pytest.approx(10.0, rel=0.06)


def test_a_decode_limit_bounds_the_batch():
    """Steps of 10 ms a sequence: a TPOT of 40 ms allows 4, of 10 steps each: 4 in 0.4 s."""
    spec = InstanceSpec(table=StepTable.affine(per_sequence=0.010), blocks=1000)
    rate = phase_goodput(EVEN, spec, phase="decode", slo=Slo(ttft=1.0, tpot=0.040), share=0.9)
    assert rate == pytest.approx(10.0, rel=0.06)


def test_the_counts_are_the_best_of_all():
    placement = distserve_placement(
        EVEN,
        setting=small_setting(),
        slo=Slo(ttft=0.2, tpot=0.01),
        gpus=4,
        mappings=[Mapping(), Mapping(tp_attn=2, tp_ffn=2)],
    )
    rates = [
        min(n_p * p.requests_per_s, n_d * d.requests_per_s)
        for p, d in itertools.product(placement.prefill, placement.decode)
        for n_p, n_d in itertools.product(range(1, 4), repeat=2)
        if n_p * p.mapping.gpus + n_d * d.mapping.gpus <= 4
    ]
    assert placement.requests_per_s == pytest.approx(max(rates))
    deployment = placement.deployment
    assert deployment.gpus_of("prefill", "decode") <= deployment.gpus == 4


def test_limits_that_nothing_meets_are_named():
    with pytest.raises(InfeasibleError, match=r"no placement of .* meets TTFT 1e-06 s and TPOT 1 s for 90%"):
        distserve_placement(EVEN, setting=small_setting(), slo=Slo(ttft=1e-6, tpot=1.0), gpus=2, mappings=[Mapping()])
