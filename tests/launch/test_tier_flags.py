"""Engines are told which tiers keep prompts and how long prompts wait; what they cannot do is a line."""

from dataclasses import replace

import pytest

import disagg_sim as ds
from disagg_sim.facts.hardware import KvTier
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.launch.engines import ENGINES, environment_of
from disagg_sim.launch.expressible import expressible
from disagg_sim.launch.workers import Weights, Workers, workers_of
from disagg_sim.report.words import prefill_text, records

AT = ds.setup("deepseek_r1", "h200_sxm", "fp8")  # 250 GB of DRAM and 3,840 GB of SSD a GPU
R1 = Weights(checkpoint="deepseek-ai/DeepSeek-R1")
WIDE = ds.Sharding(dp_attn=4, tp_attn=2, ep=8)


def workers(role: str, *tiers: str, **changes) -> Workers:
    return Workers(role=role, mapping=WIDE, instances=1, setup=AT, batch=64, tiers=tiers, **changes)


def flags(engine: str, each: Workers):
    return ENGINES[engine].settings(each, R1)


def test_vllm_counts_bytes_over_the_ranks_of_a_data_parallel_engine():
    """Four engines of two GPUs: 500 GB each; beside NIXL the connectors are joined."""
    config = flags("vllm", workers("prefill", "dram"))["--kv-transfer-config"]
    assert (config["kv_connector"], config["kv_role"]) == ("MultiConnector", "kv_producer")
    sends, keeps = config["kv_connector_extra_config"]["connectors"]
    assert sends == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    assert keeps["kv_connector_extra_config"] == {"cpu_bytes_to_use": 500_000_000_000}
    alone = flags("vllm", workers("colocated", "dram"))
    assert alone["--kv-offloading-size"] == pytest.approx(500e9 / 2**30, abs=0.01)
    assert alone["--kv-offloading-backend"] == "native"
    (note,) = (line for line in ds.launch([workers("colocated", "dram")], engine="vllm").notes if "kept in" in line)
    assert "prompts are kept in dram, 250 GB for each GPU" in note


def test_sglang_counts_gigabytes_of_a_rank_and_keeps_files_behind_them():
    found = flags("sglang", workers("prefill", "dram", "ssd"))
    assert found["--enable-hierarchical-cache"] is True
    assert (found["--hicache-size"], found["--hicache-storage-backend"]) == (250, "file")
    assert environment_of("sglang", [workers("prefill", "dram", "ssd")]) == {
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "/kv_cache"
    }
    assert "--hicache-storage-backend" not in flags("sglang", workers("prefill", "dram"))


def test_trtllm_counts_bytes_of_a_rank():
    cache = flags("trtllm", workers("prefill", "dram", "ssd"))["kv_cache_config"]
    assert (cache["host_cache_size"], cache["disk_cache_size"]) == (250_000_000_000, 3_840_000_000_000)
    assert cache["disk_cache_path"] == "/kv_cache"


@pytest.mark.parametrize("engine", ENGINES)
def test_no_tiers_no_flag(engine):
    told = f"{flags(engine, workers('prefill'))} {environment_of(engine, [workers('prefill')])}".lower()
    assert not [word for word in ("offload", "hicache", "hierarchical", "host_cache", "disk") if word in told]


@pytest.mark.parametrize(
    ("engine", "each", "said"),
    [
        ("vllm", workers("prefill", "dram", "ssd"), "prompts in ssd; allowed: dram"),
        ("sglang", workers("prefill", "dram", "remote"), "prompts in remote; allowed: dram, ssd"),
        ("trtllm", workers("colocated", "ssd"), "prompts in ssd without dram"),
        (
            "sglang",
            replace(workers("prefill", "dram", "ssd"), mapping=ds.Sharding(tp_attn=8, ep=8, dcp=8)),
            "prompts in ssd under DCP",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_a_line(engine, each, said):
    assert any(said in reason for reason in expressible([each], engine))


def test_a_tier_without_a_size_is_a_line():
    endless = replace(AT.system, kv_tiers={"dram": KvTier(bandwidth=5e10, latency_s=2e-5)})
    each = replace(workers("prefill", "dram"), setup=replace(AT, system=endless))
    assert any("whose size kv_tiers of h200_sxm does not state" in reason for reason in expressible([each], "sglang"))


def test_plans_and_rows_tell_the_pools_that_prefill():
    reuse = Reuse(share=ConstantShare(share=0.8), tiers=(("dram", 0.5), ("hbm", 0.5)))
    lengths = ds.lengths(8192, 512, cached=reuse)
    plan = ds.plan("llama_3_1_8b", "h200_sxm", lengths, rate=10)
    for design in (plan.best, plan.other):
        assert [each.tiers for each in workers_of(design)] == [("dram",), ()][: len(design.pools)]
    at, options = ds.setup("llama_3_1_8b", "h200_sxm", "fp8"), ds.Colocation(batch=(8,))
    row = ds.colocated(at, ds.Sharding(), lengths, options=options).iloc[[0]]
    (told,) = workers_of(row.assign(traffic="8192/512/cached0.8_dram"))
    assert told.tiers == ("dram",)


def test_sglang_dispatches_as_many_tokens_as_a_decode_step_has():
    """DeepEP takes 128 tokens of a rank unless told; 1,600 sequences on 8 ranks are 200 each, 8,000 are 1,000."""
    wide = replace(workers("decode"), mapping=ds.Sharding(dp_attn=8, ep=8))
    few, some, many, more = (replace(wide, batch=batch) for batch in (1024, 1600, 8000, 8200))
    told, depth = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "NVSHMEM_QP_DEPTH"
    assert environment_of("sglang", [workers("prefill"), some]) == {told: "200"}
    assert environment_of("sglang", [many]) == {told: "1000", depth: "2002"}  # two entries a token, and two
    for each in (few, more, replace(some, role="prefill")):
        assert not environment_of("sglang", [each])
    assert not environment_of("vllm", [some])
    assert "--moe-a2a-backend" not in flags("sglang", more)  # beyond 1,024 tokens of a rank it fails
    assert any("DeepEP takes 1,024 tokens" in note for note in ds.launch([more], engine="sglang").notes)


def test_exchange_of_a_co_located_instance_runs_in_cuda_graphs():
    """DeepEP's kernels of high throughput do not: they are for prefill."""
    modes = [flags("sglang", workers(role))["--deepep-mode"] for role in ("prefill", "decode", "colocated")]
    assert modes == ["normal", "low_latency", "auto"]
    wide = [replace(workers(role), mapping=ds.Sharding(dp_attn=8, ep=8)) for role in ("prefill", "decode", "colocated")]
    found = [flags("vllm", each)["--all2all-backend"] for each in wide]
    assert found == ["deepep_high_throughput", "deepep_low_latency", "allgather_reducescatter"]


EIGHT_RANKS = ds.Sharding(dp_attn=8, ep=8)


def row(hold_steps):
    at, options = ds.setup("deepseek_r1", "h200_sxm", "fp8"), ds.Colocation(batch=(64,), hold_steps=hold_steps)
    return ds.colocated(at, EIGHT_RANKS, ds.lengths(8192, 1024), ftl_limit=20.0, options=options)


def test_a_wait_in_flags():
    """128 steps of decode, and the pass that ends the wait."""
    (workers,) = workers_of(row((128,)))
    sglang, trtllm = (ENGINES[name].settings(workers, R1) for name in ("sglang", "trtllm"))
    assert sglang["--enable-prefill-delayer"] is True
    assert sglang["--prefill-delayer-max-delay-passes"] == 129
    assert trtllm["attention_dp_config"] == {"enable_balance": True, "timeout_iters": 129, "batching_wait_iters": 0}


def test_no_wait_no_flag():
    (workers,) = workers_of(row(()))
    assert "--enable-prefill-delayer" not in ENGINES["sglang"].settings(workers, R1)
    assert "attention_dp_config" not in ENGINES["trtllm"].settings(workers, R1)


def test_vllm_cannot_wait():
    (said,) = expressible(row((128,)), "vllm")
    assert said.endswith("of vLLM: prefill delay of 128 steps at most, until every rank can take a prompt")
    assert expressible(row((128,)), "sglang") == expressible(row((128,)), "trtllm") == ()


def test_words():
    (point,) = records(row((128,)))
    assert prefill_text(point) == "up to 8 a pass, prefill delay up to 128 steps"
