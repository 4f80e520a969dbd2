"""A deployment is read from what starts it: from files that were written for a plan, and from commands by hand."""

from functools import cache

import pytest
from typer.testing import CliRunner

import disagg_sim as ds
from disagg_sim.cli.main import app
from disagg_sim.errors import InputError
from disagg_sim.launch.engines import ENGINES
from disagg_sim.launch.read import Started, read_launch

LOAD = ["--model", "llama_3_1_8b", "--system", "h100_sxm", "--isl", "1024", "--osl", "128", "--alone"]


QUESTIONS = {
    "dense": ("llama_3_1_8b", "h100_sxm", None, ds.lengths(4096, 512), 40),
    "varied": ("llama_3_1_70b", "h200_sxm", None, ds.lengths("azure_2023_conversation"), 60),
    "bf16": ("qwen3_8b", "h100_sxm", "bf16", ds.lengths(2000, 300), 40),
    "experts": ("deepseek_r1", "h200_sxm", None, ds.lengths(2048, 1024), 20),
}


@cache
def planned(name: str, engine: str):
    model, system, precision, lengths, rate = QUESTIONS[name]
    options = ds.PlanOptions(engine=engine, precision=precision, within=engine)
    found = ds.plan(model, system, lengths, ttft="2 s", tpot="60 ms", rate=rate, options=options)
    designs = [found.best, *found.runners_up]
    return next(each for each in designs if each is not None and not ds.expressible(each, engine))


def only(given: str) -> Started:
    (one,) = read_launch(given)
    return one


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", QUESTIONS)
def test_written_files_are_read_as_the_plan_that_they_start(name, engine, tmp_path):
    design = planned(name, engine)
    ds.launch(design, engine=engine).write(tmp_path)
    started = {each.role: each for each in read_launch(str(tmp_path))}
    assert set(started) == {pool.role for pool in design.pools}
    for pool in design.pools:
        told, ranks = started[pool.role].replicas, int(pool.mapping.dp_attn)
        for key in ("tp_attn", "dp_attn", "tp_ffn", "ep", "pp", "dcp", "pcp"):
            assert getattr(told.mapping, key) == getattr(pool.mapping, key), key
        assert told.instances == pool.instances + pool.spares
        assert told.batch is not None
        assert pool.batch <= told.batch < pool.batch + ranks
        assert started[pool.role].engine == engine
        assert started[pool.role].cache in ("", pool.setup.precision.cache.name)
        if pool.replicas.token_budget and pool.role == "colocated":
            assert told.token_budget is not None
            assert pool.replicas.token_budget <= told.token_budget < pool.replicas.token_budget + 2 * ranks


COMMANDS = {
    # What is typed -> role, instances, (tp, dp, ep, pp, tp of FFN), batch, token budget.
    "vllm serve M -tp 4": ("colocated", 1, (4, 1, 1, 1, 4), None, None),
    "vllm serve M --tensor-parallel-size=2 --pipeline_parallel_size 2 --max-num-seqs 64": (
        ("colocated", 1, (2, 1, 1, 2, 2), 64, None)
    ),
    "3 x vllm serve M -tp 2 -dp 4 --enable-expert-parallel --max-num-seqs 64 --max-num-batched-tokens 4096": (
        ("colocated", 3, (2, 4, 8, 1, 1), 256, 16384)
    ),
    'prefill: vllm serve M -tp 2 --max-num-seqs 8 --kv-transfer-config \'{"kv_role": "kv_both"}\'': (
        ("prefill", 1, (2, 1, 1, 1, 2), 8, None)
    ),
    'vllm serve M --max-num-batched-tokens 4096 --kv-transfer-config \'{"kv_role": "kv_consumer"}\'': (
        ("decode", 1, (1, 1, 1, 1, 1), None, None)
    ),
    "python3 -m dynamo.vllm --model M --tensor-parallel-size 8 --is-prefill-worker": (
        ("prefill", 1, (8, 1, 1, 1, 8), None, None)
    ),
    # DP attention lies inside of the TP group; limits hold for all ranks; decodes stand beside the chunk unless mixed.
    "python -m sglang.launch_server --model-path M --tp 8 --dp 8 --enable-dp-attention --ep-size 8 "
    "--max-running-requests 256 --chunked-prefill-size 32768": ("colocated", 1, (1, 8, 8, 1, 1), 256, 33024),
    "sglang serve --model-path M --max-running-requests 256 --chunked-prefill-size 4096 --enable-mixed-chunk": (
        ("colocated", 1, (1, 1, 1, 1, 1), 256, 4096)
    ),
    # An image of vLLM takes the arguments of ``vllm serve``.
    "2 x docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.31.0 --model M -tp 4": (
        ("colocated", 2, (4, 1, 1, 1, 4), None, None)
    ),
    "docker run --gpus all vllm/vllm-openai:v0.31.0 vllm serve M -tp 4": (
        ("colocated", 1, (4, 1, 1, 1, 4), None, None)
    ),
    # Data parallelism without DP attention is copies of the instance.
    "python -m sglang.launch_server --model-path M --tp 2 --dp 4 --disaggregation-mode decode": (
        ("decode", 4, (2, 1, 1, 1, 2), None, None)
    ),
    "2 x trtllm-serve M --tp_size 8 --ep_size 4 --max_batch_size 128": ("colocated", 2, (8, 1, 4, 1, 2), 128, None),
}


@pytest.mark.parametrize("given", COMMANDS)
def test_commands_are_read_as_their_engine_means_them(given):
    one = only(given)
    told = one.replicas
    degrees = tuple(int(getattr(told.mapping, key)) for key in ("tp_attn", "dp_attn", "ep", "pp", "tp_ffn"))
    assert (one.role, told.instances, degrees, told.batch, told.token_budget) == COMMANDS[given]


def test_a_configuration_of_tensorrt_llm_beside_its_script(tmp_path):
    """Attention DP takes all eight GPUs; a wait of at most 60 iterations counts the pass that ends it."""
    (tmp_path / "gen.yaml").write_text(
        "tensor_parallel_size: 8\nmoe_expert_parallel_size: 8\nenable_attention_dp: true\nmax_batch_size: 32\n"
        "max_num_tokens: 512\nkv_cache_config: {dtype: fp8}\nspeculative_config: {num_nextn_predict_layers: 2}\n"
        "attention_dp_config: {enable_balance: true, timeout_iters: 60}\nstream_interval: 20\n"
    )
    (tmp_path / "gen.sh").write_text("#!/bin/sh\nexec trtllm-serve M \\\n  --config gen.yaml --port 8000\n")
    for given in ("gen.sh", "gen.yaml"):
        one = only(str(tmp_path / given))
        mapping, told = one.replicas.mapping, one.replicas
        assert (mapping.tp_attn, mapping.dp_attn, mapping.ep, mapping.draft_tokens) == (1, 8, 8, 2)
        assert (told.batch, told.token_budget, told.hold_steps) == (256, 4096, 59)
        assert (one.cache, one.unread) == ("fp8", ("stream-interval",))


def test_scripts_are_found_where_a_plan_leaves_them(tmp_path):
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "colocated.sh").write_text("exec vllm serve M -tp 4\n")
    assert int(only(str(tmp_path)).replicas.mapping.tp_attn) == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("vllm serve M -tp four", "tp 'four' is no whole number"),
        ("vllm serve M --max-num-seqs --port 80", "max-num-seqs has no value"),
        ("ollama run M", "No such file or directory; allowed: .* a command of vllm serve, "),
        ('vllm serve M --kv-transfer-config \'{"kv_role": "kv_both"}\'', "may be prefill or decode"),
        ("python -m sglang.launch_server --tp 6 --dp 4 --enable-dp-attention", "4 attention ranks do not divide 6"),
        ("  ", "empty"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(given, said):
    with pytest.raises(InputError, match=said) as caught:
        read_launch(given)
    assert "\n" not in str(caught.value)


def test_evaluate_takes_commands_and_says_what_it_did_not_read(tmp_path):
    command = "vllm serve M -tp 2 --max-num-seqs 64 --enable-prefix-caching --kv-cache-dtype fp8"
    run = CliRunner()
    told = run.invoke(app, ["evaluate", *LOAD, "--rate", "20", "--launch", f"2 x {command} --max-model-len 1024 -O3"])
    by_hand = ["--pool", "colocated:tp=2,batch=64,instances=2", "--engine", "vllm"]
    said = run.invoke(app, ["evaluate", *LOAD, "--rate", "20", *by_hand])
    notes = (
        "precision fp8 is the usual one of the model and its system, not read from the launch: --precision\n"
        "settings that were not read: enable-prefix-caching, O3\n"
        "co-located refuses requests of more than 1,024 tokens, and some have 1,152\n"
    )
    assert notes in told.stdout
    assert told.stdout.replace(notes, "") == said.stdout
    sure = ["--precision", "fp8", "--launch", f"2 x {command} --max-model-len 1152"]
    told = run.invoke(app, ["evaluate", *LOAD, "--rate", "20", *sure])
    assert told.stdout.replace("settings that were not read: enable-prefix-caching\n", "") == said.stdout
    (tmp_path / "empty.sh").write_text("echo vllm\n")
    for given, refused in (
        (["--launch", command, "--engine", "sglang"], "engines sglang and vllm"),
        (["--launch", f"{command} --kv-cache-dtype bfloat16"], "KV cache in bf16"),
        (["--launch", command, "--launch", command], "each role once"),
        (["--launch", command, *by_hand], "say the deployment once"),
        (["--launch", str(tmp_path / "empty.sh")], "no command of vllm serve"),
    ):
        failed = run.invoke(app, ["evaluate", *LOAD, "--rate", "20", *given])
        assert isinstance(failed.exception, InputError)
        assert refused in str(failed.exception)
