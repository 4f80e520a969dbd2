"""Power and energy of served runs that other people published, beside the forecast.

Nothing was fitted to these rows: the power of both systems is inherited from the H200 by share of the TDP.

* InferenceX (SemiAnalysisAI/InferenceX-app, fixtures at commit cac6246): DeepSeek-R1 on MI355X, SGLang, tensor
  parallel: ``avg_gpu_power_w`` and ``joules_per_output_token`` of all co-located runs without speculation that say so.
* Splitwise (arXiv 2311.18677, Mutinifni/splitwise-sim at 8f99e7d, ``data/perf_model.csv``): Llama-2-70B in BF16 on
  A100, mean power over the TDP, within the model's context of 4096 tokens. Their engine launched kernels one by one.
"""

import numpy as np
import pytest

import disagg_sim as ds

#: (recipe, GPUs, ISL, OSL, concurrency, W of a GPU, J of an output token)
INFERENCEX = (
    ("mxfp4", 8, 1024, 1024, 8, 561.790, 5.961),
    ("mxfp4", 8, 1024, 1024, 16, 627.531, 3.639),
    ("mxfp4", 8, 1024, 1024, 64, 719.532, 1.786),
    ("fp8", 8, 1024, 1024, 4, 508.061, 11.036),
    ("fp8", 8, 1024, 1024, 8, 561.327, 6.777),
    ("fp8", 8, 1024, 1024, 16, 645.445, 4.610),
    ("fp8", 8, 1024, 1024, 64, 721.397, 2.452),
    ("fp8", 4, 8192, 1024, 64, 858.705, 3.655),
    ("fp8", 8, 8192, 1024, 4, 516.253, 14.187),
    ("fp8", 8, 8192, 1024, 32, 743.606, 5.311),
)
#: (GPUs, ISL, batch, mean power over the TDP); OSL 128
SPLITWISE = (
    (4, 128, 1, 0.594),
    (4, 512, 1, 0.599),
    (4, 512, 4, 0.604),
    (4, 512, 16, 0.642),
    (4, 2048, 1, 0.589),
    (8, 128, 1, 0.435),
    (8, 512, 1, 0.435),
    (8, 512, 4, 0.438),
    (8, 512, 16, 0.458),
    (8, 2048, 1, 0.437),
)


def forecast(at, gpus, isl, osl, batch, together):
    options = ds.Colocation(batch=(batch,), prefill_batch=(together,))
    points = ds.colocated(at, ds.Sharding(tp_attn=gpus, tp_ffn=gpus), ds.lengths(isl, osl), options=options)
    return ds.with_energy(points).iloc[0]


@pytest.fixture(scope="module")
def inferencex():
    setups = {recipe: ds.setup("deepseek_r1", "mi355x", recipe, engine="sglang") for recipe in ("mxfp4", "fp8")}
    rows = [(forecast(setups[recipe], *sizes, 1), watts, joules) for recipe, *sizes, watts, joules in INFERENCEX]
    power = np.array([row["drawn_watts"] / row["total_gpus"] / watts for row, watts, _ in rows])
    ends = [[row[f"drawn_watts_{end}"] / row["total_gpus"] / watts for end in ("p10", "p90")] for row, watts, _ in rows]
    assert all(low < 1.0 < high for low, high in ends)
    energy = np.array([row["joules_per_request"] / row["osl"] / joules for row, _, joules in rows])
    return power - 1, energy - 1


def test_power_of_r1_on_mi355x_is_forecast_within_18_percent_and_always_above(inferencex):
    errors = inferencex[0]
    assert np.median(errors) == pytest.approx(0.127, abs=0.02)
    assert errors.min() > 0
    assert errors.max() < 0.19


def test_joules_of_a_token_of_r1_on_mi355x_are_forecast_within_5_percent_in_the_median(inferencex):
    errors = np.abs(inferencex[1])
    assert np.median(errors) == pytest.approx(0.045, abs=0.02)
    # a known miss: with 8192 prompt tokens the forecast throughput is 27 to 46 % too high, and the energy too low
    assert errors.max() == pytest.approx(0.205, abs=0.03)


@pytest.mark.long
def test_power_of_llama_2_on_a100_is_forecast_within_11_percent():
    at = ds.setup("llama_2_70b", "a100_sxm_80gb", "bf16", engine="vllm_eager")
    rows = [forecast(at, gpus, isl, 128, batch, batch) for gpus, isl, batch, _ in SPLITWISE]
    errors = [
        row["drawn_watts"] / row["tdp_watts"] / share - 1 for row, (*_, share) in zip(rows, SPLITWISE, strict=True)
    ]
    assert np.median(np.abs(errors)) < 0.06
    assert np.max(np.abs(errors)) < 0.12
