"""Engines that can are told to hold prompts back until every attention rank can take one."""

import disagg_sim as ds
from disagg_sim.launch.engines import ENGINES
from disagg_sim.launch.expressible import expressible
from disagg_sim.launch.workers import Weights, workers_of
from disagg_sim.report.words import prefill_text, records

WIDE = ds.Sharding(dp_attn=8, ep=8)
R1 = Weights(checkpoint="deepseek-ai/DeepSeek-R1")


def row(hold_steps):
    at, options = ds.setup("deepseek_r1", "h200_sxm", "fp8"), ds.Colocation(batch=(64,), hold_steps=hold_steps)
    return ds.colocated(at, WIDE, ds.lengths(8192, 1024), ftl_limit=20.0, options=options)


def test_a_wait_in_flags():
    """128 steps of decode, and the pass that ends the wait."""
    (workers,) = workers_of(row((128,)))
    sglang, trtllm = (ENGINES[name].settings(workers, R1) for name in ("sglang", "trtllm"))
    assert sglang["--enable-prefill-delayer"] is True
    assert sglang["--prefill-delayer-max-delay-passes"] == 129
    assert trtllm["attention_dp_config"] == {"enable_balance": True, "timeout_iters": 129, "batching_wait_iters": 0}


def test_no_wait_no_flag():
    (workers,) = workers_of(row(()))
    assert "--enable-prefill-delayer" not in ENGINES["sglang"].settings(workers, R1)
    assert "attention_dp_config" not in ENGINES["trtllm"].settings(workers, R1)


def test_vllm_cannot_wait():
    (said,) = expressible(row((128,)), "vllm")
    assert said.endswith("of vLLM: prefill delay of 128 steps at most, until every rank can take a prompt")
    assert expressible(row((128,)), "sglang") == expressible(row((128,)), "trtllm") == ()


def test_words():
    (point,) = records(row((128,)))
    assert prefill_text(point) == "up to 8 a pass, prefill delay up to 128 steps"
