"""Limits of a step are those of the plan, counted as each engine counts them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import disagg_sim as ds
from disagg_sim.launch.engines import ENGINES, sglang_flags, trtllm_config, vllm_flags
from disagg_sim.launch.read import read_launch
from disagg_sim.launch.workers import UNKNOWN, Weights, weights_of, workers_of
from tests.launch.deployments import dep, tp, unequal_tp, workers

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


def test_a_pipeline_holds_a_pass_of_prompts_in_each_stage():
    staged = workers("prefill", LLAMA, ds.Sharding(tp_attn=2, tp_ffn=2, pp=4), batch=3, token_budget=6000)
    flags = vllm_flags(staged, NAMED)
    assert (flags["--max-num-seqs"], flags["--max-num-batched-tokens"]) == (3 * 4, 6000)


def test_chunks_bound_the_tokens_of_a_pass():
    cut = workers("prefill", R1, ds.Sharding(dp_attn=4, ep=4, chunk_tokens=2048), batch=8, token_budget=65536)
    flags = vllm_flags(cut, NAMED)
    assert (flags["--max-num-batched-tokens"], flags["--long-prefill-token-threshold"]) == (8 / 4 * 2048, 2048)
    for engine in ("vllm", "sglang", "trtllm"):
        notes = " ".join(ds.launch([cut], engine=engine).notes)
        assert ("whole prompts and cuts the last" in notes) == (engine != "vllm")
    flags = sglang_flags(cut, NAMED)
    assert (flags["--chunked-prefill-size"], flags["--max-prefill-tokens"]) == (8 * 2048, 8 / 4 * 2048)


def test_mixed_steps_of_sglang_count_prompts_alone():
    both = workers("colocated", LLAMA, tp(4), batch=128, token_budget=2176)
    flags = sglang_flags(both, NAMED)
    assert (flags["--chunked-prefill-size"], flags["--enable-mixed-chunk"]) == (2048, True)
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
