"""What an engine cannot start is said, a line a reason, and not written."""

import pytest

import disagg_sim as ds
from disagg_sim.choices import LAUNCHERS
from disagg_sim.facts.load import list_specs, load_engine, load_launcher
from disagg_sim.launch.workers import Workers
from disagg_sim.planning.question import PlanOptions
from tests.launch.deployments import CASES, PAIRS, R1_ON_H200, chunked, tp, workers


@pytest.mark.parametrize(("case", "engine"), PAIRS)
def test_nothing_is_in_the_way_of_what_is_written(case, engine):
    assert ds.expressible(CASES[case][0](), engine) == ()


MIXED = ds.Sharding(tp_attn=2, dp_attn=4, ep=8)
GROUPS = ds.Sharding(tp_attn=8, tp_ffn=2, ep=4)


def test_engines_that_cannot_are_told_from_those_that_can():
    with pytest.raises(ds.DisaggSimError) as refused:
        ds.launch([workers("colocated", ds.setup(*R1_ON_H200, engine="vllm"), MIXED)], engine="trtllm")
    assert str(refused.value) == (
        "colocated DP4 TP2 EP8 of TensorRT-LLM: attention DP over groups of GPUs; "
        "engines that can: dynamo, vllm, sglang, llm-d"
    )


@pytest.mark.parametrize(
    ("system", "able"),
    [
        ("h100_sxm", {"dynamo", "vllm", "sglang", "trtllm", "llm-d"}),
        ("mi300x", {"vllm", "sglang"}),
        ("tpu7x", set()),
        ("trainium2", set()),
        ("trainium3", set()),
    ],
)
def test_an_engine_that_does_not_run_on_a_system_is_told_in_one_line(system, able):
    pool = [workers("colocated", ds.setup("llama_3_1_8b", system, "bf16"), tp(1))]
    assert {engine for engine in LAUNCHERS if not ds.expressible(pool, engine)} == able
    for engine in {*LAUNCHERS} - able:
        with pytest.raises(ds.DisaggSimError, match=f"{system}: it starts systems of NVIDIA") as refused:
            ds.launch(pool, engine=engine)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("system", ["mi300x", "trainium2"])
def test_no_forecast_is_made_of_an_engine_that_does_not_run_on_a_system(system):
    other = "runs on systems of NVIDIA, and not of (AMD|Google|AWS); allowed there: sglang, vllm, "
    for engine in ("trtllm", "trtllm_engine"):
        with pytest.raises(ds.DisaggSimError, match=other):
            ds.setup("llama_3_1_8b", system, "bf16", engine=engine)
    options = PlanOptions(engine="trtllm")
    lengths = ds.lengths(1024, 128)
    with pytest.raises(ds.DisaggSimError, match=other):
        ds.plan("llama_3_1_8b", system, lengths, rate=4, options=options)
    found = ds.plan("llama_3_1_8b", ["h100_sxm", system], lengths, rate=4, options=options)
    assert found.best is not None
    assert found.best.pools[-1].setup.system.name == "h100_sxm"
    assert [line.partition(": ")[0] for line in found.left_out] == [system]


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name in list_specs("engine")])
def test_what_a_launcher_starts_is_what_its_engine_runs_on(launcher):
    runs_on = load_engine(launcher).vendors
    assert not runs_on or set(load_launcher(launcher).vendors) == set(runs_on)


def test_kernels_of_cuda_between_experts_are_left_out_elsewhere():
    for engine, flags in (("vllm", ["--all2all-backend"]), ("sglang", ["--moe-a2a-backend", "--deepep-mode"])):
        for system, there in (("h100_sxm", True), ("mi300x", False)):
            pool = [workers("decode", ds.setup("deepseek_r1", system, "fp8"), ds.Sharding(dp_attn=16, ep=16))]
            made = ds.launch(pool, engine=engine)
            assert [flag in made.files["decode.sh"] for flag in flags] == [there] * len(flags)
            assert any("expect other latencies" in line and flags[0] in line for line in made.notes) != there


@pytest.mark.parametrize(
    ("mapping", "engine", "rule"),
    [
        (MIXED, "trtllm", "attention DP over groups of GPUs"),
        (GROUPS, "vllm", "EP over groups of GPUs"),
        (MIXED, "vllm", ""),
        (GROUPS, "sglang", ""),
    ],
)
def test_rules_on_one_pool_are_those_of_the_search(mapping, engine, rule):
    found = ds.expressible([workers("colocated", ds.setup(*R1_ON_H200), mapping)], engine)
    assert [line.split(": ")[1] for line in found] == ([rule] if rule else [])


def pair(model: str, prefill: ds.Sharding, decode: ds.Sharding) -> list[Workers]:
    at = ds.setup(model, "h200_sxm", "fp8")
    return [workers("prefill", at, prefill), workers("decode", at, decode)]


@pytest.mark.parametrize(
    ("pools", "engine", "reason"),
    [
        # 8 KV heads on 16 GPUs: each head is held twice, and the connector of vLLM cannot read copied heads
        (pair("llama_3_1_70b", tp(16), tp(4)), "vllm", "attention TP 16 above 4 with 8 KV heads"),
        (pair("llama_3_1_70b", tp(8), tp(4)), "vllm", ""),
        (pair("llama_3_1_70b", tp(4), tp(16)), "vllm", ""),
        (pair("deepseek_r1", ds.Sharding(tp_attn=16, ep=16), ds.Sharding(dp_attn=8, ep=8)), "vllm", ""),
        (pair("llama_3_1_70b", tp(16), tp(4)), "trtllm", ""),
        (pair("llama_3_1_70b", tp(4), ds.Sharding(tp_attn=4, tp_ffn=4, pp=2)), "vllm", "pipeline stages in decode"),
        (pair("llama_3_1_70b", tp(4), ds.Sharding(tp_attn=4, tp_ffn=4, pp=2)), "sglang", "2 decode stages; allowed: 1"),
        (pair("llama_3_1_70b", tp(4), ds.Sharding(tp_attn=4, tp_ffn=4, pp=2)), "trtllm", ""),
        (
            pair("qwen3_5_397b_a17b", ds.Sharding(pp=4), ds.Sharding(tp_attn=2, dp_attn=4, ep=8)),
            "vllm",
            "equal TP alone",
        ),
        (pair("qwen3_5_397b_a17b", ds.Sharding(pp=4), ds.Sharding(dp_attn=8, ep=8)), "vllm", ""),
        (pair("llama_3_1_70b", ds.Sharding(tp_attn=2, tp_ffn=2, pp=2), tp(4)), "sglang", ""),
    ],
)
def test_pools_that_cannot_send_each_other_caches(pools, engine, reason):
    found = ds.expressible(pools, engine)
    assert [line for line in found if reason not in line or not reason] == []
    assert bool(found) == bool(reason)


def test_attention_tp_must_divide():
    at = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
    pools = [workers("prefill", at, ds.Sharding(tp_attn=8, ep=8))]
    pools.append(workers("decode", at, ds.Sharding(tp_attn=12, ep=12, redundant_slots=8)))
    (reason,) = ds.expressible(pools, "sglang")
    assert reason.endswith("attention TP 8 and 12, of which none divides the other")
    assert ds.expressible(pools, "trtllm") == ()


def test_caches_of_both_pools_have_one_format():
    sides = [ds.setup("llama_3_1_8b", "h100_sxm", precision) for precision in ("bf16", "fp8")]
    pools = [workers(role, at, tp(1)) for role, at in zip(("prefill", "decode"), sides, strict=True)]
    for engine in ("vllm", "sglang", "trtllm"):
        assert ds.expressible(pools, engine)[0].endswith("caches in bf16 and fp8")


def test_pairs_that_split_a_request_are_nobodys():
    at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    parts = ds.ServedDeployment(name="p", gpus=2, setup=at, pairs=(ds.Replicas(mapping=tp(1), instances=2),))
    for engine in ("vllm", "sglang", "trtllm"):
        assert "split between the two instances of a pair" in ds.expressible(parts, engine)[0]


def test_unknown_names_are_told_with_the_nearest():
    with pytest.raises(ds.DisaggSimError, match=r"unknown engine 'sglnag', did you mean 'sglang'\?; known: dynamo"):
        ds.launch(chunked(), engine="sglnag")
    with pytest.raises(ds.DisaggSimError, match=r"backend 'sglang' of llm-d; allowed: vllm"):
        ds.launch(chunked(), engine="llm-d", backend="sglang")
    with pytest.raises(ds.DisaggSimError, match=r"has no setup, which says what it serves"):
        ds.launch(ds.ServedDeployment(name="x", gpus=1, colocated=(ds.Replicas(mapping=tp(1), instances=1),)))
    with pytest.raises(ds.DisaggSimError, match="has no instances; allowed: a Design, a Deployment"):
        ds.launch([], engine="vllm")
    ats = (ds.setup(model, "h100_sxm", "fp8") for model in ("llama_3_1_8b", "mistral_7b"))
    two = tuple(ds.Replicas(mapping=tp(1), instances=1, setup=at) for at in ats)
    with pytest.raises(ds.DisaggSimError, match="serves llama_3_1_8b and mistral_7b; allowed: one model a launch"):
        ds.launch(ds.ServedDeployment(name="x", gpus=2, colocated=two), engine="vllm")


def test_a_cache_in_bf16_is_refused_where_auto_is_the_format_of_the_checkpoint():
    for precision, refused in {"nvfp4_bf16kv": True, "nvfp4_fp8kv": False, "fp8_block_bf16kv": False}.items():
        pool = workers("colocated", ds.setup("deepseek_r1", "b200_sxm", precision), ds.Sharding(dp_attn=8, ep=8))
        told = ds.expressible([pool], "trtllm")
        assert bool(told) == refused == any("bf16 KV cache of a checkpoint in nvfp4" in line for line in told)
        assert ds.expressible([pool], "vllm") == ()
