"""Plans whose hit rate follows from what the planned GPUs remember, and what decode holds of a prompt."""

from dataclasses import replace

import pytest

import disagg_sim as ds
from disagg_sim.cli.plan_inputs import memory_of
from disagg_sim.errors import InputError
from disagg_sim.facts.hardware import KvTier
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.planning.plan import _alike, plan_turns
from disagg_sim.planning.prove import prove
from disagg_sim.planning.question import PlanOptions
from disagg_sim.techniques.prefix.search import GpuCaches
from disagg_sim.workload.turns import mean_turns, turn_lengths


def planned(memory):
    def of(lengths):
        options = PlanOptions(set_aside=memory.hbm)
        return ds.plan("llama_3_1_8b", "h200_sxm", lengths, ttft="4 s", tpot="40 ms", rate=40, options=options)

    return plan_turns("coding_agent", memory, of)


def test_what_turns_find_is_what_the_planned_instances_remember():
    """8 GB of HBM a GPU hold 122,000 tokens of 65,536 B; 40 turns a second are 3.4 sessions."""
    small, large = planned(GpuCaches(hbm=8e9)), planned(GpuCaches(hbm=8e9, tiers=("dram",)))
    for found in (small, large):
        pool = found.plan.best.pools[0]
        assert found.caches.caches == pool.instances
        assert dict(found.caches.rooms)["hbm"] == pytest.approx(pool.mapping.gpus * 8e9 / 65_536, rel=1e-3)
        assert found.caches.sessions_per_s == pytest.approx(40 / mean_turns("coding_agent"))
        assert turn_lengths("coding_agent", found.caches).mean_new == pytest.approx(found.lengths.mean_new, rel=0.02)
        assert pool.setup.memory_limit == ds.setup("llama_3_1_8b", "h200_sxm", "fp8").memory_limit - 8e9
    assert large.plan.best.gpus < small.plan.best.gpus


def test_prompts_are_remembered_where_they_are_prefilled():
    """12 prefill instances of one GPU keep prompts, not the two decode instances of two GPUs."""
    plan = ds.plan("llama_3_1_70b", "h200_sxm", ds.lengths(4096, 512), rate=20)
    prefill, decode = plan.best.pools
    assert prefill.instances != decode.instances
    memory = GpuCaches(hbm=8e9)
    found = plan_turns("coding_agent", memory, lambda _: plan).caches
    assert found.caches == prefill.instances
    bytes_of_token = 80 * 2 * 8 * 128  # of keys and values in fp8
    assert dict(found.rooms)["hbm"] == pytest.approx(prefill.mapping.gpus * 8e9 / bytes_of_token, rel=1e-3)


def test_a_shared_tier_holds_what_all_caches_bring_and_another_what_one_does():
    """1.31072 GB of each GPU hold 20,000 tokens of 65,536 B; three caches of two GPUs share the pool."""
    at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8")
    own = KvTier(bandwidth=1e9, latency_s=0.0, capacity=1.31072e9)
    system = replace(at.system, kv_tiers={"dram": own, "pool": replace(own, shared=True)})
    found = GpuCaches(gpus=2, caches=3, tiers=("dram", "pool")).met(
        (at.model, at.precision), system, 4096.0, sessions_per_s=1.0
    )
    assert dict(found.rooms) == {"dram": 40_000.0, "pool": 120_000.0}


def test_words_of_the_command_are_read(capsys):
    work = ds.lengths(1024, 64)
    assert memory_of(work, "coding_agent", 0.0, "hbm=20 GB, dram") == GpuCaches(hbm=20e9, tiers=("dram",))
    assert memory_of(work, "coding_agent", 0.9, "dram") is None
    assert memory_of(work, "short_answers", 0.0, "") is None
    assert not capsys.readouterr().err
    assert memory_of(work, "coding_agent", 0.0, "") is None
    assert capsys.readouterr().err.startswith("coding_agent: prompts repeat earlier ones, and all are computed whole")
    assert memory_of(work, "reasoning", 0.0, "dram") is None
    trace = ds.synthetic_trace(rate=1.0, requests=5, lengths=(1024, 64))
    assert memory_of(trace, "", 0.0, "dram") is None  # without blocks
    for said, fault in (("hbm", "hbm=SIZE"), ("dram=0.5", "hbm=SIZE"), ("hbm=20", "'20' has no unit")):
        with pytest.raises(InputError, match=fault):
            memory_of(work, "coding_agent", 0.0, said)


@pytest.mark.parametrize(("hbm", "settled"), [(0.5, True), (0.515, True), (0.6, False)])
def test_turns_settle_where_they_find_as_much_in_the_same_tiers(hbm, settled):
    def law(share):
        found = Reuse(share=ConstantShare(share=0.5), tiers=(("hbm", share), ("dram", 1.0 - share)))
        return ds.lengths(4096, 256, cached=found)

    assert _alike(law(hbm), law(0.5)) is settled
    assert not _alike(ds.lengths(4096, 256), law(0.5))


ASKED = {"ttft": "1 s", "tpot": "30 ms", "rate": 20}


def test_what_decode_holds_is_not_handed_over_in_simulation():
    runs = {}
    for held in (0.0, 0.9):
        reuse = Reuse(share=ConstantShare(share=0.9), in_decode=held)
        plan = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(8192, 256, cached=reuse), **ASKED)
        design = next(each for each in (plan.best, plan.other) if len(each.pools) == 2)
        runs[held] = prove(plan, design, adapt=False).planned
    assert runs[0.9].hand_over < runs[0.0].hand_over
