"""What stands in emitted files, read as an engine would read it, is what was planned."""

import json
import math
import shlex
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import yaml

import disagg_sim as ds
from disagg_sim.choices import LAUNCHERS
from disagg_sim.facts.load import load_checkpoints, load_launcher
from disagg_sim.launch.expressible import engines_of
from disagg_sim.launch.launch import Launch
from disagg_sim.launch.workers import ROOM, ROOM_STEP
from tests.launch.test_launch_options import containers, options_in


@dataclass(frozen=True, kw_only=True)
class Told:
    """What an instance is told, in the words of a plan."""

    replicas: int | None  # None where a script is run for each
    gpus: int
    tp_attn: int
    dp_attn: int
    ep: int
    pp: int
    sequences: int | None  # of all attention ranks together
    tokens: int | None  # of a step of all attention ranks together
    cut: bool  # whether prompts may be computed in pieces
    cache: str
    weights: str
    context: int | None


def of_vllm(flags: dict[str, Any], model: str, name: str) -> dict[str, Any]:
    """Flags of vLLM count by data parallel rank, and its expert parallelism takes all GPUs of a stage."""
    tp, dp = flags["--tensor-parallel-size"], flags.get("--data-parallel-size", 1)
    pp, sequences, tokens = (
        flags.get(f"--{key}") for key in ("pipeline-parallel-size", "max-num-seqs", "max-num-batched-tokens")
    )
    return {
        **{"tp_attn": tp, "dp_attn": dp, "pp": pp or 1, "gpus": tp * dp * (pp or 1)},
        "ep": tp * dp if flags.get("--enable-expert-parallel") else 1,
        "sequences": sequences and sequences * dp,
        "tokens": tokens and tokens * dp,
        "cut": True,
        "cache": {"fp8": "fp8", "bfloat16": "bf16"}[flags["--kv-cache-dtype"]],
        "weights": flags.get("--quantization") or format_of(name, model),
        "context": flags.get("--max-model-len"),
    }


def of_sglang(flags: dict[str, Any], model: str, name: str) -> dict[str, Any]:
    """Flags of SGLang count over all attention ranks, which lie inside its TP group."""
    tp, dp, pp = flags["--tp-size"], flags.get("--dp-size", 1), flags.get("--pp-size", 1)
    assert flags.get("--max-prefill-tokens", 0) * dp == (flags.get("--chunked-prefill-size") or 0)
    decodes = flags.get("--max-running-requests", 0) if flags.get("--enable-mixed-chunk") else 0
    tokens = flags.get("--chunked-prefill-size")
    return {
        **{"tp_attn": tp // dp, "dp_attn": dp, "pp": pp, "gpus": tp * pp, "ep": flags.get("--ep-size", 1)},
        "sequences": flags.get("--max-running-requests"),
        "tokens": tokens and tokens + decodes,
        "cut": True,
        "cache": {"fp8_e4m3": "fp8", "bf16": "bf16"}[flags["--kv-cache-dtype"]],
        "weights": flags.get("--quantization") or format_of(name, model),
        "context": flags.get("--context-length"),
    }


def of_trtllm(config: dict[str, Any], model: str, name: str) -> dict[str, Any]:
    """Attention DP of TensorRT-LLM takes all of its TP group; limits are those of a rank."""
    tp, pp = config["tensor_parallel_size"], config["pipeline_parallel_size"]
    dp = tp if config["enable_attention_dp"] else 1
    sequences, tokens = config.get("max_batch_size"), config.get("max_num_tokens")
    experts = config.get("moe_expert_parallel_size", 1)
    assert experts * config.get("moe_tensor_parallel_size", tp // experts) == tp
    return {
        **{"tp_attn": tp // dp, "dp_attn": dp, "pp": pp, "gpus": tp * pp, "ep": experts},
        "sequences": sequences and sequences * dp,
        "tokens": tokens and tokens * dp,
        "cut": config.get("enable_chunked_prefill", True),
        "cache": {"fp8": "fp8", "auto": OF_CHECKPOINTS[format_of(name, model)]}[config["kv_cache_config"]["dtype"]],
        "weights": format_of(name, model),
        "context": config.get("max_seq_len"),
    }


#: Format of the KV cache that checkpoints name, by that of their weights; 16 bit where they name none.
OF_CHECKPOINTS = {"bf16": "bf16", "fp8_block": "bf16", "mxfp4": "bf16", "fp8": "fp8", "nvfp4": "fp8"}
READERS = {"vllm": of_vllm, "sglang": of_sglang, "trtllm": of_trtllm}


def format_of(name: str, model: str) -> str:
    """Format of the weights of a published checkpoint."""
    (kind,) = [kind for kind, known in load_checkpoints().models[model].items() if known == name]
    return kind


def told_of(made: Launch, engine: str, model: str) -> dict[str, Told]:
    """Read every pool of emitted files."""
    table, found = load_launcher(engine).options, {}
    table = {**table, **load_launcher("dynamo").options, **load_launcher("llm_d").options}
    for path, text in made.files.items():
        name = path.partition(".")[0]
        if path.endswith(".sh") and name != "router":
            script = text.replace("\\\n", " ")
            (checkpoint,) = [line.removeprefix("PLANNED=") for line in script.splitlines() if "PLANNED=" in line][:1]
            words = [word for word in shlex.split(script.split("exec ")[1]) if "API_KEY" not in word]
            settings = dict(options_in(words, table))
            settings = yaml.safe_load(made.files[f"{name}.yaml"]) if engine == "trtllm" else settings
            found[name] = Told(replicas=None, **READERS[engine](settings, model, checkpoint))
        if made.engine not in ("dynamo", "llm-d") or name == "router":
            continue
        document = yaml.safe_load(text)
        spec = document["spec"]
        for each in spec.get("components", [spec]):
            main = next(iter(containers(each)))
            if "args" not in main:
                continue  # the frontend
            words = main["args"]
            settings = dict(options_in(words, table))
            checkpoint = settings.get("--model") or settings.get("--model-path") or words[0]
            settings = settings.get("--override-engine-args", settings)
            told = Told(replicas=each["replicas"], **READERS[engine](settings, model, checkpoint))
            nodes = each.get("multinode", {}).get("nodeCount", each.get("leaderWorkerTemplate", {}).get("size", 1))
            assert int(main["resources"]["limits"]["nvidia.com/gpu"]) * nodes == told.gpus
            found[each.get("name", name)] = told
    return found


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


CASES = [(name, launcher, own) for name in QUESTIONS for launcher in LAUNCHERS for own in engines_of(launcher)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "launcher", "engine"), CASES)
def test_files_say_what_was_planned(name, launcher, engine):
    design, lengths = planned(name, engine), QUESTIONS[name][3]
    made = ds.launch(design, engine=launcher, backend="" if launcher == engine else engine)
    found = told_of(made, engine, QUESTIONS[name][0])
    assert set(found) == {pool.role for pool in design.pools}
    longest = min(lengths.requests.reach, lengths.resident.most)
    for pool in design.pools:
        told, mapping, recipe = found[pool.role], pool.mapping, pool.setup.precision
        assert told.replicas in (None, pool.instances + pool.spares)
        for key in ("gpus", "tp_attn", "dp_attn", "ep", "pp"):
            assert getattr(told, key) == getattr(mapping, key), key
        assert told.cache == recipe.cache.name
        assert told.weights == (recipe.expert if pool.setup.model.is_moe else recipe.ffn).name
        stages = int(mapping.pp) if pool.role == "prefill" else 1
        assert told.sequences is not None
        assert pool.batch * stages <= told.sequences < (pool.batch + mapping.dp_attn) * stages
        assert told.context is not None
        assert longest < told.context <= max(ROOM * longest + ROOM_STEP, ROOM_STEP)
        budget = pool.replicas.token_budget
        if mapping.chunk_tokens:
            assert told.cut
            assert told.tokens is not None
            assert (
                pool.batch * mapping.chunk_tokens <= told.tokens < (pool.batch + mapping.dp_attn) * mapping.chunk_tokens
            )
        elif pool.role == "prefill":
            assert told.tokens is not None
            assert told.tokens >= max(math.ceil(budget or 0), lengths.mean_isl * mapping.dp_attn)
            assert told.cut or told.tokens >= told.context * mapping.dp_attn
        elif budget is not None:
            assert told.tokens is not None
            assert budget <= told.tokens < budget + 2 * mapping.dp_attn
        else:
            assert told.tokens is None


def test_the_readers_see_a_difference():
    """A flag more, or one less, is another plan."""
    flags = {"--tensor-parallel-size": 4, "--kv-cache-dtype": "fp8", "--max-num-seqs": 8}
    bf16 = {**flags, "--kv-cache-dtype": "bfloat16"}
    name = load_checkpoints().models["llama_3_1_8b"]["bf16"]
    one = of_vllm(flags, "llama_3_1_8b", name)
    assert (one["weights"], one["gpus"], one["cache"]) == ("bf16", 4, "fp8")
    assert of_vllm({**flags, "--quantization": "fp8"}, "llama_3_1_8b", name)["weights"] == "fp8"
    assert of_vllm(bf16, "llama_3_1_8b", name)["cache"] == "bf16"
    assert json.dumps(of_vllm({**flags, "--data-parallel-size": 2}, "llama_3_1_8b", name)) != json.dumps(one)
