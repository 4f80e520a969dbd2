"""Engines are started with the draft tokens of a plan, prefill with the drafter whose cache decode needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

import disagg_sim as ds
from disagg_sim.domain import Mapping
from disagg_sim.launch.engines import sglang_flags, trtllm_config, vllm_flags
from disagg_sim.launch.expressible import expressible
from disagg_sim.launch.weights import Weights
from disagg_sim.launch.workers import Workers

AT = ds.setup("deepseek_r1", "h200_sxm", "fp8", engine="vllm", speculation="mtp 0.8 0.6 0.4")
R1 = Weights(checkpoint="deepseek-ai/DeepSeek-R1")


def workers(role: str, drafts: int = 0, **degrees: int) -> Workers:
    mapping = Mapping(**({"dp_attn": 8, "ep": 8} | degrees), draft_tokens=drafts)
    return Workers(role=role, mapping=mapping, instances=1, setup=AT, batch=64)


def test_decode_drafts_as_planned_and_prefill_holds_the_drafter():
    config = [vllm_flags(workers(*each), R1)["--speculative-config"] for each in (("prefill",), ("decode", 3))]
    assert [each["num_speculative_tokens"] for each in config] == [1, 3]
    assert {each["method"] for each in config} == {"mtp"}


def test_sglang_counts_the_models_own_token_among_the_drafts():
    flags = sglang_flags(workers("decode", 3), R1)
    named = ("--speculative-algorithm", "--speculative-num-steps", "--speculative-num-draft-tokens")
    assert [flags[name] for name in named] == ["EAGLE", 3, 4]


def test_trtllm_has_layers_of_its_module():
    assert trtllm_config(workers("decode", 2), R1)["speculative_config"] == {
        "decoding_type": "MTP",
        "num_nextn_predict_layers": 2,
    }


def test_no_speculation_no_flag():
    plain = replace(workers("decode"), setup=replace(AT, speculation=None))
    assert "--speculative-config" not in vllm_flags(plain, R1)
    assert "speculative_config" not in trtllm_config(plain, R1)


@pytest.mark.parametrize(
    ("engine", "each", "said"),
    [
        ("trtllm", workers("decode", 2, pp=2), "speculative decoding over pipeline stages"),
        (
            "vllm",
            replace(
                workers("decode", 2),
                setup=ds.setup("kimi_k2_5", "h200_sxm", "fp8", speculation="kimi_k2_5_eagle3_thinking"),
            ),
            "a head of eagle3, whose checkpoint nothing names",
        ),
    ],
)
def test_what_an_engine_cannot_start_is_said(engine, each, said):
    assert any(said in reason for reason in expressible([each], engine))
