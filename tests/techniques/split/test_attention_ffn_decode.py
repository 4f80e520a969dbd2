"""Decode over attention and feed-forward GPUs in simulations: analytic = simulated, its limits, and what is refused."""

from dataclasses import replace

import pytest

import disagg_sim as ds
from disagg_sim.certainty.pool_parts import split_spent
from disagg_sim.cli.main import run as command
from disagg_sim.domain import Slo
from disagg_sim.errors import InfeasibleError, InputError, PolicyError
from disagg_sim.physics.kv_transfer import unique_gpus
from disagg_sim.physics.power import power_at
from disagg_sim.planning.run_energy import run_energy
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.instance_variants import FfnPool, placed
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.physical_site import physical_site
from disagg_sim.simulation.policies.fixed import Disaggregated
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.wishes import Flip, Limits, Role
from disagg_sim.techniques.split import physics as split_physics
from disagg_sim.techniques.split.physics import Split, split_step
from disagg_sim.techniques.split.search import ffn_mapping

BOUND, SLO = 0.02, Slo(ttft=100.0, tpot=10.0)
#: Model, system, recipe; TP and DP of attention, GPUs of the feed-forward part, micro-batches; sequences of one.
SPLITS = {
    "r1": ("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", (1, 8), 16, 3, 16),
    "r1_over_nics": ("deepseek_r1", "h200_sxm", "fp8", (1, 8), 16, 2, 8),
    "qwen": ("qwen3_5_35b_a3b", "h200_sxm", "fp8", (2, 2), 4, 2, 8),
    "dense": ("llama_3_1_70b", "h200_sxm", "fp8", (2, 1), 4, 2, 8),
}


def pools(name):
    """Setup, attention mapping, feed-forward pool, and sequences of an instance."""
    model, system, precision, (tp, dp), gpus, micro, each = SPLITS[name]
    at = ds.setup(model, system, precision)
    attention = ds.Sharding(tp_attn=tp, dp_attn=dp, tp_ffn=tp, ep=dp)
    return at, attention, FfnPool(mapping=ffn_mapping(at, gpus), microbatches=micro), each * dp * micro


def analytic(at, attention, ffn, batch, context):
    """TTL of sequences that all micro-batches share evenly. [s]"""
    sequences = batch / int(attention.dp_attn) / ffn.microbatches
    split = Split(attention, ffn.mapping, ffn.microbatches)
    return float(split_step(at, ffn.setup or at, split, sequences=sequences, context=context).ttl)


@pytest.mark.parametrize("name", SPLITS)
def test_a_step_is_that_of_the_analytic_model_at_each_batch_and_length(name):
    at, attention, ffn, most = pools(name)
    table = StepTable.build(at, placed(attention, None, ffn), max_sequences=most)
    for batch in range(most // 8, most + 1, most // 8):
        for context in (100.0, 1500.0, 5000.0, 60_000.0):
            exact = analytic(at, attention, ffn, batch, context)
            assert table.step_time(batch, context) == pytest.approx(exact, rel=BOUND / 2)


def test_fewer_sequences_than_micro_batches_are_as_many_micro_batches():
    at, attention, ffn, _ = pools("r1")
    table = StepTable.build(at, placed(attention, None, ffn), max_sequences=64)
    for each in (1, 2):
        exact = analytic(at, attention, replace(ffn, microbatches=each), 8 * each, 1500.0)
        assert table.step_time(8 * each, 1500.0) == pytest.approx(exact, rel=BOUND / 2)


def deployment(name, senders, *, seats=None, decode=None):
    at, attention, ffn, batch = pools(name)
    prefill = ds.Sharding(dp_attn=8, ep=8) if at.model.is_moe else ds.Sharding(tp_attn=2, tp_ffn=2)
    parts = {
        "prefill": (Replicas(mapping=prefill, instances=senders),),
        "decode": decode or (Replicas(mapping=attention, instances=1, batch=seats or batch, ffn=ffn),),
    }
    gpus = sum(each.gpus for entries in parts.values() for each in entries)
    return ServedDeployment(name="split", gpus=gpus, setup=at, **parts)


def test_one_micro_batch_over_free_links_is_plain_decode(monkeypatch):
    """A dense model whose halves wait for each other, its crossings free: the steps of one GPU that does both."""
    monkeypatch.setattr(split_physics, "crossing_time", lambda *_: 0.0)
    at, one = ds.setup("llama_3_1_8b", "h100_sxm", "fp8", profile="ideal"), ds.Sharding()
    ffn = FfnPool(mapping=ffn_mapping(at, 1), microbatches=1)
    plain, split = (StepTable.build(at, each, max_sequences=64) for each in (one, placed(one, None, ffn)))
    for batch in (1, 7, 64):
        for context in (10.0, 3000.0, 50_000.0):
            assert split.step_time(batch, context) == pytest.approx(plain.step_time(batch, context), rel=1e-6)


def test_caches_go_to_attention_gpus_and_fill_their_memory():
    at, attention, *_ = pools("r1")
    served = deployment("r1", 1)
    trace = ds.Trace(arrival=[0.0], input_tokens=[4096], output_tokens=[512])
    site = physical_site(trace, served, at=at, slo=SLO, seed=0, options=RunOptions())
    mapping = served.decode[0].mapping
    assert site.instance_bandwidth(mapping) == site.link_bandwidth * float(unique_gpus(at.model, attention))
    law = ds.lengths(4096, 512)
    grid = ds.split_grid(at, law, max_gpus=24, microbatches=(3,))
    row = next(i for i, (a, f) in enumerate(zip(grid.attention_gpus, grid.ffn_gpus, strict=True)) if (a, f) == (8, 16))
    most = int(grid.batch[row][grid.feasible[row]].max())
    assert grid.feasible[:, -1].any()  # no batch is timed that no split holds
    limits = Limits(max_sequences=4 * most, token_budget=4 * most)
    held = site.blocks(mapping, limits) * 16
    assert most * law.context <= held < 1.5 * most * law.context  # sizes of a grid are a fifth apart
    plain = site.blocks(ds.Sharding(dp_attn=8, ep=8), limits) * 16
    assert held > 1.2 * plain  # experts lie elsewhere


def test_what_cannot_be_split_is_one_line():
    at, attention, ffn, _ = pools("r1")
    part = Replicas(mapping=attention, instances=1, ffn=ffn)
    with pytest.raises(InputError, match="prefill has instances with ffn; allowed: in decode"):
        ServedDeployment(name="x", gpus=99, setup=at, prefill=(part,))
    trace = ds.synthetic_trace(rate=1.0, requests=4, lengths=(1024, 8))
    with pytest.raises(InputError, match="tp and dp alone, not pp 2"):
        ds.simulate(deployment("r1", 1, decode=(replace(part, mapping=replace(attention, pp=2)),)), trace, slo=SLO)
    odd = (replace(part, ffn=FfnPool(mapping=ds.Sharding(tp_attn=8, tp_ffn=8))),)
    with pytest.raises(InputError, match="no feed-forward part of deepseek_r1; allowed: EP over all GPUs"):
        ds.simulate(deployment("r1", 1, decode=odd), trace, slo=SLO)
    drafting = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", speculation="mtp 0.8")
    with pytest.raises(InputError, match="have no drafts"):
        ds.simulate(replace(deployment("r1", 1), setup=drafting), trace, slo=SLO)
    with pytest.raises(InputError, match="have no drafts"):
        ds.split_grid(drafting, ds.lengths(1024, 64))
    small = (replace(part, ffn=FfnPool(mapping=ffn_mapping(at, 1))),)
    with pytest.raises(InfeasibleError, match="feed-forward part of deepseek_r1"):
        ds.simulate(deployment("r1", 1, decode=small), trace, slo=SLO)


def test_policies_that_change_roles_are_refused_the_change():
    pytest.importorskip("numba")

    class Flipping(Disaggregated):
        """Changes the role of instance 1 at its first look."""

        period_s = 0.1

        def build(self, site):
            return replace(Disaggregated.build(self, site), roles=self)

        def flips(self, _view):
            return [Flip(instance=1, role=Role.PREFILL, reason="more prompts")]

    trace = ds.synthetic_trace(rate=10.0, requests=20, lengths=(1024, 64))
    with pytest.raises(PolicyError, match="attention and feed-forward GPUs decode alone"):
        ds.simulate(deployment("dense", 1), trace, Flipping(), slo=SLO)


def test_a_split_instance_draws_what_its_halves_do():
    """One request at a time in two micro-batches: half a sequence in each; two GPUs of attention, four of FFN."""
    pytest.importorskip("numba")
    served = deployment("dense", 1)
    found = ds.simulate(served, ds.synthetic_trace(rate=0.1, requests=4, lengths=(1024, 64)), slo=SLO)
    row = run_energy(found).set_index("role").loc["decode"]
    at, attention, ffn, _ = pools("dense")
    spent = split_spent(at, at, Split(attention, ffn.mapping, ffn.microbatches), ds.lengths(1024, 64), 0.5)
    watts = sum(count * one.joules / one.seconds for count, one in zip((2, 4), spent, strict=True))
    assert row["gpus"] == 6
    assert (row["joules"] - row["waiting_joules"]) / row["busy_s"] == pytest.approx(watts)
    assert row["waiting_joules"] == pytest.approx(6 * power_at(at).idle * (row["held_s"] - row["busy_s"]))
    assert 6 * power_at(at).idle < watts < 6 * at.system.tdp


SCENARIO = """
{name: split, model: llama_3_1_70b, system: h200_sxm, precision: fp8, slo: {ttft_s: 9, tpot_s: 1},
 trace: {kind: synthetic, name: even, lengths: {isl: 1024, osl: 16}, rate_per_s: 4, requests: 20},
 policies: [disaggregated],
 deployments: {one: {prefill: {tp: 2}, decode: {tp: 2, batch: 8, FFN}}}}
"""
FFN = "ffn: {gpus: 4, tp: 2, microbatches: 3, system: h100_sxm}"


def test_a_scenario_splits_decode(tmp_path, capsys):
    pytest.importorskip("numba")
    (tmp_path / "s.yaml").write_text(SCENARIO.replace("FFN", FFN))
    assert command(["simulate", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert "disaggregated" in capsys.readouterr().out
    scenario = load_scenario(str(tmp_path / "s.yaml"))
    (served,) = scenario.deployments
    ffn = served.decode[0].ffn
    assert (served.gpus, ffn.mapping.gpus, ffn.mapping.tp_attn, ffn.microbatches) == (8, 4, 2, 3)
    assert ffn.setup.system.name == "h100_sxm"
