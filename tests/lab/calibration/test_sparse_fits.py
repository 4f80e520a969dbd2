"""Fits of sparse attention: modules made by known rates give these rates back; rows without a fit have no forecast."""

import numpy as np
import pytest
from kernel_csv import write_lists

from disagg_sim.facts.efficiency import AttentionPartFit
from disagg_sim.facts.load import load_system
from lab.calibration.kernels.modules import fit_sparse_attention, predict_sparse_attention
from lab.calibration.kernels.registry import OPERATORS
from lab.calibration.kernels.tables import read_tables

H200 = load_system("h200_sxm")
WORDS = "system,framework,version,kernel_source,kind,phase,model,kv_dtype,gemm_dtype"
COLUMNS = f"{WORDS},heads,tp_size,shared_index,batch,new_tokens,past_tokens,latency_us"
TOLD = {"engine": "vllm", "version": "1", "kind": "dsa", "points": 1, "median_error": 0.0, "p90_error": 0.0}
KNOWN = (
    AttentionPartFit(**TOLD, part="chosen", t0=40e-6, token=1e-7, e_compute=0.4, e_memory=0.6, head_tile=64.0),
    AttentionPartFit(**TOLD, part="index", t0=0.0, choice=3e-5, e_compute=0.5, e_memory=0.6),
)


def table(path, rows):
    return read_tables(write_lists(path, COLUMNS, rows))[0].rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Prompts of DeepSeek-V3.2 on 16 and 64 heads, 1 to 65,536 cached tokens."""
    head = ["h200_sxm", "vllm", "1", "k", "dsa", "context", "deepseek_v3_2", "bfloat16", "fp8_block"]
    sizes = [
        (heads, tp, 0, batch, new, past, 1.0)
        for heads, tp in ((16, 8), (64, 2))
        for batch in (1, 4)
        for new in (16, 128, 1024, 4096)
        for past in (1, 1024, 8192, 65_536)
    ]
    return table(tmp_path_factory.mktemp("rows") / "sparse.csv", [head + list(size) for size in sizes])


@pytest.mark.long
def test_known_rates_come_back(rows):
    """Scores and values of 16 heads take the time of 64; the index runs beyond 2,048 tokens."""
    made = rows.assign(latency=predict_sparse_attention(rows, H200, KNOWN))
    assert np.isfinite(made["latency"]).all()
    chosen, index = sorted(fit_sparse_attention(made, H200), key=lambda fit: fit.part)
    assert (chosen.part, chosen.head_tile, index.query_tile) == ("chosen", 64, 0)
    assert [chosen.t0, chosen.token, chosen.e_compute] == pytest.approx([40e-6, 1e-7, 0.4], rel=0.05)
    assert [index.choice, index.e_compute] == pytest.approx([3e-5, 0.5], rel=0.1)
    units = {OPERATORS["sparse_attention"].unit(fit) for fit in (chosen, index)}
    assert len(units) == 1


def test_short_contexts_need_no_index(rows):
    times = predict_sparse_attention(rows, H200, KNOWN[:1])
    beyond = (rows["new_tokens"] + rows["past_tokens"] > 2048).to_numpy()
    assert np.isnan(times[beyond]).all()
    assert np.isfinite(times[~beyond]).all()


def test_a_prompt_of_one_token_and_a_layer_that_shares_a_choice_have_no_forecast(tmp_path):
    head = ["h200_sxm", "vllm", "1", "k", "dsa", "context", "deepseek_v3_2", "bfloat16", "fp8_block", 64, 2]
    found = table(tmp_path / "few.csv", [[*head, 0, 1, 1, 100, 50.0], [*head, 1, 1, 64, 100, 50.0]])
    assert np.isnan(predict_sparse_attention(found, H200, KNOWN)).all()
