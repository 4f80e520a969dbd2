"""All faults of a file at once, each in one clear line."""

import re
from pathlib import Path

import pytest
from fault_tables import faults_of

from disagg_sim.errors import SpecError, UnknownNameError
from disagg_sim.facts.load import check_file, list_specs, load_model, load_system
from disagg_sim.facts.yaml_files import kind_of, spec_files

#: kind/shipped file, what is replaced ``=>`` by what :: the fault, or several
FAULTS = faults_of(r"""
hardware/h200_sxm hbm_bandwidth: 4.8 => hbm_bandwith: 4.8
  missing key 'hbm_bandwidth'
  unknown key 'hbm_bandwith', did you mean 'hbm_bandwidth'?
model/llama_3_1_8b q_heads: 32 => q_head: 32
  attention.gqa: missing key 'q_heads'
  attention.gqa: unknown key 'q_head', did you mean 'q_heads'?
efficiency/h100_sxm format: bf16, e_compute => format: bf16, e_comput
  gemm[0]: missing key 'e_compute'
  gemm[0]: unknown key 'e_comput', did you mean 'e_compute'?
hardware/h200_sxm \n  tdp => \n  tpd
  sources: missing key 'tdp'
  sources: unknown key 'tpd', did you mean 'tdp'?
profile/measured   host: " =>   hots: " :: sources: unknown key 'hots', did you mean 'host'?
hardware/h200_sxm bf16: 989.4 => bf61: 989.4
  peak_flops.bf61: 'bf61' is unknown, did you mean 'bf16'?; allowed: bf16, fp8, nvfp4, int8, tf32, fp32
hardware/h200_sxm hbm_capacity: 141 GB => hbm_capacity: 141 TB
  hbm_capacity: '141 TB' = 1.41e+14 B is out of range; allowed: from 1e+09 to 1e+13 B
hardware/h200_sxm hbm_capacity: 141 GB => hbm_capacity: 80 GB/s
  hbm_capacity: '80 GB/s' has unit 'GB/s'; allowed: B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB
hardware/h200_sxm hbm_capacity: 141 GB => hbm_capacity: 141
  hbm_capacity: 141 has no unit; allowed: B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB
hardware/h200_sxm hbm_capacity: 141 GB => hbm_capacity: much
  hbm_capacity: 'much' is not a number with a unit such as '1 B'
hardware/h200_sxm hbm_capacity: 141 GB => hbm_capacity: -141 GB
  hbm_capacity: '-141 GB' = -1.41e+11 B is out of range; allowed: from 1e+09 to 1e+13 B
hardware/h200_sxm sm_count: 132 => sm_count: 0 :: sm_count: 0 is out of range; allowed: from 1 to 10000
hardware/h200_sxm sm_count: 132 => sm_count: many :: sm_count: 'many' is not a whole number
hardware/h200_sxm [2.50, 7.00] => [7.00, 2.50] :: usd_per_gpu_hour: [7.0, 2.5] is not ascending
hardware/h200_sxm [2.50, 7.00] => [7.00] :: usd_per_gpu_hour: [7.0] must hold two numbers, low and high
hardware/h200_sxm [2.50, 7.00] => cheap :: usd_per_gpu_hour: 'cheap' is not a list
profile/measured memory_utilisation: 0.9\n => memory_utilisation: 90\n
  memory_utilisation: 90 is out of range; allowed: from 1e-06 to 1
profile/measured memory_utilisation: 0.9\n => memory_utilisation: .nan\n
  memory_utilisation: nan is out of range; allowed: from 1e-06 to 1
profile/measured host: 0.5 ms\n => host: 0.5 GB\n :: host: '0.5 GB' has unit 'GB'; allowed: s, ms, us, ns, min, h
profile/measured shared_expert_overlaps_dispatch: true => shared_expert_overlaps_dispatch: 0
  shared_expert_overlaps_dispatch: 0 is not true or false
profile/measured shared_expert_overlaps_dispatch: true => shared_expert_overlaps_dispatch:
  shared_expert_overlaps_dispatch: null is not true or false
precision/fp8 ffn: fp8 => ffn: fp9
  ffn: 'fp9' is unknown, did you mean 'fp8'?; allowed: bf16, fp8, fp8_block, nvfp4, int8, mxfp4, fp8_tensor
precision/fp8 cache: fp8 => cache: int4 :: cache: 'int4' is unknown; allowed: bf16, fp8
model/llama_3_1_8b kind: gqa => kind: gpa
  attention.gqa.kind: 'gpa' is unknown, did you mean 'gqa'?; allowed: gqa, mla, gdn, kda, mamba2, dsa, msa, hca, csa
model/llama_3_1_8b kind: gqa, q_heads => q_heads :: attention.gqa: missing key 'kind'
model/llama_3_1_8b kv_heads: 8 => kv_heads: 7 :: attention.gqa: kv_heads 7 does not divide q_heads 32
model/mixtral_8x7b top_k: 2 => top_k: 9 :: ffn.moe: top_k 9 is above experts 8
model/deepseek_r1 {count: 58, attention: mla, => {count: 58, attention: mal,
  layers[1].attention: 'mal' is unknown, did you mean 'mla'?; allowed: none, mla
model/deepseek_r1 {count: 58, attention: mla, => {count: 58,
  layers[1]: needs either 'attention' and 'ffn', or 'pattern'
model/llama_3_1_8b   - {count: 32, attention: gqa, ffn: dense} =>   [] :: layers: is empty
model/llama_3_1_8b hidden: 4096 => hidden: [4096] :: hidden: [4096] is not a whole number
traffic/reasoning isl: 1024 => isl: 0 :: cases[0].isl: 0 is out of range; allowed: from 1 to 1000000000
traffic/reasoning isl: 1024 => isl: long :: cases[0].isl: 'long' is not a whole number
traffic/mooncake_long_prompts kind: pareto => kind: parteo
  cases[0].isl.kind: 'parteo' is unknown, did you mean 'pareto'?; allowed: constant, log_normal, pareto, empirical
traffic/mooncake_long_prompts maximum: 126195 => maximum: 100 :: cases[0].isl: minimum 27367 is not below maximum 100
traffic/mooncake_long_prompts [0, 0.05, => [0.05,
  cases[0].osl: 9 probabilities and 10 tokens; needs the same number, at least 2
traffic/mooncake_long_prompts [0, 0.05, => [0, 0.5, :: cases[0].osl: probabilities must rise strictly from 0 to 1
traffic/mooncake_long_prompts [1, 7, 20, => [1, 70, 20, :: cases[0].osl: tokens must not fall
traffic/log_normal_4096_512 sigma: 0.985 => sigma: -1 :: cases[0].isl.sigma: -1 is out of range; allowed: from 0 to 10
hardware/h200_sxm_500w power_cap: 500 W => power_cap: 400 W
  power_cap: '400 W' is not from 0.7 times the tdp '700 W' to it: below, no published slowdown follows the law of clocks
efficiency/h800_sxm inherits: h100_sxm => inherits: h100
  unknown efficiency file 'h100', did you mean 'h100_sxm'?; known: SYSTEMS
efficiency/h800_sxm inherits: h100_sxm => inherits: h800_sxm :: 'h800_sxm' cannot inherit from itself
efficiency/h800_sxm reason => raeson
  missing key 'reason'
  unknown key 'raeson', did you mean 'reason'?
""")


def edited(tmp_path, kind, name, old, new):
    text = spec_files(kind)[name].read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / f"{name}.yaml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


def message(path, found):
    return f"{path}: {found[0]}" if len(found) == 1 else "\n  - ".join([f"{path}:", *found])


@pytest.mark.parametrize(("change", "found"), FAULTS, ids=[change for change, _ in FAULTS])
def test_each_fault_is_named(tmp_path, change, found):
    spec, change = change.replace("\\n", "\n").split(" ", 1)
    path = edited(tmp_path, *spec.split("/"), *change.split(" => "))
    with pytest.raises(SpecError) as refusal:
        check_file(path)
    found = [line.replace("SYSTEMS", ", ".join(list_specs("efficiency"))) for line in found]
    assert str(refusal.value) == message(path, found)


def test_all_faults_of_a_file_come_at_once(tmp_path):
    path = edited(tmp_path, "hardware", "h200_sxm", "hbm_bandwidth: 4.8 TB/s", "hbm_bandwith: 4.8 TB/s")
    text = path.read_text(encoding="utf-8").replace(": 141 GB", ": 141 TB").replace("sm_count: 132", "sm_count: 1.5")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as refusal:
        load_system(path)
    assert str(refusal.value) == message(
        path,
        [
            "hbm_capacity: '141 TB' = 1.41e+14 B is out of range; allowed: from 1e+09 to 1e+13 B",
            "missing key 'hbm_bandwidth'",
            "sm_count: 1.5 is not a whole number",
            "unknown key 'hbm_bandwith', did you mean 'hbm_bandwidth'?",
        ],
    )


BROKEN = [
    (b"", "empty file; expected 'key: value' lines"),
    (b"# only a comment\n", "empty file; expected 'key: value' lines"),
    (b"\x89PNG\r\n\x1a\n\xff\xfe", "not a YAML file: it is no UTF-8 text"),
    (b"title: x\x00y\n", r"not a YAML file: .*"),
    (b"- a\n- b\n", "expected 'key: value' lines, found a list"),
    (b"42\n", "expected 'key: value' lines, found the single value 42"),
    (b"title: x\nhidden: [1, 2\n", r"broken YAML: line 3, column 1: .*"),
    (b"title: a: b\n", r"broken YAML: line 1, column 9: mapping values are not allowed .*"),
    (b"\ttitle: x\n", r"broken YAML: line 1, column 1: .*"),
    (b"title: x\nhidden: 1\ntitle: y\n", r"broken YAML: line 3, column 1: key 'title' is given twice"),
    (b"title: x\n7: y\n", "broken YAML: line 2, column 1: key 7 is not text"),
    (b"layers: [{on: 1}]\n", "broken YAML: line 1, column 11: key True is not text"),
    (b"title: !!python/object:os.system {}\n", r"broken YAML: line 1, column 8: could not determine a constructor .*"),
]


@pytest.mark.parametrize(("content", "fault"), BROKEN)
def test_a_file_that_is_no_spec_gets_one_line(tmp_path, content, fault):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError) as refusal:
        load_model(path)
    text = str(refusal.value)
    assert re.fullmatch(f"{re.escape(str(path))}: {fault if '.*' in fault else re.escape(fault)}", text), text


def test_a_missing_file_and_a_directory_get_one_line(tmp_path):
    for path, fault in ((tmp_path / "none.yaml", "no such file"), (tmp_path, "cannot be read: Is a directory")):
        with pytest.raises(SpecError) as refusal:
            load_model(path)
        assert str(refusal.value) == f"{path}: {fault}"


def test_files_below_the_working_directory_are_shown_relative(tmp_path, monkeypatch):
    (tmp_path / "x.yaml").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"^x\.yaml: empty file"):
        load_model("x.yaml")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("hardware", "mi300x"),
        ("efficiency", "h800_sxm"),
        ("precision", "fp8"),
        ("profile", "ideal"),
        ("model", "opt_30b"),
        ("traffic", "reasoning"),
        ("efficiency", "h100_sxm"),
    ],
)
def test_the_kind_of_a_file_elsewhere_is_told_by_its_keys(tmp_path, kind, name):
    path = tmp_path / f"{name}.yaml"
    path.write_bytes(spec_files(kind)[name].read_bytes())
    assert kind_of(path) == kind


def test_a_file_of_no_known_kind(tmp_path):
    path = tmp_path / "notes.yaml"
    path.write_text("colour: red\n", encoding="utf-8")
    with pytest.raises(SpecError) as refusal:
        check_file(path)
    assert str(refusal.value) == (
        f"{path}: keys of no known kind of file; "
        "known kinds: hardware, efficiency, power, precision, profile, engine, scheduler, uncertainty, layout, "
        "evidence, failures, launcher, checkpoint, model, traffic, speculation, sweep, scenario"
    )


@pytest.mark.usefixtures("seed_fits")
def test_dates_and_numbers_in_exponent_form_are_read(tmp_path):
    path = edited(tmp_path, "efficiency", "a100_sxm_80gb", "median_error: 0.04325", "median_error: 4.325e-2")
    text = path.read_text(encoding="utf-8").replace("4.325e-2", "4325e-5")  # without a dot, YAML 1.1 reads text
    path.write_text(text, encoding="utf-8")
    check_file(Path(path))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownNameError) as refusal:
        load_system("h100")
    known = ", ".join(list_specs("hardware"))
    assert str(refusal.value) == f"unknown system 'h100', did you mean 'h100_sxm'?; known: {known}"
