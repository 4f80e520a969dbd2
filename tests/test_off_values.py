"""Off is off: each feature at the value that means nothing leaves sweeps, plans and simulations as they are, to a byte.

A row names the feature and says its off-value; all rows are held against one plain run of the same sweep, plan or
simulation.
"""

from dataclasses import replace
from functools import cache
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import disagg_sim as ds
from disagg_sim.cli import plan as command
from disagg_sim.cli.main import app
from disagg_sim.facts.load import load_profile
from disagg_sim.planning.flips import Changes
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.techniques.availability.play import Failures
from disagg_sim.workload.request_columns import PrefixBlocks

SWEEP = """name: plain
models: mixtral_8x7b
systems: {h200_sxm: fp8}
traffic: [{isl: 2048, osl: 256}]
modes: [disaggregated, colocated, piggyback]
limits: {max_gpus: 4, gpu_cap: 16}
"""
#: Feature -> what its off-value adds to the plain sweep, or what it stands in place of.
SWEEPS = {
    "no drafter": ("", "speculation: none\n"),
    "0 drafts": ("", "speculation: mtp 0.8 0.6\ndraft_tokens: 0\n"),
    "nothing cached": ("osl: 256", "osl: 256, cached: 0"),
    "even ranks": ("", "rank_imbalance: even\n"),
    "experts of one popularity": ("", "expert_skew: 0\n"),
    "no copies of experts": ("gpu_cap: 16", "gpu_cap: 16, max_redundant_experts: 0"),
    "no shared tokens": ("gpu_cap: 16", "gpu_cap: 16, max_dcp: 1, max_pcp: 1"),
    "no limit of the link": ("gpu_cap: 16", "gpu_cap: 16, nic_gb_per_s: none"),
    "two pools": ("", "pools: [prefill, decode]\n"),
    "no link": ("", "kv_link: none\n"),
    "descriptors that cost nothing": ("", "kv_link: {descriptor_us: 0}\n"),
    "no spares": ("", "availability: none\n"),
    "throughput over GPUs": ("", "per: gpu\n"),
}
TABLES = ("frontier.csv", "infeasible.csv")


@cache
def swept(folder, text):
    (folder / "plain.yaml").write_text(text)
    out = folder / "out"
    run_sweep(plan_sweep(load_sweep(str(folder / "plain.yaml"))), out, jobs=1, listener=Mock(), overwrite=True)
    return [(out / name).read_bytes() for name in TABLES]


@pytest.fixture(scope="module")
def plain_sweep(tmp_path_factory):
    return swept(tmp_path_factory.mktemp("plain"), SWEEP)


@pytest.mark.parametrize("feature", SWEEPS)
def test_a_sweep_is_as_without_the_key(feature, plain_sweep, tmp_path):
    old, new = SWEEPS[feature]
    text = SWEEP.replace(old, new) if old else SWEEP + new
    assert text != SWEEP
    assert len(plain_sweep[0]) > 10_000
    assert swept(tmp_path, text) == plain_sweep


PLAN = ("plan", "--model", "mixtral_8x7b", "--system", "h200_sxm", "--isl", "2048", "--osl", "256", "--rate", "40")
#: Feature -> options of ``plan`` at their off-value.
PLANS = {
    "drafts, caches, ranks, experts of one popularity, no copies, no shared tokens, two pools, failure rates alone": (
        *("--speculate", "off", "--cached", "0", "--rank-imbalance", "even"),
        *("--expert-skew", "0", "--max-redundant-experts", "0", "--max-dcp", "1", "--max-pcp", "1"),
        *("--pools", "prefill,decode", "--failures", "llama_3_405b"),
    ),
    "0 drafts": ("--speculate", "0", "--acceptance", "mtp 0.8 0.6"),
}


@cache
def planned(*more):
    """What is printed, without what would change the answer: other plans, by the same options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "changes_of", lambda _: Changes(flips=(), limits=(), aside=None))
        return CliRunner().invoke(app, [*PLAN, *more]).stdout


@pytest.mark.parametrize("feature", PLANS)
def test_a_plan_is_as_without_the_option(feature):
    assert "GPUs serve" in planned()
    assert planned(*PLANS[feature]) == planned()


def of_replicas(at):
    prefill = Replicas(mapping=ds.Sharding(tp_attn=2, ep=2), instances=2, batch=2, token_budget=8192)
    decode = Replicas(mapping=ds.Sharding(dp_attn=2, ep=2), instances=2, batch=64)
    return ServedDeployment(name="small", gpus=8, prefill=(prefill,), decode=(decode,), setup=at)


#: Feature -> what its off-value changes of the setup, and of the options of the run.
RUNS = {
    "plain": (None, RunOptions()),
    "no failures": (None, RunOptions(failures=Failures())),
    "descriptors that cost nothing": (None, RunOptions(link=LinkSpec(descriptor_s=0.0))),
    "a spine with all its uplinks": (None, RunOptions(link=LinkSpec(spine_oversubscription=1.0))),
    "a system without leaf switches": (
        lambda at: at.changed(system=replace(at.system, leaf_gpus=None, spine_oversubscription=None)),
        RunOptions(),
    ),
    "experts of one popularity": (lambda at: at.changed(profile=load_profile("ideal_skew0")), RunOptions()),
}


@cache
def simulated(changed, options):
    at = ds.setup("mixtral_8x7b", "h200_sxm", "fp8", profile="ideal")
    trace = ds.synthetic_trace(rate=30.0, requests=300, lengths=(1500, 60), seed=3)
    blocks = PrefixBlocks(offsets=3 * np.arange(301), ids=np.arange(900), block_tokens=512)  # no two prompts alike
    trace = replace(trace, prefix=blocks)
    return ds.simulate(of_replicas(at if changed is None else changed(at)), trace, options=options).frame()


@pytest.mark.parametrize("feature", RUNS)
def test_a_simulation_is_as_without_the_option(feature):
    pytest.importorskip("numba")
    found, plain = (simulated(*RUNS[each]).to_csv(float_format="%.17g") for each in (feature, "plain"))
    assert len(plain) > 10_000
    assert found == plain


@pytest.mark.parametrize("tiers", [(), ("dram", "ssd")])
def test_caches_in_which_nothing_is_found_move_no_time(tiers):
    """These are on, and count blocks in another order: times differ by rounding alone."""
    pytest.importorskip("numba")
    found, plain = simulated(None, RunOptions(prefix_cache=True, tiers=tiers)), simulated(*RUNS["plain"])
    assert not found["cached_tokens"].any()
    pd.testing.assert_frame_equal(found[[*plain]], plain, rtol=0, atol=1e-12)
