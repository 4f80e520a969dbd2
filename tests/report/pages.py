"""Small results whose pages the tests look at."""

import json
from pathlib import Path
from unittest.mock import Mock

from disagg_sim.sweep.fidelity import fidelity_of, write_fidelity
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import PointLimits, SweepSpec, same_system
from disagg_sim.sweep.traffic import Traffic

#: A name that would be a script, were it ever taken as HTML.
SPOILT = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def small_sweep(root: Path) -> Path:
    """Two GPUs of two systems, with error bars."""
    spec = SweepSpec(
        source="small.yaml",
        name="small",
        models=("llama_3_1_8b",),
        pools=(same_system("h100_sxm", "fp8"), same_system("a100_sxm_80gb", "bf16")),
        traffic=(Traffic(isl=1024, osl=128),),
        modes=("disaggregated", "colocated"),
        limits=(PointLimits(max_gpus=2),),
    )
    result = run_sweep(plan_sweep(spec), root, jobs=1, listener=Mock(), outside=True)
    write_fidelity(fidelity_of(result, root, error_bars=True), root)
    return root


def plan_directory(root: Path) -> Path:
    """A plan of four pools, of which attention and feed-forward ranks fail together, of a model with a spoilt name."""
    pool = {"role": "prefill", "instances": 2, "gpus": 6, "system": SPOILT, "precision": "fp8", "engine": "vllm"}
    pool |= {"tp_attn": 2, "dp_attn": 1, "tp_ffn": 2, "ep": 1, "pp": 1, "redundant_slots": 0, "chunk_tokens": 0}
    pool |= {"batch": 64, "token_budget": 2048, "load": 0.8, "memory_bytes": 6e10, "bound": "memory"}
    latency = {"p50": 0.1, "p90": 0.2, "p99": 0.3}
    pools = [{**pool, "role": "encode", "memory_bytes": None, "bound": "compute"}, pool]
    pools += [{**pool, "role": "attention", "gpus": 8, "idle": 0.25}, {**pool, "role": "ffn", "gpus": 4, "idle": 0.5}]
    best = {"mode": "disaggregated", "gpus": 24, "rate_per_s": 10.0, "output_tokens_per_s": 1280.0, "pools": pools}
    best |= {"ttft_s": latency, "tpot_s": latency, "kv_bytes_per_s_per_gpu": 0.0, "usd_per_hour": 12.0}
    best |= {"usd_per_million_output_tokens": 2.6, "output_tokens_per_joule": 0.5}
    best["spares"] = {"target": 0.99, "counts": [1, 0, 2], "availability": 0.9991, "without": 0.97, "capacity": 0.9995}
    best["spares"] |= {"mtbf": [1e6, 2e6, 3e6], "together": [2, 1, 3]}
    words = {"encode": "never measured", "prefill": "served", "decode": "launchable"}
    sure = [{"role": role, "layout": said, "points": 0, "rests_on": {"fitted": 1.0}} for role, said in words.items()]
    question = {"model": SPOILT, "systems": [SPOILT], "mean_isl": 1024.0, "mean_osl": 128.0, "rate_per_s": 10.0}
    question |= {"ttft": {"seconds": 1.0, "share": 0.9}, "tpot": {"seconds": 0.4, "share": 0.9}, "objective": "gpus"}
    plan = {"schema": "disagg-sim/plan/2", "status": "feasible", "binds": "", "question": question, "best": best}
    plan |= {"gain": None, "runners_up": [], "flips": None, "simulated": None, "left_out": [SPOILT]}
    causes = [{"cause": "pass", "band": [0.09, 0.12]}, {"cause": "queue", "band": [0.05, None]}]
    plan["assurance"] = {"pools": sure, "ttft_s": [0.15, None], "ttft_causes": causes}
    plan["tiers"] = [{"name": SPOILT, "share": 0.5, "holds": None, "load": 0.1, "recomputed": 0.05, "loads": False}]
    plan["said"] = {"question": SPOILT, "verdict": [SPOILT], "why": [[SPOILT, SPOILT]], "changes": [SPOILT]}
    (root / "plan.json").write_text(json.dumps(plan))
    (root / "plan.txt").write_text(SPOILT)
    return root
