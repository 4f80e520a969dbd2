"""The valid inputs that are spoilt: files of a directory and the command that reads them."""

import inspect
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml
from every_command import LEAVES
from spoiling import CANARY, spoilt_arguments, spoilt_bytes, spoilt_content, spoilt_table, spoilt_yaml

from disagg_sim.facts.yaml_files import DIRECTORIES, spec_files
from disagg_sim.simulation.policies.registry import policies

SWEEP: dict[str, Any] = {
    "name": "trial",
    "models": ["llama_3_1_8b"],
    "systems": {"h100_sxm": "fp8"},
    "traffic": [{"isl": 1024, "osl": 128}],
    "modes": ["disaggregated", "colocated", "piggyback"],
    "limits": {"max_gpus": 2, "gpu_cap": 32, "ftl_s": 10.0},
    "profile": "measured",
}
STUDY: dict[str, Any] = SWEEP | {
    "modes": ["disaggregated"],
    "limits": {"ftl_s": 10.0, "ttl_s": ["none", 0.1], "max_gpus": 2, "nic_gb_per_s": "none"},
    "ctx_gen_ratio": ["optimal", 0.5],
    "nvlink_domain": 4,
    "mla_form": ["auto", "naive"],
    "per": "usd",
    "prices": {"h100_sxm": 2.5},
    "engine": "vllm",
    "matching": "exact",
    "traffic": ["short_answers", {"isl": 512, "osl": 32}],
    "block_points": 100,
    "systems": [{"prefill": {"h100_sxm": "fp8"}, "decode": {"h200_sxm": "fp8"}}],
}
SCENARIO: dict[str, Any] = {
    "name": "trial",
    "model": "llama_3_1_8b",
    "system": "h100_sxm",
    "precision": "fp8",
    "trace": {"path": "trace.csv", "rate_scale": [1.0, 2.0]},
    "slo": {"ttft_s": 0.5, "tpot_s": 0.05},
    "deployments": {"two": {"gpus": 4, "prefill": {"tp": 1}, "decode": {}, "colocated": {"instances": 2}}},
    "policies": ["vllm", {"kind": "disaggregated", "label": "split"}],
    "run": {"start_up_s": 1.0, "sample_s": 1.0},
    "seed": 1,
}
SYNTHETIC: dict[str, Any] = SCENARIO | {
    "trace": {"kind": "synthetic", "lengths": {"isl": 256, "osl": 16}, "rate_per_s": 4.0, "requests": 30, "cv": 2.0},
    "policies": [{"kind": "arrow"}, {"kind": "dynamo_load"}, {"kind": "dopd"}, {"kind": "dynaserve"}],
    "capacity": {"criterion": "attainment", "share": 0.9},
}

#: A model with experts and fp8 weights in blocks, as Hugging Face publishes it.
CONFIG: dict[str, Any] = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "hidden_size": 2048},
    **{"max_position_embeddings": 40960, "mlp_only_layers": [0], "moe_intermediate_size": 768},
    **{"intermediate_size": 6144, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8},
    **{"num_hidden_layers": 12, "num_key_value_heads": 4, "vocab_size": 151936},
    "quantization_config": {
        **{"quant_method": "fp8", "weight_block_size": [128, 128]},
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn"],
    },
}

_TIMES = [(i / 4, 200 + 37 * i % 500, 5 + 11 * i % 40) for i in range(24)]
TRACES = {
    "csv": "arrival_s,input_tokens,output_tokens\n" + "".join(f"{t},{a},{b}\n" for t, a, b in _TIMES),
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2023-11-16 18:15:{t:09.6f},{a},{b}\n" for t, a, b in _TIMES),
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    + "".join(f"{int(t)},GPT-4,{a},{b},{a + b},API log\n" for t, a, b in _TIMES),
    "mooncake": "".join(
        f'{{"timestamp": {1000 * t:.0f}, "input_length": {a}, "output_length": {b}, "hash_ids": [{a % 7}]}}\n'
        for t, a, b in _TIMES
    ),
    "lengths": "num_prefill_tokens,num_decode_tokens\n" + "".join(f"{a},{b}\n" for _, a, b in _TIMES),
}

GEMM = "system,framework,version,kernel_source,dtype,m,n,k,latency_us\n" + "".join(
    f"h100_sxm,trtllm,1.0,cublas,fp8,{m},{n},4096,{5 + 2e-6 * m * n * 4096 / 800:.6g}\n"
    for m in (1, 16, 64, 256, 1024, 8192)
    for n in (1024, 2048, 4096, 6144, 8192, 12288)
)
POWER = "system,framework,version,kind,dtype,m,n,k,latency_us,power_w,power_limit_w\n" + "".join(
    f"h100_sxm,vllm,1.0,gemm,bfloat16,{m},{n},4096,{5 + 2e-5 * m * n:.6g},{150 + 60 * math.log2(m):.4g},700\n"
    for m in (1, 16, 64, 256)
    for n in (1024, 2048, 4096, 6144, 8192, 10240, 12288, 16384)
)
EXCLUDE = (
    "file,system,framework,condition,reason\n"
    "gemm.csv,h100_sxm,trtllm,m == 1 and dtype == 'fp8',too slow\n"
    "gemm.csv,*,*,n == 1024,doubtful\n"
)
SERVED = (
    "row_id,hardware,gpu_family,model,precision,framework,spec_decode,mode,isl,osl,concurrency,gpus_total,"
    "tput_total_tok_s_gpu,ttft_median_ms,tpot_median_ms,tpot_mean_ms,ttft_mean_ms,prefill_gpus,prefill_workers,prefill_tp,"
    "prefill_ep,prefill_dp_attention,decode_gpus,decode_workers,decode_tp,decode_ep,decode_dp_attention,qa_flag,tp,ep,"
    "dp_attention\n"
    "r1,gb200,GB200,DeepSeek-R1-0528,fp4,dynamo-trt,none,disaggregated,8192,1024,102,28,1581,900,12.4,,,4,1,4,4,False,"
    "24,3,8,8,True,,,,\n"
    "r2,h100,H100,llama70b,fp8,vllm,none,aggregated,1024,1024,16,2,1200,150,20,21,160,,,,,,,,,,,,2,1,False\n"
)
#: Forward passes of an engine, without and with a past.
PASSES = (
    "engine,backend_version,model_path,system,weight_quantization,kv_cache_dtype,tp,dp,moe_tp,"
    "moe_ep,workload_kind,batch_size,total_prefill_tokens,total_kv_read_tokens,latency_ms,flag\n"
    "vllm,0.25.1,MiniMaxAI/MiniMax-M2.7,h200_sxm,fp8_block,fp8,4,1,4,1,prefill,2,2048,0,60.0,\n"
    "vllm,0.25.1,MiniMaxAI/MiniMax-M2.7,h200_sxm,fp8_block,fp8,4,1,4,1,prefill,2,2048,50000,130.0,\n"
)
#: Memory of servers at start-up.
SERVERS = (
    "model,gpu,tp,pp,dp,dtype,quantisation,kv_cache_dtype,gpu_memory_utilization,max_num_batched_tokens,weights_gib,"
    "weights_how,activation_gib,non_torch_gib,kv_gib,kv_tokens\n"
    "meta-llama/Llama-3.1-8B-Instruct,H100-80GB,2,1,1,bf16,none,auto,0.95,8192,7.51,printed,1.89,2.07,63.76,1044640\n"
    'Qwen/Qwen3-30B-A3B,H100-80GB,1,1,1,bf16,none,fp8,0.95,8192,56.88,"solved, +-0.7 GiB",2.68,0.27,15.4,\n'
)
#: Requests that a server answered, and the arguments of its engine.
REQUESTS = (
    "request,arrival_s,input_tokens,output_tokens,queued_s,first_token_s,last_token_s\n"
    "0,0.0,512,16,0.001,0.06,0.4\n"
    "1,0.05,100,8,0.051,0.12,0.5\n"
)
ARGUMENTS = {
    "engine_kwargs": {
        **{"model": "meta-llama/Llama-3.1-8B", "tensor_parallel_size": 1, "data_parallel_size": 1},
        **{"enable_expert_parallel": False, "max_num_seqs": 128, "max_num_batched_tokens": 2048, "dtype": "bfloat16"},
        **{"kv_cache_dtype": "auto"},
    }
}


def _dump(document: Any) -> bytes:
    return yaml.safe_dump(document, sort_keys=False).encode()


#: What every plan is asked for.
PLAN = ("--model", "llama_3_1_8b", "--system", "h100_sxm", "--ttft", "2 s", "--tpot", "50 ms@p99")
LOAD = ("--isl", "512", "--osl", "64", "--rate", "20")
TABLES = {"gemm": GEMM, "exclude": EXCLUDE, "power": POWER, "served": SERVED, "passes": PASSES, "run": REQUESTS}
TABLES |= {"servers": SERVERS, "trace": TRACES["csv"]}
TABLES |= {name: text for name, text in TRACES.items() if name not in ("csv", "mooncake")}
#: Good files that commands read, by their names.
FILES = {"s.yaml": _dump(SWEEP), "study.yaml": _dump(STUDY), "sc.yaml": _dump(SCENARIO), "sy.yaml": _dump(SYNTHETIC)}
FILES |= {f"{name}.csv": text.encode() for name, text in TABLES.items()}
FILES |= {"mooncake.jsonl": TRACES["mooncake"].encode(), "config.json": json.dumps(CONFIG).encode()}
FILES |= {"run.meta.json": json.dumps(ARGUMENTS).encode()}
#: File -> others that are read with it, and are not named beside it.
BESIDE = {"sc.yaml": ["trace.csv"], "run.csv": ["run.meta.json"]}


@dataclass(frozen=True)
class Spoilt:
    """One input: files, a command, and what the command reads first."""

    kind: str
    files: dict[str, bytes]
    arguments: list[str]
    specs: bool = False  # the directory is searched for spec files
    stores: tuple[str, ...] = ()  # finished results to be copied here first
    then: list[list[str]] = field(default_factory=list)  # commands that follow


def policy(rng: Random) -> Spoilt:
    """A policy file of a scenario, checked, which never runs it."""
    text = Path(str(inspect.getsourcefile(rng.choice(list(policies().values()))))).read_bytes()
    for _ in range(rng.choice((1, 2, 3))):
        text = _spoilt_word(text, rng) if rng.random() < 0.7 else spoilt_bytes(text, rng)
    document = SYNTHETIC | {"policy_file": "mine.py", "policies": [rng.choice(("mine", "arrow", "vllm"))]}
    files = {"mine.py": text + f"\nopen({CANARY!r}, 'w')\n".encode(), "s.yaml": _dump(document)}
    return Spoilt("policy file", files, ["specs", "check", "s.yaml"])


def _spoilt_word(text: bytes, rng: Random) -> bytes:
    """Python with one of its words or signs replaced by another."""
    words = sorted(set(re.findall(rb"\w+|[^\w\s]", text)))
    new = rng.choice((*words, b'"mine"', b"(" * 500, b"-" * 5000 + b"1", b"9" * 5000, b"b''", b"*needs", b"lambda: 0"))
    return text.replace(rng.choice(words or [b""]), new, rng.choice((1, -1)))


def spec(rng: Random) -> Spoilt:
    """A spec file of any kind: checked, shown, used."""
    kind = rng.choice([name for name in DIRECTORIES if spec_files(name)])
    source = rng.choice(sorted(spec_files(kind).values()))
    document = yaml.safe_load(source.read_text(encoding="utf-8"))
    path = str(Path(DIRECTORIES[kind]) / source.name)
    used = {
        "model": ["models", source.stem],
        "hardware": ["systems", source.stem],
        "traffic": ["traffic", source.stem],
        "precision": ["precision", source.stem],
        "profile": ["profile", source.stem],
    }.get(kind)
    sweep = dict(SWEEP, modes=["disaggregated"])
    if used and used[0] in ("models", "traffic"):
        sweep[used[0]] = [used[1]]
    elif used and used[0] == "systems":
        sweep["systems"] = {used[1]: "bf16"}
    elif used and used[0] == "precision":
        sweep["systems"] = {"b200_sxm": used[1]}
    elif used:
        sweep["profile"] = used[1]
    then = [["sweep", "s.yaml", *rng.choice((("--dry-run",), ("--out", "out", "--jobs", "1")))]]
    if kind in ("hardware", "model", "traffic", "precision", "profile"):
        then.insert(0, ["specs", "show", kind, source.stem])
    return Spoilt(
        f"specs {kind}",
        {path: spoilt_yaml(document, rng), "s.yaml": _dump(sweep)},
        ["specs", "check", path],
        specs=True,
        then=then,
    )


def store(rng: Random) -> Spoilt:
    """Finished results, one of their files spoilt, taken up again, judged and compared."""
    again = ["sweep", "s.yaml", "--out", "results", "--jobs", "1"]
    commands = (
        again,
        ["check", "results", "--baseline", "baseline"],
        ["check", "results", "--baseline", "baseline", "--allow-better"],
        ["compare", "results", "baseline", "--json", "changes.json"],
        ["sensitivity", "s.yaml", "--out", "results", "--jobs", "1"],
        ["explain", "results", "--best"],
        ["launch", "results", "--best", "--engine", "vllm"],
        ["report", "results", "--points", "100", "--jobs", "1"],
    )
    return Spoilt("results", {"s.yaml": FILES["s.yaml"]}, rng.choice(commands), stores=("results", "baseline"))


def runs(rng: Random) -> Spoilt:
    """Finished simulations, one of their files spoilt, taken up again or shown."""
    again = ["simulate", "sc.yaml", "--out", "runs", "--jobs", "1"]
    command = rng.choice((again, ["report", "runs"]))
    return Spoilt("runs", {name: FILES[name] for name in ("sc.yaml", "trace.csv")}, command, stores=("runs",))


def spoil_store(root: Path, rng: Random) -> None:
    """One file of a finished store cut, changed, removed, or replaced by a directory."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    path = rng.choice(files)
    action = rng.choice(("bytes", "bytes", "table", "remove", "directory", "other"))
    if action == "table" and path.suffix == ".csv":
        path.write_bytes(spoilt_table(path.read_text(encoding="utf-8"), rng))
    elif action == "remove":
        path.unlink()
    elif action == "directory":
        path.unlink()
        path.mkdir()
    elif action == "other":
        path.write_bytes(rng.choice(files).read_bytes())
    else:
        path.write_bytes(spoilt_bytes(path.read_bytes(), rng))


#: Every option of every command.
OPTIONS = tuple(sorted({name for command in LEAVES.values() for each in command.params for name in each.opts}))


#: One line or more of every command; those of sweeps, scenarios and traces first.
LINES = (
    ["sweep", "s.yaml", "--dry-run"],
    ["sweep", "study.yaml", "--dry-run"],
    ["sweep", "s.yaml", "--out", "out", "--jobs", "1"],
    ["simulate", "sc.yaml", "--out", "out", "--jobs", "1"],
    ["simulate", "sy.yaml", "--out", "out", "--jobs", "2"],
    ["trace", "stats", "trace.csv"],
    ["trace", "stats", "azure.csv", "--kind", "azure", "--json"],
    ["trace", "stats", "burstgpt.csv", "--column", "arrival=Timestamp"],
    ["trace", "stats", "mooncake.jsonl", "--as-is", "--time-unit", "ms"],
    ["trace", "stats", "lengths.csv", "--rate", "2"],
    ["plan", *PLAN, *LOAD],
    ["plan", *PLAN, "--trace", "trace.csv", "--json"],
    ["plan", "--model", "config.json", *PLAN[2:], *LOAD, "--hold-prompts", "none"],
    ["evaluate", *PLAN, *LOAD, "--pool", "colocated:instances=2"],
    ["specs", "list"],
    ["specs", "list", "model"],
    ["specs", "show", "hardware", "h100_sxm"],
    ["specs", "check", "s.yaml"],
    ["model", "import", "config.json", "--name", "mine", "--out", "models"],
    ["check", "results", "--baseline", "baseline"],
    ["compare", "results", "baseline"],
    ["reproduce", "nothing", "--out", "out"],
    ["measure", "--out", "m", "--system", "h100_sxm", "--device", "x"],
    ["calibrate", "kernels", "gemm.csv", "--system", "h100_sxm", "--out", "o.yaml", "--exclude", "exclude.csv"],
    ["calibrate", "engine", "served.csv", "--engine", "vllm", "--out", "v.yaml"],
    ["calibrate", "uncertainty", "gemm.csv", "--out", "u.yaml"],
    ["calibrate", "layouts", "served.csv", "--out", "m.yaml"],
    ["calibrate", "power", "power.csv", "--system", "h100_sxm", "--out", "p.yaml"],
    ["validate", "kernels", "gemm.csv", "--exclude", "exclude.csv", "--out", "out"],
    ["validate", "serving", "served.csv", "--out", "out"],
    ["validate", "ranking", "served.csv", "--out", "out"],
    ["validate", "optimum", "served.csv", "--out", "out"],
    ["validate", "passes", "passes.csv"],
    ["validate", "requests", "run.csv", "--system", "h100_sxm"],
    ["validate", "memory", "servers.csv", "--engine", "vllm"],
    ["sensitivity", "s.yaml", "--out", "results", "--jobs", "1"],
    ["store", "check", "results"],
    ["explain", "results", "--best", "--json"],
    ["launch", "results", "--best", "--engine", "sglang", "--out", "out"],
    ["report", "results", "--no-breakdowns"],
    ["specs", "schema", "plan"],
    ["mcp"],
    ["--version"],
    [],
)
#: Lines that read files.
READING = [line for line in LINES if {*line} & FILES.keys()]


def file(rng: Random) -> Spoilt:
    """A line of a command, and one of the files that it reads; half of them of sweeps, scenarios and traces."""
    words = rng.choice(rng.choice((READING, READING[:10])))
    read = [name for word in words if word in FILES for name in (word, *BESIDE.get(word, ()))]
    name = rng.choice(read)
    spoiled = spoilt_content(name, FILES[name], rng) if rng.random() < 0.9 else FILES[name]
    return Spoilt(f"file {name}", FILES | {name: spoiled}, words, stores=("results",) * ("results" in words))


def command_line(rng: Random, line: list[str] | None = None) -> Spoilt:
    """Options and arguments of every command, or one line as it is, with good files."""
    words = line or spoilt_arguments(rng.choice(LINES), OPTIONS, rng)
    return Spoilt("command line", FILES | {"here/file": b""}, words, stores=("results", "baseline"))


#: Kinds of input with their share of all.
KINDS: tuple[tuple[Callable[[Random], Spoilt], int], ...] = (
    (file, 72),
    (spec, 16),
    (store, 8),
    (runs, 4),
    (policy, 6),
    (command_line, 16),
)


def spoilt(seed: int) -> Spoilt:
    """The input of a seed; the first seeds have a line of every command each, unspoilt."""
    rng = Random(seed)
    if seed < len(LINES):
        return command_line(rng, LINES[seed])
    kinds, shares = zip(*KINDS, strict=True)
    chosen: Callable[[Random], Spoilt] = rng.choices(kinds, shares)[0]
    return chosen(rng)
