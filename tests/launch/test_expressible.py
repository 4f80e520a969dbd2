"""What an engine cannot start is said, a line a reason, and not written; the others hold what was planned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.choices import LAUNCHERS
from disagg_sim.facts.load import list_specs, load_engine, load_launcher
from disagg_sim.launch.engines import ENGINES, sglang_flags, trtllm_config, vllm_flags
from disagg_sim.launch.read import read_launch
from disagg_sim.launch.workers import UNKNOWN, Weights, Workers, weights_of, workers_of
from disagg_sim.planning.question import PlanOptions
from tests.launch.deployments import CASES, PAIRS, R1_ON_H200, chunked, dep, tp, unequal_tp, workers


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
    [("h100_sxm", {"dynamo", "vllm", "sglang", "trtllm", "llm-d"}), ("mi300x", {"vllm", "sglang"}), ("tpu7x", set())],
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
        (pair("llama_3_1_70b", tp(4), tp(16)), "vllm", ""),
        (pair("deepseek_r1", ds.Sharding(tp_attn=16, ep=16), ds.Sharding(dp_attn=8, ep=8)), "vllm", ""),
        (pair("llama_3_1_70b", tp(4), ds.Sharding(tp_attn=4, tp_ffn=4, pp=2)), "vllm", "pipeline stages in decode"),
        (pair("llama_3_1_70b", tp(4), ds.Sharding(tp_attn=4, tp_ffn=4, pp=2)), "sglang", "2 decode stages; allowed: 1"),
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


R1 = ds.setup("deepseek_r1", "h200_sxm", "fp8")

LLAMA = ds.setup("llama_3_1_70b", "h100_sxm", "fp8")

NAMED = Weights(checkpoint="a/model")


@given(ranks=st.sampled_from([1, 2, 8, 32]), batch=st.integers(1, 5000))
def test_ranks_together_hold_the_batch_and_less_than_one_more_each(ranks, batch):
    decode = workers("decode", R1, ds.Sharding(dp_attn=ranks, ep=ranks), batch=batch)
    of_a_rank = vllm_flags(decode, NAMED)["--max-num-seqs"]
    assert batch <= ranks * of_a_rank < batch + ranks
    assert trtllm_config(decode, NAMED)["max_batch_size"] == of_a_rank
    assert sglang_flags(decode, NAMED)["--max-running-requests"] == ranks * of_a_rank


def test_a_pipeline_holds_a_pass_of_prompts_in_each_stage_and_a_prompt_of_it_enters_at_once():
    staged = workers("prefill", LLAMA, ds.Sharding(tp_attn=2, tp_ffn=2, pp=4), batch=3, token_budget=6000)
    flags = vllm_flags(staged, NAMED)
    assert (flags["--max-num-seqs"], flags["--max-num-batched-tokens"]) == (3 * 4, 6000 / 3)


def test_chunks_bound_the_tokens_of_a_pass():
    cut = workers("prefill", R1, ds.Sharding(dp_attn=4, ep=4, chunk_tokens=2048), batch=8, token_budget=65536)
    flags = vllm_flags(cut, NAMED)
    assert (flags["--max-num-batched-tokens"], flags["--long-prefill-token-threshold"]) == (8 / 4 * 2048, 2048)
    for engine in ("vllm", "sglang", "trtllm"):
        notes = " ".join(ds.launch([cut], engine=engine).notes)
        assert ("whole prompts and cuts the last" in notes) == (engine != "vllm")
    flags = sglang_flags(cut, NAMED)
    assert (flags["--chunked-prefill-size"], flags["--max-prefill-tokens"]) == (8 * 2048, 8 / 4 * 2048)


def test_mixed_steps_of_sglang_have_decodes_in_their_chunk():
    """Its scheduler takes running decodes off ``--chunked-prefill-size``, as vLLM does off its budget."""
    both = workers("colocated", LLAMA, tp(4), batch=128, token_budget=2176)
    flags = sglang_flags(both, NAMED)
    assert (flags["--chunked-prefill-size"], flags["--enable-mixed-chunk"]) == (2176, True)
    assert vllm_flags(both, NAMED)["--max-num-batched-tokens"] == 2176


@given(ranks=st.sampled_from([1, 2, 4, 8, 12, 24, 36, 48]), tensor=st.sampled_from([1, 2, 4, 8, 16]))
def test_nodes_hold_an_instance_in_equal_parts_of_whole_or_cut_ranks(ranks, tensor):
    mapping = ds.Sharding(tp_attn=tensor, dp_attn=ranks, ep=ranks * tensor)
    for size in (4, 8):
        one = workers("decode", R1, mapping, node_gpus=size)
        nodes = one.nodes()
        local, odd = divmod(one.gpus, nodes)
        assert not odd
        assert local <= size
        assert local % tensor == 0 or tensor % local == 0
    assert workers("decode", R1, mapping, node_gpus=10**4).nodes() == 1


def test_a_row_of_a_frontier_is_launched_as_its_pools():
    at, lengths = ds.setup("llama_3_1_8b", "h100_sxm", "fp8", engine="vllm"), ds.lengths(2048, 256)
    mappings = ds.enumerate_mappings(at, max_gpus=2)
    grids = ds.prefill_grid(at, mappings, lengths), ds.decode_grid(at, mappings, lengths)
    front = ds.pareto_front(ds.disaggregated(*grids, ftl_limit=2.0))
    row = front.iloc[[0]]
    prefill, decode = workers_of(row)
    assert prefill.instances * prefill.gpus + decode.instances * decode.gpus == row["total_gpus"].item()
    assert (decode.batch, prefill.batch) == (row["decode_batch"].item(), row["prefill_batch"].item())
    assert prefill.token_budget == prefill.batch * 2048
    with pytest.raises(ds.DisaggSimError, match="the table has 0 rows; a deployment is one"):
        workers_of(front.iloc[:0])


def test_pools_of_a_match_keep_their_own_systems():
    lengths = ds.lengths(2048, 256)
    sides = [ds.setup("llama_3_1_8b", system, "bf16") for system in ("a100_sxm_80gb", "h100_sxm")]
    grids = [
        score(at, ds.enumerate_mappings(at, max_gpus=2), lengths)
        for score, at in zip((ds.prefill_grid, ds.decode_grid), sides, strict=True)
    ]
    plan = ds.plan_pools(grids, ftl_limit=5.0, ttl_limit=0.05, gpu_budget=8)
    found = workers_of(plan.deployment)
    assert [each.setup.system.name for each in found] == ["a100_sxm_80gb", "h100_sxm"]
    assert sum(each.gpus * each.instances for each in found) == plan.deployment.gpus


def test_weights_come_from_a_published_checkpoint_or_are_asked_for():
    fp4 = ds.setup("llama_3_1_70b", "gb200_nvl72", "nvfp4_fp8kv")
    assert weights_of(fp4).checkpoint == UNKNOWN
    assert "no published checkpoint of llama_3_1_70b in nvfp4 is known" in weights_of(fp4).note
    assert weights_of(fp4, "my/weights").checkpoint == "my/weights"
    blocks = ds.setup("qwen3_30b_a3b", "h100_sxm", "fp8_block")
    assert weights_of(blocks).checkpoint == "Qwen/Qwen3-30B-A3B-FP8"
    bf16 = ds.setup("qwen2_72b", "h100_sxm", "fp8")
    assert weights_of(bf16).quantised == "fp8"
    assert weights_of(bf16, quantises=False).checkpoint == UNKNOWN


def test_the_exchange_stays_on_nvlink_where_a_rack_has_it():
    at = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
    on_rack = workers("decode", at, ds.Sharding(dp_attn=32, ep=32))
    assert vllm_flags(on_rack, NAMED)["--all2all-backend"] == "flashinfer_nvlink_one_sided"
    prefill, decode = dep()
    assert "--all2all-backend" not in vllm_flags(prefill, NAMED)  # tensor parallel attention: ranks hold all tokens
    assert vllm_flags(decode, NAMED)["--all2all-backend"] == "deepep_low_latency"


def test_sglang_gathers_heads_that_are_cut_differently():
    made = {case: ds.launch(case, engine="sglang").files["decode.sh"] for case in (unequal_tp(), dep())}
    cut, latent = made.values()
    assert "export SGLANG_DISAGG_STAGING_BUFFER=1" in cut
    assert "STAGING" not in latent  # MLA caches have no heads


SEVERAL = [ds.lengths(4096, 512), ds.lengths("azure_2023_conversation"), ds.lengths([10, 6000], [900, 3])]


@pytest.mark.parametrize("work", SEVERAL, ids=["alike", "law", "observed"])
def test_requests_a_quarter_longer_than_planned_are_accepted(work):
    need = 1.25 * min(work.requests.reach, work.resident.most)
    for role in ("prefill", "decode", "colocated"):
        pool = workers(role, LLAMA, tp(4), batch=1, token_budget=round(work.mean_isl), lengths=work)
        config, flags = trtllm_config(pool, NAMED), vllm_flags(pool, NAMED)
        limits = {flags["--max-model-len"], sglang_flags(pool, NAMED)["--context-length"], config["max_seq_len"]}
        assert len(limits) == 1
        assert need <= limits.pop() < need + 1024


@pytest.mark.parametrize("isl", [1, 4096, 60_000])
def test_a_prompt_of_one_token_more_is_one_pass_and_not_refused(isl):
    """Without chunks TensorRT-LLM refuses prompts above ``max_num_tokens``; the others would cut off the last token."""
    pool = workers("prefill", LLAMA, tp(4), batch=1, token_budget=isl, lengths=ds.lengths(isl, 128))
    config, flags, second = trtllm_config(pool, NAMED), vllm_flags(pool, NAMED), sglang_flags(pool, NAMED)
    budgets = (config["max_num_tokens"], flags["--max-num-batched-tokens"], second["--chunked-prefill-size"])
    assert min(budgets) > isl
    assert config["enable_chunked_prefill"] or config["max_num_tokens"] >= config["max_seq_len"]
    for role in ("prefill", "colocated"):  # without lengths, or without a budget
        bare = trtllm_config(workers(role, LLAMA, tp(4), batch=1, token_budget=isl), NAMED)
        assert bare["enable_chunked_prefill"]
        assert trtllm_config(workers(role, LLAMA, tp(4), batch=1), NAMED)["enable_chunked_prefill"]


def test_passes_of_a_prefill_pipeline_are_filled_across_prompts():
    """Whole prompts of unlike lengths would leave stages idle: engines keep only as many passes in flight as stages."""
    for pp, packed in ((1, False), (2, True)):
        pool = workers(
            "prefill", LLAMA, ds.Sharding(pp=pp), batch=1, token_budget=60_000, lengths=ds.lengths(4096, 128)
        )
        assert trtllm_config(pool, NAMED)["enable_chunked_prefill"] is packed


def test_every_launcher_of_vllm_asks_for_the_kernels_that_the_times_are_of():
    at = ds.setup("gpt_oss_120b", "h100_sxm", "mxfp4", engine="vllm")
    pools = [workers(role, at, tp(1)) for role in ("prefill", "decode")]
    for launcher, files in (("vllm", 2), ("dynamo", 1), ("llm-d", 2)):
        made = ds.launch(pools, engine=launcher, backend="" if launcher == "vllm" else "vllm").files
        assert sum("VLLM_MXFP4_USE_MARLIN" in text for text in made.values()) == files


def test_no_request_is_longer_than_the_model_takes():
    pool = workers("decode", LLAMA, tp(4), batch=1, lengths=ds.lengths(120_000, 2_000))
    assert vllm_flags(pool, NAMED)["--max-model-len"] == LLAMA.model.max_context == 131_072
    assert "--max-model-len" not in vllm_flags(workers("decode", LLAMA, tp(4), batch=1), NAMED)


def test_rows_of_a_sweep_say_their_lengths_and_other_tables_the_means_alone():
    options = ds.Colocation(batch=(8,), prefill_batch=(1,))
    points = ds.colocated(LLAMA, tp(4), ds.lengths("azure_2023_conversation"), options=options)
    assert [each.context for each in workers_of(points)] == [None]
    named = workers_of(points.assign(traffic="azure_2023_conversation"))
    assert [each.context for each in named] == [19 * 1024]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("seats", "drafts"), [(512, 0), (1000, 0), (300, 1), (600, 2)])
def test_graphs_are_captured_of_all_decode_steps_that_a_plan_makes(engine, seats, drafts, tmp_path):
    """By default vLLM captures up to 512 tokens, SGLang 32 to 512 requests of a rank; larger steps take far longer."""
    at = ds.setup("deepseek_r1", "h200_sxm", "fp8", speculation="mtp 0.8 0.6" if drafts else None)
    mapping = ds.Sharding(dp_attn=8, ep=8, draft_tokens=drafts)
    ds.launch([workers("decode", at, mapping, batch=8 * seats)], engine=engine).write(tmp_path)
    (read,) = read_launch(f"decode: {tmp_path}")
    by_default = engine == "vllm" and seats * (1 + drafts) <= 512
    assert read.replicas.captured == (None if by_default else seats * (1 + drafts))
