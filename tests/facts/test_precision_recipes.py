"""Recipes become formats of operator groups, and a GPU refuses arithmetic that it lacks."""

import pytest

from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_model, load_precision, load_system, resolve_precision

#: recipe, model -> (attention projections, ffn, expert, attention arithmetic, cache)
TABLE = {
    ("bf16", "llama_3_1_70b"): ("bf16", "bf16", "bf16", "bf16", "bf16"),
    ("fp8", "llama_3_1_70b"): ("fp8", "fp8", "fp8", "fp8", "fp8"),
    ("fp8", "deepseek_r1"): ("fp8_block", "fp8_block", "fp8_block", "fp8", "fp8"),
    ("fp8", "kimi_k2"): ("fp8_block", "fp8_block", "fp8_block", "fp8", "fp8"),
    ("fp8", "qwen3_235b_a22b"): ("fp8_block", "fp8_block", "fp8_block", "fp8", "fp8"),
    ("fp8_tensor", "qwen3_235b_a22b"): ("fp8", "fp8", "fp8", "fp8", "fp8"),
    ("fp8", "llama_4_maverick"): ("fp8", "fp8", "fp8", "fp8", "fp8"),
    ("fp8_bf16kv", "llama_3_1_70b"): ("fp8", "fp8", "fp8", "bf16", "bf16"),
    ("nvfp4_fp8kv", "llama_3_1_70b"): ("nvfp4", "nvfp4", "nvfp4", "fp8", "fp8"),
    ("nvfp4_fp8kv", "qwen3_235b_a22b"): ("nvfp4", "nvfp4", "nvfp4", "fp8", "fp8"),
    ("nvfp4_fp8kv", "deepseek_r1"): ("fp8_block", "nvfp4", "nvfp4", "fp8", "fp8"),
    ("nvfp4_fp8kv_bf16_attention", "deepseek_r1"): ("fp8_block", "nvfp4", "nvfp4", "bf16", "fp8"),
}


@pytest.mark.parametrize(("recipe", "model"), TABLE)
def test_a_recipe_resolves_by_operator_group(recipe, model):
    p = load_precision(recipe).resolve(load_model(model))
    (projection,) = p.projections
    assert (projection.name, p.ffn.name, p.expert.name, p.attention, p.cache.name) == TABLE[recipe, model]
    assert {p.embedding.name, p.head.name, p.router.name} == {"bf16"}
    assert (p.dispatch_bytes, p.combine_bytes) == ((2.0, 2.0) if recipe == "bf16" else (1.03, 2.0))


def test_nvfp4_counts_its_scales():
    p = load_precision("nvfp4_fp8kv").resolve(load_model("llama_3_1_70b"))
    assert p.ffn.bytes == 4 / 8 + 1 / 16


AMPERE = "bf16, bf16_fp8kv, mxfp4, mxfp4_fp8kv"
WITH_FP8 = (
    "bf16, bf16_fp8kv, fp8, fp8_bf16kv, fp8_block, fp8_block_bf16kv, fp8_tensor, mxfp4, mxfp4_fp8_block, mxfp4_fp8kv"
)
REFUSED = [
    ("fp8", "a100_sxm_80gb", "fp8", AMPERE),
    ("nvfp4_fp8kv", "a100_sxm_80gb", "fp8 and nvfp4", AMPERE),
    ("nvfp4_fp8kv", "h100_sxm", "nvfp4", WITH_FP8),
    ("nvfp4_fp8kv", "mi300x", "nvfp4", WITH_FP8),
]


@pytest.mark.parametrize(("recipe", "system", "lacking", "able"), REFUSED)
def test_a_recipe_that_the_gpu_cannot_run_is_refused_in_one_line(recipe, system, lacking, able):
    with pytest.raises(InputError) as refusal:
        resolve_precision(recipe, load_model("llama_3_1_70b"), load_system(system))
    assert str(refusal.value) == (
        f"precision '{recipe}' needs {lacking} arithmetic, which {system} lacks; recipes that it can run: {able}"
    )


@pytest.mark.parametrize("system", ["b200_sxm", "gb200_nvl72", "gb300_nvl72"])
def test_blackwell_runs_every_recipe(system):
    for recipe in ("bf16", "fp8", "fp8_bf16kv", "nvfp4_fp8kv", "nvfp4_fp8kv_bf16_attention"):
        assert resolve_precision(recipe, load_model("deepseek_r1"), load_system(system)).name == recipe
