"""Forms of serving measurements: every line becomes a row, with our names, layout, lengths, or a reason."""

import csv
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pandas as pd
import pytest
from made_loads import made_run
from made_loads import write_lines as write
from shared_data import shared_file

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import list_specs, load_engine, load_model, load_precision, load_system
from disagg_sim.parquet import write_parquet
from disagg_sim.planning.question import usual_precision
from lab.calibration.names import model_named, names, old_engine, recipe_of, system_named
from lab.calibration.served.boards import tokens_per_gpu
from lab.calibration.served.cells import instance
from lab.calibration.served.evaluate import COLUMNS, engine_of, evaluate
from lab.calibration.served.groups import counted, judged, reasons, summary, write_tables
from lab.calibration.served.launch_flags import FURTHER
from lab.calibration.served.read import read_files, read_rows
from lab.calibration.served.rows import MULTIPLIED, ServingRow, WorkerGroup

#: Published serving measurements, each row of which is read.
MEASURED = (
    *("argonne_llm_inference_bench", "inferencex_dsr1_runs", "inferencex_llama70b_gptoss120b_runs"),
    *("mlperf_inference", "nvidia_gap_runs", "published_points", "splitwise_perf_model", "trtllm_docs_throughput"),
)
#: Tables beside them that hold no runs: read_rows finds none.
WITHOUT_RUNS = ("core_points", "manifest")

R1 = {
    **{"row_id": "r1", "hardware": "gb200", "gpu_family": "GB200", "model": "DeepSeek-R1-0528", "precision": "fp4"},
    **{"framework": "dynamo-trt", "spec_decode": "none", "mode": "disaggregated", "isl": 8192, "osl": 1024},
    **{"concurrency": 102, "gpus_total": 28, "tput_total_tok_s_gpu": 1581.0, "ttft_median_ms": 900},
    **{"tpot_median_ms": 12.4, "tpot_mean_ms": "", "ttft_mean_ms": "", "prefill_gpus": 4, "prefill_workers": 1},
    **{"prefill_tp": 4, "prefill_ep": 4, "prefill_dp_attention": False, "decode_gpus": 24, "decode_workers": 3},
    **{"decode_tp": 8, "decode_ep": 8, "decode_dp_attention": True, "qa_flag": "", "tp": "", "ep": ""},
    **{"dp_attention": ""},
}
ARGONNE = {
    **{"row_id": "a1", "hardware": "Nvidia A100 GPU", "gpu_family": "A100", "gpus_total": 4, "framework": "vLLM"},
    **{"model": "meta-llama/Llama-2-70b-hf", "precision_weights": "", "parallelism": "", "isl": 128, "osl": 128},
    **{"batch": 16, "latency_s": 5.0, "throughput_total_tok_s": 819.2, "ttft_latency_s": ""},
}

MLPERF = {
    **{"row_id": "m", "mlperf_id": "6.0-0001", "submitter": "Somebody", "division": "closed"},
    **{"hardware": "NVIDIA GB300", "gpu_family": "GB300", "gpus_total": 72, "model": "deepseek-r1"},
    **{"precision_weights": "fp4", "framework": "TensorRT 10.14, CUDA 13.1", "scenario": "Server"},
    **{"samples_per_s": 100.0, "tokens_per_sample_out": 3750.0, "value": 375_000.0, "slo_ttft_ms": 2000.0},
    **{"slo_tpot_ms": 80.0, "tpot_p50_ms": 60.0},
}


def test_a_disaggregated_run_knows_its_workers(tmp_path):
    (row,) = read_rows(write(tmp_path / "x.csv", R1))
    assert (row.system, row.model, row.engine, row.recipe) == ("gb200_nvl72", "deepseek_r1", "trtllm", "nvfp4_fp8kv")
    assert row.prefill.mapping == Sharding(tp_attn=4, dp_attn=1, tp_ffn=1, ep=4)
    assert row.workers.mapping == Sharding(tp_attn=1, dp_attn=8, tp_ffn=1, ep=8)
    assert (row.prefill.count, row.workers.count, row.gpus) == (1, 3, 28)
    assert (row.isl, row.osl) == (pytest.approx(0.9 * 8192), pytest.approx(0.9 * 1024))
    told = {(q.name, q.statistic): q.measured for q in row.quantities}
    assert told["tpot", "median"] == pytest.approx(0.0124)
    assert told["throughput", "mean"] == 1581.0
    amd = R1 | {"hardware": "mi355x", "gpu_family": "MI355X", "framework": "mori-sglang"}
    (row,) = read_rows(write(tmp_path / "y.csv", amd))
    assert (row.system, row.engine, row.recipe, row.reason) == ("mi355x", "sglang", "mxfp4", "")


#: How R1 was launched: decode by TP8 EP8 with 8 slots a worker, prefill by four ranks.
LAUNCHED = {
    **{"file": "x", "row_id": "r1", "kind": "recipe", "match": "exact", "f_engine": "sglang"},
    **{"image_script": "lmsysorg/sglang:v0.5.12-cu130", "f_kv_cache_dtype": "", "f_decode_kv_dtype": "fp8_e4m3"},
    **{"f_prefill_workers": 1, "f_prefill_tp": 4, "f_prefill_ep": 4, "f_prefill_dp_attention": True},
    **{"f_prefill_chunked_prefill_tokens": 65_536, "f_prefill_max_num_tokens": 8192, "f_decode_tp": 8},
    **{"f_decode_ep": 8, "f_decode_dp_attention": False, "f_decode_max_batch": 8, "f_decode_eplb_slots": ""},
}


def launched(tmp_path: Path, row: dict[str, object], line: dict[str, object], **further: object) -> ServingRow:
    """A row as its launch says, with what the long table of flags says of it or another row."""
    files = [write(tmp_path / "x.csv", row), write(tmp_path / "joined.csv", line)]
    if further:
        files.append(tmp_path / "joined_flags.parquet")
        told = dict.fromkeys(FURTHER) | {"row_id": row["row_id"]} | further
        write_parquet(pd.DataFrame([told]), files[-1], {})
    (read,), faults = read_files(files)
    assert not faults
    return read


def test_an_exact_launch_says_layout_cache_budget_image_and_slots(tmp_path):
    """SGLang's chunk is that of all ranks: 65,536 over four. 27 in flight wait for 3 x 8 slots, a tenth more do not."""
    lines = [R1 | {"framework": "dynamo-sglang", "row_id": f"r{n}", "concurrency": 28 - n} for n in (1, 2)]
    files = [write(tmp_path / "x.csv", *lines)]
    (plain, _), _ = read_files(files)
    assert (plain.recipe, plain.chunk_tokens, plain.workers.mapping.dp_attn) == ("nvfp4_bf16kv", 0, 8)
    files.append(write(tmp_path / "joined.csv", LAUNCHED, LAUNCHED | {"row_id": "r2"}))
    (row, calm), faults = read_files(files)
    assert faults == []
    assert (row.recipe, row.version, row.chunk_tokens, row.slots) == ("nvfp4_fp8kv", "0.5", 16_384, 0)
    assert row.prefill.mapping == Sharding(tp_attn=1, dp_attn=4, tp_ffn=1, ep=4)
    assert (row.workers.count, row.workers.mapping) == (3, Sharding(tp_attn=8, tp_ffn=1, ep=8))
    late = {each.name: each.reason for each in row.quantities}
    assert (late["tpot"], late["ttft"]) == ("", "more in flight than slots of decode: a wait for one")
    assert not any(each.reason for each in calm.quantities)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        *(({"match": match}, "") for match in ("by date", "ambiguous 2", "")),
        ({"match": "by date", "image_script": "lmsysorg/sglang:0.5.1-rc0.pre1"}, "an early image"),
        ({"match": "by date", "image_script": "lmsysorg/sglang:v0.5.11-cu130", "gpu": "B300"}, "a faulty image"),
        ({"match": "by date", "image_script": "lmsysorg/sglang:v0.5.11-cu130"}, ""),  # faulty on B300 alone
    ],
)
def test_a_launch_that_is_not_known_exactly_changes_nothing(tmp_path, line, reason):
    """An early or faulty image is not judged however its launch is known."""
    gpu = line.get("gpu", "GB200")
    row = launched(tmp_path, R1 | {"hardware": gpu.lower(), "gpu_family": gpu}, LAUNCHED | line)
    (plain,) = read_rows(tmp_path / "x.csv")
    assert row.reason.partition(":")[0] == reason
    assert repr(replace(row, reason="")) == repr(plain)  # NaN equals nothing


def test_what_the_source_suspects_is_not_judged(tmp_path):
    spread = NEWER | {"qa_flag": "spread: runs of this point differ by more than 1.35 x"}
    (row,) = read_rows(write(tmp_path / "y.csv", spread))
    assert row.reason == "runs of this point differ by more than 1.35 times"
    table = evaluate(read_rows(write(tmp_path / "x.csv", R1 | {"qa_flag": "ttft_suspect"})))
    assert table.set_index("quantity")["evaluated"].to_dict() == {"tpot": True, "ttft": False, "throughput": True}


def test_rows_that_cannot_be_evaluated_keep_their_place_with_a_reason(tmp_path):
    told = {
        "": {},
        "speculative decoding: a step makes more than one token": {"spec_decode": "mtp"},
        "the split of GPUs into prefill and decode is not stated": {"prefill_workers": ""},
        "no model": {"model": "Unheard-Of 9B"},
        "no system 'TPU'": {"gpu_family": "TPU"},
        "no engine profile for 'abacus'": {"framework": "abacus"},
        "board 'gb200-maxq' is not the standard part": {"hardware": "gb200-maxq"},
    }
    rows = read_rows(write(tmp_path / "x.csv", *(R1 | change for change in told.values())))
    assert [row.reason for row in rows] == list(told)
    table = evaluate(rows)
    assert list(table.columns) == list(COLUMNS)
    assert table.groupby("reason").size().sum() == 3 * len(told)  # three quantities a row, none dropped
    assert table["evaluated"].sum() == 3


def test_a_static_batch_of_the_argonne_study(tmp_path):
    rows = read_rows(write(tmp_path / "x.csv", ARGONNE, ARGONNE | {"ttft_latency_s": 0.4, "osl": 1}))
    assert rows[0].system == "a100_sxm_40gb"
    assert rows[0].engine == "vllm_v0"
    assert [q.name for q in rows[0].quantities] == ["latency", "throughput"]
    assert [q.name for q in rows[1].quantities] == ["ttft"]
    table = evaluate(rows)
    latency, throughput = table["predicted"][:2]
    assert throughput == pytest.approx(16 * 256 / latency)


def test_a_row_faster_than_memory_is_not_evaluated(tmp_path):
    """138 GB of weights over 4 * 1.555 TB/s are 22 ms a token: 128 of them cannot take 0.5 s."""
    (row,) = read_rows(write(tmp_path / "x.csv", ARGONNE | {"latency_s": 0.5}))
    assert set(evaluate([row])["reason"]) == {"faster than its GPUs can read the weights"}


def test_saturated_by_memory_by_flag_and_by_waiting(tmp_path):
    calm = R1 | {"concurrency": 8}
    lines = [calm, calm | {"concurrency": 60_000}, calm | {"qa_flag": "check"}, calm | {"ttft_median_ms": 30_000}]
    table = evaluate(read_rows(write(tmp_path / "x.csv", *lines)))
    assert table[table["quantity"] == "tpot"]["saturated"].tolist() == [False, True, True, True]


def test_the_engine_of_an_mlperf_row_is_the_one_that_ran_its_model(tmp_path):
    """A v6.0 cell lists the software of all benchmarks of a submission; its vLLM ran Qwen3-VL."""
    cell = "TensorRT 10.14, CUDA 13.1, TensorRT-LLM feat/1.2-mlpinf, vLLM CentML:mlperf-inf-mm-q3vl-v6.0"
    cells = (cell, "vLLM 0.10.0, RHEL 9.6", "LLM-D v0.5.0 ,OpenShift 4.21", "TensorRT 10.14, CUDA 13.1")
    rows = read_rows(write(tmp_path / "x.csv", *(MLPERF | {"framework": each} for each in cells)))
    assert [row.engine for row in rows] == ["trtllm", "vllm", "vllm", "trtllm"]
    told = {(q.name, q.statistic): q.measured for q in rows[0].quantities}
    assert told["tpot", "median"] == pytest.approx(0.06)  # logs of v6.0 state no mean


def test_a_length_that_no_source_states_is_not_assumed(tmp_path):
    """gpt-oss: 5,011 tokens in, as published. That of OpenOrca is not: no row of Llama 2 is judged."""
    lines = [
        MLPERF | {"model": name, "scenario": "Offline"} for name in ("gpt-oss-120b", "deepseek-r1", "llama2-70b-99")
    ]
    rows = read_rows(write(tmp_path / "x.csv", *lines))
    assert [row.isl for row in rows[:2]] == [pytest.approx(5011, rel=0.005), 800.0]
    table = evaluate(rows)
    assert table["evaluated"].tolist() == [True, True, False]
    assert table["reason"].tolist()[2] == "lengths are not stated"


def test_requests_of_mlperf_come_as_scheduled_and_results_count_what_was_completed(tmp_path):
    """110 a second come and 100 are completed while the last answers end: 100 x 3750 / 72 tokens/s/GPU."""
    lines = [
        MLPERF | {"scheduled_samples_per_s": 110.0},
        MLPERF | {"scheduled_samples_per_s": ""},
        MLPERF | {"scheduled_samples_per_s": "", "scenario": "Offline", "slo_tpot_ms": ""},
    ]
    rows = read_rows(write(tmp_path / "mlperf.csv", *lines))
    assert [row.rate for row in rows] == [110.0, 100.0, 100.0]
    assert [tokens_per_gpu(row) for row in rows] == pytest.approx([100.0 * 3750.0 / 72] * 3)


def test_models_by_their_many_names():
    told = {
        "Llama-70B (InferenceX key llama70b; aiconfigurator labels it Llama-3.1-70B)": "llama_3_1_70b",
        "nvidia/Llama-3.1-8B-Instruct-FP8": "llama_3_1_8b",
        "llama2-70b-99.9": "llama_2_70b",
        "DeepSeek-V3.2": "deepseek_v3_2",
        "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek_v2_lite",
        "DeepSeek-R1-Distill-Llama-70B": "",
        "DeepSeek-V4.1": "",
        "GLM-5.3-Flash (nvfp4)": "glm_5_3_flash",
    }
    assert {said: model_named(said) for said in told} == told


def test_names_of_boards_and_recipes():
    assert system_named("H100", "NVIDIA H100-NVL-94GB") == ("h100_nvl", "")
    assert system_named("H200", "H200-NVL MaxQ") == ("h200_nvl", "board 'H200-NVL MaxQ' is not the standard part")
    assert system_named("GB200", "GB200 192GB (NVL72)") == ("gb200_nvl72", "")
    assert recipe_of("fp4", "bf16", "llama_3_1_70b") == "nvfp4_bf16kv"
    assert recipe_of("fp4", "fp8", "gpt_oss_120b") == "mxfp4_fp8kv"
    assert recipe_of("MXFP4 (fp8 kv)", "fp8", "gpt_oss_120b") == "mxfp4_fp8kv"
    assert recipe_of("mxfp4", "bf16", "deepseek_r1") == "mxfp4"
    assert recipe_of("fp8_block", "bf16", "llama_3_1_8b") == "fp8_block_bf16kv"
    assert recipe_of("", "bf16", "llama_2_7b") == "bf16"
    assert [recipe_of("fp8_tensor", cache, "qwen3_235b_a22b") for cache in ("fp8", "bf16")] == [
        "fp8_tensor",
        "fp8_bf16kv",
    ]


def test_every_name_of_the_tables_is_shipped():
    assert set(names()["models"].values()) - {""} <= set(list_specs("model"))
    assert set(names()["systems"].values()) <= set(list_specs("hardware"))
    engines = set(names()["engines"].values()) | set(names()["source_engines"].values())
    assert engines | {old_engine(name) for name in engines} <= set(list_specs("engine"))
    recipes = {recipe_of(w, c, m) for w in ("", "fp8", "fp4") for c in ("bf16", "fp8") for m in ("x", "gpt_oss_20b")}
    assert recipes <= set(list_specs("precision"))


NEWER = {
    "row_id": "n",
    "hardware": "b200",
    "gpu_family": "B200",
    "model": "moonshotai/Kimi-K2.5",
    "precision": "fp4",
    "gemm_quant": "nvfp4",
    "framework": "vllm",
    "mode": "aggregated",
    "isl": 1024,
    "osl": 1024,
    "concurrency": 4,
    "ttft_mean_ms": 100,
    "tpot_mean_ms": 10,
    "tp": 4,
    "attention_dp": 1,
    "moe_ep": 4,
    **{f"{side}_{name}": "" for side in ("prefill", "decode") for name in ("workers", "tp", "attention_dp", "moe_ep")},
}
NEWER_SPLIT = NEWER | {
    **{"gpu_family": "GB200", "mode": "disaggregated", "prefill_workers": 1, "prefill_tp": 1},
    **{"prefill_attention_dp": 4, "prefill_moe_ep": 4, "decode_workers": 4, "decode_tp": 4, "decode_attention_dp": 1},
    **{"decode_moe_ep": 1},
}


def test_newer_models_state_degrees(tmp_path):
    """20 GPUs: one prefill worker of 4 ranks, four decode workers on 4 GPUs; TP 4 times 4 ranks would be 16 of 8."""
    lines = [NEWER, NEWER_SPLIT, NEWER | {"attention_dp": 4, "moe_ep": 16}]
    lines += [NEWER_SPLIT | {"decode_workers": ""}, NEWER | {"gemm_quant": "int4_wo"}]
    rows = read_rows(write(tmp_path / "x.csv", *lines))
    assert (rows[0].model, rows[0].recipe, rows[0].isl) == ("kimi_k2", "nvfp4_bf16kv", pytest.approx(921.6))
    assert rows[0].workers.mapping == Sharding(tp_attn=4, dp_attn=1, tp_ffn=1, ep=4)
    assert (rows[1].gpus, rows[1].workers.count) == (20, 4)
    assert rows[1].prefill.mapping == Sharding(tp_attn=1, dp_attn=4, tp_ffn=1, ep=4)
    assert [row.reason for row in rows] == [
        "",
        "",
        MULTIPLIED,
        "the workers and their GPUs are not stated",
        "no recipe of 4-bit integer weights",
    ]


#: How such a run was launched by vLLM: the only flags of its day, for the image of the row.
SCRIPTED = {
    **{"file": "x", "row_id": "n", "kind": "script", "match": "by date", "image_match": True, "n_flag_sets": 1.0},
    **{"f_engine": "vllm", "f_prefill_workers": "", "f_tp": 4.0, "f_ep": "", "f_expert_parallel": True},
    **{"f_dp_attention": "", "f_kv_cache_dtype": "fp8", "f_max_num_tokens": 2048.0, "image_script": "vllm:v0.19.0"},
}


def newer(tp: int, ranks: int, ep: int) -> dict[str, object]:
    """A run on one node with these degrees stated."""
    return NEWER | {"tp": tp, "attention_dp": ranks, "moe_ep": ep}


def a_worker(tp: int, side: str) -> dict[str, object]:
    """Flags of a recipe of vLLM, which states one GPU a rank, and as many ranks as a worker has GPUs."""
    flags = {"gpus_per_worker": float(tp), "tp": 1.0, "ep": "on", "dp_attention": True}
    return {f"f_{side}_{name}": value for name, value in flags.items()}


SGLANG, WIDE = R1 | {"framework": "dynamo-sglang"}, LAUNCHED | {"f_decode_dp_attention": True}
COPIES = {"prefill_eplb_slots": "redundant 32"}
SCRIPT = LAUNCHED | {"kind": "script", "f_scheduler_recv_interval": 30.0, "f_batch_wait_timeout_iters": 20.0}
SCRIPT |= {"f_num_warmups_per_conc": 0.0, "f_prompts_per_concurrency": 50, "f_adp_timeout_iters": 60.0}
COLD = {"cold": True, "waves": 50}
SENDS = LAUNCHED | {"f_decode_stream_interval": 50.0}
STORED = SCRIPTED | {"kind": "recipe", "f_prefill_workers": 1.0, "f_decode_kv_dtype": "fp8"}
STORED |= a_worker(4, "prefill") | a_worker(16, "decode")
TWO_SIDES = NEWER_SPLIT | {"prefill_tp": 4, "prefill_attention_dp": 1, "decode_workers": 1, "decode_tp": 16}
TWO_SIDES |= {"decode_moe_ep": 16}
READS = {"reason": "", "recipe": "nvfp4_fp8kv", "chunk_tokens": 2048}
DOUBTED = {"recipe": "nvfp4_bf16kv", "chunk_tokens": 0, "reason": MULTIPLIED}
#: A row, its launch, what the long table of flags has of it, and what the row then says.
LAUNCHES = [
    # 288 places for 256 experts are 32 copies; a budget of TensorRT-LLM is that of a rank, and so are its slots
    (
        *(R1, WIDE | {"f_decode_eplb_slots": "redundant 32"}, {}),
        {"workers.mapping": Sharding(dp_attn=8, ep=8, redundant_slots=32), "chunk_tokens": 8192, "slots": 8},
    ),
    (R1, LAUNCHED, COPIES, {"prefill.mapping.redundant_slots": 32}),
    # decode ranks of SGLang gather without a backend of all-to-all: they count as with experts under TP
    (SGLANG, WIDE, {"decode_moe_a2a": "deepep"}, {"workers.mapping": Sharding(dp_attn=8, ep=8)}),
    (SGLANG, WIDE, {"decode_moe_a2a": ""}, {"workers.mapping": Sharding(dp_attn=8, tp_ffn=8)}),
    # a launch on other GPUs keeps the stated layout of that side
    (
        *(R1, LAUNCHED | {"f_decode_tp": 16}, {}),
        {"workers.mapping": Sharding(dp_attn=8, ep=8), "prefill.mapping": Sharding(dp_attn=4, ep=4)},
    ),
    # a format left to the checkpoint: that of gpt-oss names none, which is 16 bit, those of NVFP4 do
    *(
        (R1 | {"model": model}, LAUNCHED | {"f_decode_kv_dtype": said}, {}, {"recipe": recipe})
        for model, said, recipe in [
            *(("openai/gpt-oss-120b", "auto", "mxfp4"), ("openai/gpt-oss-120b", "", "mxfp4_fp8kv")),
            ("DeepSeek-R1-0528", "auto", "nvfp4_fp8kv"),
        ]
    ),
    # a script of one node, one set of flags valid on its day: how its scheduler takes requests, and how many were sent
    *(
        (R1, SCRIPT | {"match": match}, {}, {"poll_steps": 30, "gather_steps": 20, "held_iters": 60} | COLD)
        for match in ("exact", "by date")
    ),
    (R1, SCRIPT | {"match": "layout only"}, {}, {"poll_steps": 1, "gather_steps": 0, "cold": False, "waves": 10}),
    # how often decode workers send: TensorRT-LLM a first token at once, and so do workers behind SGLang's own router
    *(
        (SGLANG, SENDS | {"match": match}, {"frontend_type": "dynamo"}, {"poll_steps": 50})
        for match in ("exact", "by date")
    ),
    (SGLANG, SENDS | {"match": "layout only"}, {"frontend_type": "dynamo"}, {"poll_steps": 1}),
    (R1, SENDS, {"frontend_type": "dynamo"}, {"poll_steps": 1}),
    # whether steps with decodes are formed ahead, where the launch says so
    (R1, SCRIPT, {"overlap_scheduler": "off", "decode_overlap_scheduler": "on"}, {"overlap": "off"}),
    (R1, LAUNCHED, {"overlap_scheduler": "off", "decode_overlap_scheduler": "on"}, {"overlap": "on"}),
    # the script of the image says what a source multiplied
    *(
        (newer(*stated), SCRIPTED | flags, {"dp": ranks}, READS | {"workers.mapping": mapping})
        for stated, flags, ranks, mapping in [
            ((4, 4, 16), {}, 1, Sharding(tp_attn=4, ep=4)),  # 16 GPUs are TP4 times EP4 of the same four
            ((2, 2, 4), {"f_tp": 1.0}, 2, Sharding(dp_attn=2, ep=2)),  # two ranks of one GPU, stated as four GPUs
            ((4, 1, 1), {}, 1, Sharding(tp_attn=4, ep=4)),  # EP that the row leaves out
            ((8, 1, 1), {}, 1, Sharding(tp_attn=8, tp_ffn=8)),  # a launch on other GPUs
            ((4, 1, 1), {"f_engine": "sglang"}, 2, Sharding(tp_attn=4, ep=4)),  # whose TP counts all ranks
            ((4, 1, 1), {"f_dp_attention": True}, 1, Sharding(dp_attn=4, ep=4)),
            ((4, 1, 1), {"f_expert_parallel": False, "f_ep": 2.0}, 1, Sharding(tp_attn=4, tp_ffn=2, ep=2)),
        ]
    ),
    # that of another image, or one of several sets of flags, changes nothing
    *(
        (newer(4, 4, 16), SCRIPTED | doubt, {"dp": 1}, DOUBTED)
        for doubt in ({"image_match": False}, {"n_flag_sets": 2.0}, {"match": "layout only"})
    ),
    # the only recipe of the day with the workers of the row says their ranks
    *(
        (
            *(TWO_SIDES, STORED | doubt, {"dp": 0}),
            {"prefill.mapping.dp_attn": prefill, "workers.mapping.dp_attn": decode, "workers.mapping.ep": 16}
            | {"prefill.gpus": 4, "workers.gpus": 16},
        )
        for doubt, prefill, decode in [
            *(({"layout_agrees": "4/4"}, 4, 16), ({"layout_agrees": "3/4"}, 1, 1), ({}, 1, 1)),
            ({"layout_agrees": "4/4", "n_flag_sets": 2.0}, 1, 1),
        ]
    ),
    # 128 heads do not divide over 24 GPUs: nothing of such a launch counts
    (
        *(R1 | {"decode_workers": 1}, LAUNCHED | {"f_decode_tp": 24, "f_decode_ep": 24}, {}),
        {"workers.mapping": Sharding(dp_attn=24, ep=24, redundant_slots=8), "prefill.mapping.dp_attn": 1}
        | {"chunk_tokens": 0},
    ),
]


@pytest.mark.parametrize(("row", "line", "further", "says"), LAUNCHES)
def test_a_row_takes_what_its_launch_says(tmp_path, row, line, further, says):
    found = launched(tmp_path, row, line, **further)
    assert {name: attrgetter(name)(found) for name in says} == says


@pytest.mark.parametrize(
    ("version", "tp", "kernel"), [("0.12", 4, "deepgemm_contiguous"), ("0.12", 8, ""), ("0.18", 4, ""), ("", 4, "")]
)
def test_experts_of_a_version_are_those_that_it_runs_by_default(version, tp, kernel):
    """vLLM 0.12 takes DeepGEMM for experts in fp8 blocks unless TP is 8, and forms no steps ahead unless it is told to;
    nothing else of its profile differs.
    """
    row = made_run(model="qwen3_235b_a22b", version=version)
    engine = engine_of(replace(row, workers=WorkerGroup(mapping=instance(tp, ep=1, dp=0))), {})
    assert engine.expert_kernel == kernel
    assert engine.steps_ahead == (version != "0.12")
    assert replace(engine, expert_kernel="", steps_ahead=1) == load_engine("vllm")
    dense = replace(row, model="llama_3_1_8b", workers=WorkerGroup(mapping=instance(tp, ep=1, dp=0)))
    assert [engine_of(replace(dense, overlap=said), {}).steps_ahead for said in ("on", "off")] == [1, 0]
    assert engine_of(replace(dense, overlap="on"), {}) == load_engine("vllm")


def test_tables_of_a_run(tmp_path):
    """Rows of one name are one; the split follows the configuration, not the load."""
    rows = read_rows(
        write(tmp_path / "x.csv", *(R1 | {"concurrency": n} for n in (8, 64, 256)), R1 | {"spec_decode": "mtp"})
    )
    assert len({row.held_out for row in rows}) == 1
    table = evaluate(rows)
    assert counted(table)[["rows", "plain_rows", "evaluated"]].to_numpy().tolist() == [[1, 1, 1]]
    assert summary(table)["rows"].sum() == 9
    assert set(judged(table)["part"]) == {"new"}
    assert reasons(table)["lines"].sum() == 3
    write_tables(table, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"rows.csv", "summary.csv", "groups.csv", "bars.csv", "counts.csv", "reasons.csv"}


@pytest.mark.parametrize("name", [*MEASURED, *WITHOUT_RUNS])
def test_every_measured_file_is_read_and_every_row_kept(name):
    path = shared_file(f"measured/{name}.csv")
    with path.open(encoding="utf-8") as stream:
        lines = sum(1 for _ in csv.DictReader(stream))
    assert len(read_rows(path)) == (0 if name in WITHOUT_RUNS else lines)


def test_published_runs_on_hopper_are_judged_with_the_weights_that_plans_take():
    """The cache differs where an engine keeps that of an fp8 checkpoint in bf16 by default, and plans do not."""
    spec = load_model("minimax_m2_5")
    rows = read_rows(shared_file("measured_2026/inferencex_newmodels_runs.csv"))
    found = [(row.recipe, load_system(row.system)) for row in rows if row.model == "minimax_m2_5"]
    pairs = {(recipe, usual_precision(spec, system)) for recipe, system in found if system.architecture == "Hopper"}
    weights = attrgetter("attention_projection", "ffn", "expert", "embedding", "head", "router")
    assert pairs
    for measured, planned in pairs:
        assert weights(load_precision(measured).resolve(spec)) == weights(load_precision(planned).resolve(spec))


def test_pages_of_tensorrt_llm_run_the_fp8_checkpoints_of_nvidia():
    found = {(row.model, row.recipe) for row in read_rows(shared_file("measured/trtllm_docs_throughput.csv"))}
    assert {recipe for model, recipe in found if model == "qwen3_235b_a22b"} == {"fp8_tensor", "nvfp4_fp8kv"}
    assert {model for model, recipe in found if recipe == "fp8_tensor"} == {"qwen3_235b_a22b"}
