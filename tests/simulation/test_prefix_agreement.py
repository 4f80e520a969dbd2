"""With a cached share of every prompt, constant lengths and a full queue, the simulation meets the analytic model."""

import numpy as np
import pytest
from test_analytic_agreement import BOUND, full_queue, rate, steady

from disagg_sim.domain import Sharding, Slo
from disagg_sim.physics.passes.prompts import prompt_pass
from disagg_sim.physics.setup import setup
from disagg_sim.search.grid import prefill_grid
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.run import run
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.lengths import lengths
from disagg_sim.workload.request_columns import PrefixBlocks
from disagg_sim.workload.trace import Trace

BLOCK = 16
DEPLOYMENTS = {
    "llama_tp4": ("llama_3_1_70b", "h100_sxm", "fp8", {"tp_attn": 4, "tp_ffn": 4}, 8192, 481, 32),
    "deepseek_tep8": ("deepseek_r1", "h200_sxm", "fp8", {"tp_attn": 8, "ep": 8}, 16_384, 513, 32),
}


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def deployment(request):
    model, system, precision, mapping, isl, osl, batch = DEPLOYMENTS[request.param]
    at, mapping = setup(model, system, precision), Sharding(**mapping)
    return at, mapping, isl, osl, batch, StepTable.build(at, mapping)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_prefill_pool(deployment, share):
    at, mapping, isl, osl, _, table = deployment
    found = lengths(isl, osl, cached=share)
    past = int(found.cached.mean_past)
    exact = prompt_pass(at, mapping, batch=2.0, isl=isl, past=past, chunk_tokens=0)
    spec = InstanceSpec(table=table, blocks=10**6, mode=Mode.PREFILL_FIRST, token_budget=10**6, max_prompts=2)
    segments, rows = steady(full_queue(spec, (0, isl, 1), residents=0, requests=60, waiting=16, cached=past), 0)
    latency = segments.first_token_s[rows] - segments.start_s[rows]
    assert np.mean(latency) == pytest.approx(float(exact.ftl), rel=BOUND)
    assert rate(np.unique(segments.finish_s[rows])) == pytest.approx(1 / float(exact.busy), rel=BOUND)


def test_a_prefix_cache_of_a_run_is_the_cached_share_of_the_grid():
    """All prompts begin with the same 90 %: a prefill instance that remembers it serves the rate of the grid."""
    at, mapping, isl = setup("llama_3_1_70b", "h100_sxm", "fp8"), Sharding(tp_attn=4, tp_ffn=4), 8192
    found = lengths(isl, 2, cached=0.9)
    past, requests = int(found.cached.mean_past), 240
    exact = prefill_grid(at, mapping, found, batch=[1])
    shared, own = past // BLOCK, (isl - past) // BLOCK
    ids = [[*range(shared), *range(shared + place * own, shared + (place + 1) * own)] for place in range(requests)]
    blocks = PrefixBlocks(offsets=np.arange(requests + 1) * (shared + own), ids=np.ravel(ids), block_tokens=BLOCK)
    trace = Trace(
        arrival=np.zeros(requests),
        input_tokens=np.full(requests, isl),
        output_tokens=np.full(requests, 2),
        prefix=blocks,
    )
    pools = {
        "prefill": (Replicas(mapping=mapping, instances=1, batch=1),),
        "decode": (Replicas(mapping=mapping, instances=1),),
    }
    served = ServedDeployment(name="pools", gpus=8, **pools)
    options = RunOptions(concurrency=64, prefix_cache_tokens=4 * isl)
    done = run(trace, served, "disaggregated", at=at, slo=Slo(ttft=10.0, tpot=1.0), options=options).requests
    ends = np.sort(done.prefill_end_s)[40:]
    assert rate(ends) == pytest.approx(float(exact.request_rate[0, 0]), rel=BOUND)
