"""Every ``config.json`` of the data folder: parameters within 1 % of the published number, recipe, and the refusals.

``hub_models.csv`` has the published parameters [1e9] as the model cards, names or element counts have them, and why a
count differs by more. ``FACTS`` holds sizes that were derived apart: by hand, or printed by the publishers.
"""

import csv
import gzip
import json
from functools import cache
from pathlib import Path
from random import Random

import pytest
from fuzz.spoiling import spoilt_document
from shared_data import shared_file

from disagg_sim.errors import SpecError
from disagg_sim.facts.hub.imported import import_model
from disagg_sim.facts.load import load_model, load_precision

MODELS = {row["id"]: row for row in csv.DictReader((Path(__file__).parent / "hub_models.csv").open(encoding="utf-8"))}
IMPORTED = {name: row for name, row in MODELS.items() if not row["refused_for"]}


@cache
def config_file(name, folder):
    """The file with ``hf_quant_config.json`` beside it, unpacked into a folder where one of them is packed."""
    source = shared_file(f"hf_configs/{MODELS[name]['file']}")
    packed = source.with_name(f"{source.name.partition('.json')[0]}.hf_quant_config.json.gz")
    if not packed.is_file():
        return source
    for each in (source, packed):
        content = each.read_bytes()
        unpacked = gzip.decompress(content) if each.suffix == ".gz" else content
        (folder / each.name.removesuffix(".gz")).write_bytes(unpacked)
    return folder / source.name.removesuffix(".gz")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("configs")


def test_nine_of_ten_files_are_read():
    assert len(IMPORTED) >= 0.9 * len(MODELS)


def test_parameters_are_the_published_ones(folder):
    for name in IMPORTED:
        found, row = import_model(config_file(name, folder)), MODELS[name]
        assert found.unknown == ()
        assert found.recipe == row["recipe"]
        if row["exact"]:
            assert found.model.total_params == round(float(row["published_b"]) * 1e9)
        elif row["published_b"]:
            within = abs(found.model.total_params / (float(row["published_b"]) * 1e9) - 1) <= 0.01
            assert within == (not row["off_because"])


@pytest.mark.parametrize("name", sorted(MODELS.keys() - IMPORTED.keys()))
def test_what_cannot_be_expressed_is_refused_with_its_key(name, folder):
    with pytest.raises(SpecError) as refusal:
        import_model(config_file(name, folder))
    assert str(refusal.value).endswith(f".json: {MODELS[name]['refused_for']}")


#: Parameters [1], cache of a token in bf16 [B], state of a sequence [B].
FACTS = {
    # 12 full layers of 48 keep 2 heads of 256, keys and values; 36 states of 32 matrices of 128x128 in fp32 and
    # 3 columns of 8,192 channels in bf16
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (79_674_391_296, 12 * 2 * 2 * 256 * 2, 36 * (32 * 128**2 * 4 + 3 * 8192 * 2)),
    # 24 latents of 576; 69 states of 96 matrices and 3 columns of q, k and v
    "moonshotai/Kimi-K3": (2_779_484_476_000, 24 * 576 * 2, 69 * (96 * 128**2 * 4 + 3 * 3 * 96 * 128 * 2)),
    # 61 latents of 576 and index keys of 128 in fp8 with a scale
    "deepseek-ai/DeepSeek-V3.2": (671_877_944_064, 61 * (576 * 2 + 132), 0),
    # 78 latents; 21 layers have an index of their own
    "zai-org/GLM-5.2": (743_377_019_904, 78 * 576 * 2 + 21 * 132, 0),
    # 6 full layers keep 2 heads of 128; 23 states of 64 heads of 64x128, 3 columns of 4,096 + 2*8*128
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        31_577_940_288,
        6 * 2 * 2 * 128 * 2,
        23 * (64 * 64 * 128 * 4 + 3 * (4096 + 2048) * 2),
    ),
    # 60 layers keep 4 heads of 128, keys and values; 57 an index key of 128 in bf16
    "MiniMaxAI/MiniMax-M3": (426_174_572_928, 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2, 0),
    # 50 windows keep 16 heads of 256, 10 full layers 4 of 512
    "nvidia/Gemma-4-31B-IT-NVFP4": (30_697_345_280, (50 * 16 * 256 + 10 * 4 * 512) * 2 * 2, 0),
    # 9 full layers keep 4 heads of 192 + 128, 39 windows 8
    "XiaomiMiMo/MiMo-V2-Flash": (308_778_780_864, (9 * 4 + 39 * 8) * (192 + 128) * 2, 0),
}


@pytest.mark.parametrize("name", FACTS)
def test_sizes_derived_by_hand(name, folder):
    model = import_model(config_file(name, folder)).model
    bf16 = load_precision("bf16").resolve(model)
    assert (model.total_params, model.kv_bytes_per_token(bf16), model.state_bytes) == FACTS[name]


@pytest.mark.parametrize("name", FACTS)
def test_a_spoilt_config_loads_or_is_one_clear_error(name, folder, tmp_path):
    """Values of every depth become junk: lists of layers, sections of linear and sparse attention, quantisation."""
    whole = json.loads(config_file(name, folder).read_text(encoding="utf-8"))
    path, rng = tmp_path / "c.json", Random(name)
    refused = 0
    for _ in range(20):
        path.write_text(json.dumps(spoilt_document(whole, rng), skipkeys=True, default=str), encoding="utf-8")
        try:
            assert import_model(path).model.total_params > 0
        except SpecError as error:
            refused += 1
            lines = str(error).splitlines()
            assert "c.json: " in lines[0] or all(line.startswith("  - ") for line in lines[1:])
    assert refused > 0


def kinds(model):
    return [(layer.attention.kind, layer.ffn.kind) for layer in model.layers]


def test_deepseek_v4_begins_with_windows_and_alternates(folder):
    """compress_ratios 0, 0, 4, 128, 4, ...: two windows, then entries of 4 tokens chosen and of 128 tokens whole."""
    layers = import_model(config_file("deepseek-ai/DeepSeek-V4-Flash", folder)).model.layers
    ratios = json.loads(shared_file("hf_configs/deepseek-ai--DeepSeek-V4-Flash.json").read_text())["compress_ratios"]
    assert [layer.attention.ratio for layer in layers] == ratios[:43]
    assert [layer.attention.kind for layer in layers] == ["hca", "hca"] + ["csa", "hca"] * 20 + ["csa"]


def test_nemotron_has_layers_of_one_operator(folder):
    """MEMEM*E...: a layer is a mixer or experts."""
    model = import_model(config_file("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", folder)).model
    assert kinds(model)[:7] == [
        ("mamba2", "none"),
        ("none", "moe"),
        ("mamba2", "none"),
        ("none", "moe"),
        ("mamba2", "none"),
        ("gqa", "none"),
        ("none", "moe"),
    ]


def test_kimi_counts_its_layers_from_one(folder):
    """full_attn_layers 4, 8, ...: the fourth layer is the first with latent attention; the last one is, too."""
    attention = [layer.attention.kind for layer in import_model(config_file("moonshotai/Kimi-K3", folder)).model.layers]
    assert attention[:5] == ["kda", "kda", "kda", "mla", "kda"]
    assert attention.count("mla") == 24


def test_every_fourth_layer_of_llama_4_sees_all_tokens(folder):
    layers = import_model(config_file("meta-llama/Llama-4-Maverick-17B-128E-Instruct", folder)).model.layers
    assert [layer.attention.chunk for layer in layers] == [8192, 8192, 8192, 0] * 12


def test_the_yaml_of_every_model_is_the_model(folder, tmp_path):
    for name in IMPORTED:
        found = import_model(config_file(name, folder))
        assert load_model(found.write(tmp_path)) == found.model, name
