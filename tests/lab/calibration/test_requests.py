"""Runs of a real server, request by request: replayed with their own arrivals and limits."""

import json

import numpy as np
import pandas as pd
import pytest
from shared_data import shared_file

import disagg_sim as ds
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.parquet import write_parquet
from disagg_sim.simulation.run_options import RunOptions
from lab.calibration.served.requests import judge_loops, judge_requests

ARGUMENTS = {"model": "meta-llama/Llama-3.1-8B", "tensor_parallel_size": 1, "max_num_seqs": 8}
ARGUMENTS |= {"max_num_batched_tokens": 2048, "dtype": "bfloat16"}


def write_run(folder, table, **changed):
    path = folder / "run.csv"
    table.to_csv(path, index=False)
    (folder / "run.meta.json").write_text(json.dumps({"engine_kwargs": ARGUMENTS | changed}))
    return path


def test_a_run_that_the_simulation_made_is_met_exactly(tmp_path):
    """60 prompts in three seconds on eight slots: most of a TTFT is the queue for a slot."""
    rng = np.random.default_rng(1)
    arrival, prompt, output = np.sort(rng.uniform(0, 3, 60)), rng.integers(50, 2000, 60), rng.integers(2, 100, 60)
    at = ds.setup("llama_3_1_8b", "h100_sxm", "bf16", engine="vllm")
    parts = ds.Replicas(mapping=ds.Sharding(), instances=1, batch=8, token_budget=2048)
    deployment = ds.ServedDeployment(name="one", gpus=1, colocated=(parts,), setup=at)
    trace = ds.Trace(arrival=arrival, input_tokens=prompt, output_tokens=output)
    made = ds.simulate(deployment, trace, "vllm").frame()
    host = at.overheads.request_host  # from the client to the engine
    run = pd.DataFrame({"arrival_s": arrival, "queued_s": arrival, "input_tokens": prompt, "output_tokens": output})
    run = run.assign(first_token_s=made["first_token_s"] - host, last_token_s=made["finish_s"] - host)
    found = judge_requests(write_run(tmp_path, run.sample(frac=1, random_state=0)), "h100_sxm")
    for name, seen in found.measured.items():
        assert found.simulated[name] == pytest.approx(seen, rel=1e-9)
    assert np.median(found.measured["ttft"]) > 5 * found.measured["ttft"].min()


def test_a_dense_model_on_a_card_that_no_fit_saw():
    """Llama-3.1-8B, vLLM 0.19, RTX PRO 6000: 300 ShareGPT requests on 128 slots, half of them wait for ten seconds.

    Kernels are those of an H100 at the peaks of the card, the engine's overheads those of H100, H200 and B200.
    """
    shared_file("served_traces/rtxpro6000_llama31_8b_tp1.meta.json")
    run = judge_requests(shared_file("served_traces/rtxpro6000_llama31_8b_tp1.csv.gz"), "rtx_pro_6000")
    errors = run.errors().set_index("latency")
    for name, median, tail in (("ttft", 0.05, 0.05), ("tpot", 0.03, 0.03), ("latency", 0.03, 0.03)):
        row = errors.loc[name]
        assert row["simulated_median_s"] == pytest.approx(row["measured_median_s"], rel=median)
        assert row["simulated_p99_s"] == pytest.approx(row["measured_p99_s"], rel=tail)
        assert row["request_error"] < 0.05


def test_a_closed_loop_is_played_with_the_layout_the_limits_and_the_share_that_its_line_states(tmp_path):
    """40 prompts on four sessions, made with TP2, 2,048 tokens a step and half of each prompt cached."""
    rng = np.random.default_rng(2)
    prompt, output = rng.integers(500, 6000, 40), rng.integers(2, 50, 40)
    part = ds.Replicas(mapping=ds.Sharding(tp_attn=2, tp_ffn=2), instances=1, batch=16, token_budget=2048)
    at = ds.setup("llama_3_1_8b", "h100_sxm", "bf16", engine="vllm")
    deployment = ds.ServedDeployment(name="two", gpus=2, colocated=(part,), setup=at)
    trace = ds.Trace(arrival=np.zeros(40), input_tokens=prompt, output_tokens=output)
    options = RunOptions(concurrency=4, reuse=Reuse(share=ConstantShare(share=0.5)))
    made = ds.simulate(deployment, trace, "vllm", options=options).frame()
    ttft, whole = made["first_token_s"] - made["arrival_s"], made["finish_s"] - made["arrival_s"]
    table = pd.DataFrame({"run_id": "mine", "order": range(40), "isl": prompt, "osl": output})
    table = table.assign(ttft_ms=1e3 * ttft, e2e_ms=1e3 * whole)
    line = {"model": "meta-llama/Llama-3.1-8B", "checkpoint": "bf16", "kv_dtype": "", "system": "h100_sxm (one node)"}
    line |= {"mode": "aggregated", "engine": "vllm", "tp": 2, "dp": 1, "ep": 1, "concurrency": 4, "max_num_seqs": 16}
    line |= {"max_num_batched_tokens": 2048, "prefix_cache": "on", "prefix_hit_share": 0.5, "turns": 40, "failed": 0}
    others = {"unseen": {}, "failing": {"failed": 20}, "blank": {"prefix_hit_share": None}}
    lines = [line | {"run_id": name} | changed for name, changed in {"mine": {}, **others}.items()]
    pd.DataFrame(lines).to_csv(tmp_path / "runs.csv", index=False)
    rows = pd.concat([table, *(table.assign(run_id=name) for name in ("failing", "blank"))])
    write_parquet(rows.sample(frac=1, random_state=0), tmp_path / "requests.parquet", {})
    (found,), reasons = judge_loops(tmp_path / "requests.parquet")
    for name, seen in found.measured.items():
        assert found.simulated[name] == pytest.approx(seen, rel=1e-6)
    assert [reason.partition(":")[0] for reason in reasons] == list(others)
