"""Every shipped file loads, says what the vendors and models say, and marks what it inherits."""

import csv
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from shared_data import shared_file

from disagg_sim.errors import InputError
from disagg_sim.facts.attention import GqaAttention
from disagg_sim.facts.efficiency import SECTIONS, AttentionPartFit
from disagg_sim.facts.ffn import MoeFfn
from disagg_sim.facts.load import (
    check_file,
    list_specs,
    load_checkpoints,
    load_efficiency,
    load_engine,
    load_model,
    load_precision,
    load_profile,
    load_scheduler,
    load_system,
)
from disagg_sim.facts.yaml_files import DIRECTORIES, kind_of, spec_files
from docs.shipped_models import shipped

SYSTEMS = [
    *("a100_sxm_40gb", "a100_sxm_80gb", "b200_sxm", "b300_sxm", "gb200_nvl72", "gb300_nvl72", "gh200", "h100_nvl"),
    *("h100_pcie", "h100_sxm", "h100_sxm_500w", "h200_nvl", "h200_sxm", "h200_sxm_500w", "h20_3e", "h20_sxm"),
    *("h800_sxm", "l40s", "mi300x", "mi325x", "mi355x", "rtx_pro_6000", "tpu7x", "trainium2", "trainium3", "vr_nvl72"),
]
COUNTS = list(csv.DictReader((Path(__file__).parent / "model_counts.csv").open(encoding="utf-8")))
#: Counts of newer models, derived from formulas of their kinds or counted by their publishers; "" = not derived.
COUNTS_2026 = list(csv.DictReader((Path(__file__).parent / "model_counts_2026.csv").open(encoding="utf-8")))
FACTS = [(kind, name) for kind in DIRECTORIES if kind not in ("sweep", "scenario") for name in list_specs(kind)]


def test_every_shipped_file_loads_and_is_recognised():
    for kind, name in FACTS:
        path = spec_files(kind)[name]
        assert kind_of(path) == kind, path
        assert check_file(path) == kind, path
        assert path.stem == name, "file names are canonical"


def test_the_shipped_names():
    assert list(list_specs("hardware")) == SYSTEMS
    assert list(list_specs("efficiency")) == SYSTEMS
    assert list_specs("engine") == ("sglang", "trtllm", "trtllm_engine", "vllm", "vllm_0_12", "vllm_eager", "vllm_v0")
    assert list_specs("profile") == ("ideal", "measured", "optimistic")
    assert set(list_specs("model")) == {row["name"] for row in (*COUNTS, *COUNTS_2026)}
    assert (len(COUNTS), len(COUNTS_2026)) == (36, 50)


def test_vllm_before_v1_fills_its_steps_as_its_scheduler():
    engine, scheduler = load_engine("vllm_v0"), load_scheduler("vllm_v0_2024")
    assert [(each.token_budget, each.max_sequences) for each in scheduler.defaults] == [
        (engine.chunk_tokens, engine.max_running)
    ]


def test_counts_of_every_model_are_exact():
    for row in COUNTS:
        model = load_model(row["name"])
        counted = {
            "total_params": model.total_params,
            "active_params": model.active_params,
            "linear_params_per_token": model.linear_params_per_token,
            "lm_head_params": model.head_params,
            "kv_elements_per_token": model.kv_elements_per_token(),
            "kv_bytes_per_token_bf16": model.kv_bytes_per_token(load_precision("bf16").resolve(model)),
            "kv_bytes_per_token_fp8": model.kv_bytes_per_token(load_precision("fp8").resolve(model)),
            "max_context": model.max_context,
            "layers": len(model.layers),
            "moe_layers": sum(isinstance(layer.ffn, MoeFfn) for layer in model.layers),
        }
        assert counted == {key: int(row[key]) for key in counted}, row["name"]


def test_counts_of_newer_models_are_exact():
    for row in COUNTS_2026:
        model = load_model(row["name"])
        keys = [key for key in ("total_params", "active_params", "linear_params_per_token", "state_bytes") if row[key]]
        assert {key: getattr(model, key) for key in keys} == {key: int(row[key]) for key in keys}, row["name"]


@pytest.mark.parametrize(
    ("name", "published"),
    [("gemma_3_4b", 4_300_079_472), ("gemma_3_27b", 27_432_406_640), ("mistral_small_3_1_24b", 24_011_361_280)],
)
def test_models_with_an_encoder_have_the_published_number_of_elements(name, published):
    model = load_model(name)
    assert model.total_params + model.encoder_params == published


def test_gpt_oss_alternates_windows_and_its_cache_saturates():
    model = load_model("gpt_oss_120b")
    windows = [layer.attention.window for layer in model.layers if isinstance(layer.attention, GqaAttention)]
    assert windows == [128, 0] * 18
    fp8 = load_precision("fp8").resolve(model)
    assert model.kv_bytes(10_000, fp8) == 1024 * 18 * (10_000 + 128)  # 2 * 8 heads * 64 = 1024 elements a layer
    assert model.kind_counts == (18, 18)


def test_fp8_weights_have_block_scales_where_the_fp8_checkpoint_of_the_publisher_has():
    """Of Qwen3-32B there are both; of Qwen3-235B NVIDIA has one with scales of tensors: recipe ``fp8_tensor``."""
    published = load_checkpoints().models
    for name in list_specs("model"):
        publisher = {form: config.partition("/")[0] for form, config in published.get(name, {}).items()}
        if publisher.keys() & {"fp8", "fp8_block"}:
            blocks = publisher.get("fp8_block")
            assert load_model(name).block_scaled_fp8 == (blocks not in (None, publisher.get("fp8"))), name
    scaled = {name for name in list_specs("model") if load_model(name).block_scaled_fp8}
    assert scaled <= published.keys()


def test_a_request_beyond_the_context_limit_is_refused():
    model = load_model("llama_3_1_70b")
    model.check_context(131_072 - 2048, 2048)
    with pytest.raises(InputError) as refusal:
        model.check_context(131_072, 2048)
    assert str(refusal.value) == (
        "isl 131072 + osl 2048 = 133120 tokens exceed the context limit of llama_3_1_70b, "
        "131072 tokens; `allow_long_context` of a sweep or a grid waives it, elsewhere a model's file "
        "of your own with a larger max_context"
    )
    model.check_context(131_072, 2048, allow_long=True)


@pytest.mark.parametrize(
    ("name", "arithmetic", "ridge"),
    [
        ("a100_sxm_80gb", "bf16", 153),
        ("h100_sxm", "bf16", 295),
        ("h100_sxm", "fp8", 591),
        ("h200_sxm", "fp8", 412),
        ("b200_sxm", "nvfp4", 1169),
        ("gb200_nvl72", "bf16", 313),
        ("gb200_nvl72", "nvfp4", 1250),
        ("mi300x", "fp8", 493),
        ("h20_3e", "bf16", 37),
        ("mi355x", "bf16", 315),
        ("l40s", "bf16", 419),
    ],
)
def test_ridge_points(name, arithmetic, ridge):
    """FLOP per HBM byte at which a chip turns compute bound; published figures, rounded to 1 (rel 0.4 %)."""
    system = load_system(name)
    assert system.peak_flops[arithmetic] / system.hbm_bandwidth == pytest.approx(ridge, rel=4e-3)


def test_every_figure_of_a_system_has_a_source():
    for name in SYSTEMS:
        system = load_system(name)
        words = {"name", "title", "vendor", "architecture", "confidence", "sources"}
        figures = {f.name for f in fields(system) if getattr(system, f.name) not in (None, {})} - words
        assert set(system.sources) == figures, name


def rows(system):
    efficiency = load_efficiency(system)
    assert efficiency is not None
    return [row for section in SECTIONS for row in getattr(efficiency, section)]


@pytest.mark.parametrize(
    ("name", "parent"), [("h800_sxm", "h100_sxm"), ("mi300x", "h100_sxm"), ("gb300_nvl72", "gb200_nvl72")]
)
def test_a_system_without_fits_inherits_every_row(name, parent):
    heir = load_efficiency(name)
    assert heir is not None
    assert heir.system == name
    assert heir.measured_on == parent
    assert heir.inherited
    assert len(rows(name)) == len(rows(parent)) > 50
    assert all(row.inherited_from for row in rows(name))


@pytest.mark.parametrize("name", ["a100_sxm_80gb", "b200_sxm", "gb200_nvl72", "h100_sxm", "h200_sxm"])
def test_measured_systems_inherit_only_the_exchange_they_lack(name):
    efficiency = load_efficiency(name)
    assert efficiency is not None
    assert not efficiency.inherited
    taken = [row for row in rows(name) if row.inherited_from]
    across = sum(row.link == "nic" for row in load_efficiency("h100_sxm").alltoall)
    everything = len(load_efficiency("h100_sxm").alltoall)
    expected = {"a100_sxm_80gb": everything, "b200_sxm": across, "gb200_nvl72": across, "h100_sxm": 0, "h200_sxm": 0}
    assert len(taken) == expected[name]
    assert across > 0
    assert all(row.inherited_from == "h100_sxm" and row in efficiency.alltoall for row in taken)
    if name != "a100_sxm_80gb":
        assert {row.link for row in taken} <= {"nic"}


def test_the_heir_of_an_heir_names_the_system_that_was_measured():
    origins = {row.inherited_from for row in rows("gb300_nvl72")}
    assert origins == {"gb200_nvl72", "h100_sxm"}


@pytest.mark.usefixtures("seed_fits")
def test_a_fitted_row_carries_si_units_and_its_provenance():
    efficiency = load_efficiency("h100_sxm")
    assert efficiency is not None
    row = next(r for r in efficiency.gemm if r.engine == "trtllm" and r.format == "fp8_block")
    assert (row.e_compute, row.e_memory, row.blend_q) == (0.527, 0.857, 2.438)
    assert row.t0 == pytest.approx(6.087e-6)
    assert (row.version, row.points) == ("1.3.0rc20", 637)
    assert (row.median_error, row.p90_error) == pytest.approx((0.07825, 0.24161))
    assert (efficiency.date, efficiency.engine_order[0]) == ("2026-11-21", "trtllm")


@pytest.mark.parametrize("name", ["a100_sxm_80gb", "b200_sxm", "gb200_nvl72", "h100_sxm", "h200_sxm"])
def test_fits_are_few_numbers_that_name_their_data_and_what_they_have_not_seen(name):
    """At most 80 numbers an engine, 4 a kernel of linear attention; each tells rows held out, spread, sizes."""
    efficiency = load_efficiency(name)
    made = [row for row in rows(name) if not row.inherited_from and row.engine != "assumed"]
    own = [row for row in made if not getattr(row, "block_rows", 0)]  # kernels in blocks stand in no table
    assert all(not row.points for row in made if row not in own)
    for engine in {row.engine for row in own}:
        mine = [row for row in own if row.engine == engine]
        parts = [row for row in mine if isinstance(row, AttentionPartFit)]
        assert 0 < sum(row.parameters for row in mine) - sum(row.parameters for row in parts) <= 80, engine
        assert sum(row.parameters for row in parts) <= 4 * len(parts)
    assert all(row.points and row.valid for row in own)
    judged = [row for row in own if row.held_out_points]
    assert len(judged) > 0.9 * len(own)
    assert all(0 < row.sigma_log < 1 and 0 < row.held_out_median_error < row.held_out_p90_error for row in judged)
    assert sum(file.held_out for file in efficiency.files) > 0.2 * sum(file.fitted for file in efficiency.files)
    assert all(len(file.sha256) == 64 for file in efficiency.files)


def test_a_system_without_efficiency_file_has_none():
    assert load_efficiency("some_new_gpu") is None


def test_the_ideal_profile_fills_memory_as_the_measured_one():
    ideal, measured = load_profile("ideal"), load_profile("measured")
    memory = ("memory_utilisation", "runtime_bytes", "communication_library_bytes", "resident_deviations")
    assert all(getattr(ideal, key) == getattr(measured, key) for key in memory)


def test_a_version_of_an_engine_differs_by_its_kernel_of_experts_and_its_steps_ahead():
    """And by the memory of its servers, of which no log of that version is known."""
    now, before = replace(load_engine("vllm"), memory=None), load_engine("vllm_0_12")
    same = {"name": now.name, "title": now.title, "expert_kernel": "", "steps_ahead": 1, "sources": now.sources}
    assert replace(before, **same) == now
    assert before.steps_ahead == 0
    assert {key for key in now.sources if before.sources[key] != now.sources[key]} == {"steps_ahead"}
    assert before.expert_kernel in {row.kernel for row in rows("h200_sxm") if getattr(row, "block_rows", 0)}


sys.path.insert(0, str(Path(__file__).parents[2]))  # the scripts of the docs are no part of the package

MODELS = {model.name: model for model in shipped()}


def test_the_table_has_every_model():
    assert tuple(MODELS) == list_specs("model")
    assert all(model.title == load_model(model.name).title for model in MODELS.values())


def test_the_file_is_the_import_of_its_config():
    for name, model in MODELS.items():
        if not model.config:
            continue
        written = spec_files("model")[name].read_text(encoding="utf-8")
        assert model.yaml(shared_file(f"hf_configs/{model.file}")) == written
