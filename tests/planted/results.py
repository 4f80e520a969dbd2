"""Digests of the results of many commands: what a fault in a formula would change."""

import hashlib
import io
import json
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pandas as pd
import yaml

from disagg_sim.cli.main import run
from disagg_sim.parquet import read_parquet

#: Sweeps whose points, feasible or not, are compared to the last digit.
SWEEPS = {
    "dense": {
        "models": ["llama_3_1_8b", "opt_30b"],
        "systems": {"h100_sxm": "bf16", "a100_sxm_80gb": "bf16"},
        "traffic": [{"isl": 1500, "osl": 257}],
        "modes": ["disaggregated", "colocated", "piggyback"],
        "limits": {"max_gpus": 8, "ftl_s": 2.0},
    },
    "experts": {
        "models": ["deepseek_r1", "gpt_oss_120b", "mixtral_8x7b"],
        "systems": {"h200_sxm": "fp8"},
        "traffic": [{"isl": 8191, "osl": 1025}],
        "modes": ["disaggregated", "colocated", "piggyback"],
        "limits": {"max_gpus": 16},
    },
    "domain": {
        "models": ["deepseek_r1"],
        "systems": {"gb200_nvl72": "nvfp4_fp8kv"},
        "traffic": [{"isl": 65536, "osl": 512}],
        "modes": ["disaggregated"],
        "limits": {"max_gpus": 32},
    },
    "lengths": {
        "models": ["llama_3_1_70b"],
        "systems": {"gb200_nvl72": "nvfp4_fp8kv"},
        "profile": "optimistic",
        "traffic": "log_normal_4096_512",
        "modes": ["disaggregated"],
        "limits": {"max_gpus": 8},
    },
}
POLICIES = [
    "vllm",
    "disaggregated",
    "least_load",
    "round_robin",
    "dynamo_load",
    "dynamo_sla",
    "dopd",
    "arrow",
    "dynaserve",
]
TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(
    f"{0.37 * i + (i % 7) * 0.11:.3f},{200 + (i * 7919) % 4000},{10 + (i * 104729) % 300}\n" for i in range(400)
)
TRACES = {
    "trace.csv": TRACE,
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2023-11-16 18:{i // 60:02}:{i % 60:02}.{i % 10}00,{300 + i * 7},{20 + i % 50}\n" for i in range(300)),
    "mooncake.jsonl": "".join(
        json.dumps(
            {
                "timestamp": 40 * i,
                "input_length": 1000 + 512 * (i % 5),
                "output_length": 60 + i % 9,
                "hash_ids": list(range(i % 4, i % 4 + 2 + i % 5)),
            }
        )
        + "\n"
        for i in range(300)
    ),
}
TWO_PARTS = {
    "prefill": [{"tp": 2, "instances": 2}, {"tp": 4, "instances": 1}],
    "decode": {"tp": 4, "instances": 2},
    "colocated": {"tp": 4, "instances": 4},
}
EQUAL_PARTS = {
    "prefill": {"tp": 2, "instances": 4},
    "decode": {"tp": 2, "instances": 4},
    "colocated": {"tp": 2, "instances": 8},
}
SERVED = {
    "model": "llama_3_1_70b",
    "system": "h100_sxm",
    "precision": "fp8",
    "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
    "policies": POLICIES,
}
SCENARIOS = {
    "arrivals": {
        **SERVED,
        "trace": {"path": "trace.csv", "rate_scale": [1.0, 3.0]},
        "deployments": {"equal": {"gpus": 24, **EQUAL_PARTS}, "unequal": {"gpus": 16, **TWO_PARTS}},
        "run": {"start_up_s": 5.0},
    },
    "prefixes": {
        **SERVED,
        "trace": {"path": "mooncake.jsonl"},
        "deployments": {"equal": {"gpus": 16, **EQUAL_PARTS}},
        "run": {"prefix_cache_tokens": 100_000, "flip_s": 2.0},
    },
}
#: Commands whose answers are compared as JSON.
ANSWERS = (
    "plan --model llama_3_1_70b --system h100_sxm --isl 3000 --osl 300 --rate 10 --ttft 1s --tpot 50ms --json",
    "plan --model deepseek_r1 --system h200_sxm --traffic log_normal_4096_512 --gpus 64 --availability 0.999 --json",
    "explain --model deepseek_r1 --system gb200_nvl72 --dp 8 --ep 8 --batch 256 --isl 4096 --osl 512 --energy --json",
    "explain --model llama_3_1_8b --system h100_sxm --phase colocated --batch 32 --isl 2048 --osl 256 --json",
)
#: Columns and files that measure the machine.
OF_THE_MACHINE = ("wall_s", "requests_per_cpu_s")
LEFT_OUT = ("manifest.json", "timing.jsonl", "summary.md")


def digests() -> dict[str, str]:
    """Digests of results by name."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
        for name, text in TRACES.items():
            Path(name).write_text(text)
            found[f"statistics of {name}"] = _digest(_said("trace", "stats", name, "--json").encode())
        for name, sweep in SWEEPS.items():
            Path(f"{name}.yaml").write_text(yaml.safe_dump({"name": name, **sweep}))
            _said("sweep", f"{name}.yaml", "--out", name, "--jobs", "1", "--no-figures")
            found |= _tables(Path(name))
        for name, scenario in SCENARIOS.items():
            Path(f"{name}.yaml").write_text(yaml.safe_dump({"name": name, **scenario}))
            _said("simulate", f"{name}.yaml", "--out", name, "--jobs", "1", "--no-figures")
            found |= _tables(Path(name))
    return found | {command: _digest(_said(*command.split()).encode()) for command in ANSWERS}


def _said(*arguments: str) -> str:
    """Standard output of a command; what fails is the text of its error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(list(arguments))
    if code:
        print(err.getvalue(), file=sys.stderr)
    return out.getvalue() if code == 0 else f"{code}: {err.getvalue()}"


def _tables(folder: Path) -> dict[str, str]:
    """Digest of the rows of every table in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.name in LEFT_OUT or path.suffix not in (".csv", ".parquet"):
            continue
        table = pd.read_csv(path) if path.suffix == ".csv" else read_parquet(path)
        table = table.drop(columns=[name for name in OF_THE_MACHINE if name in table])
        found[str(path)] = _digest(table.to_csv(index=False).encode())
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
