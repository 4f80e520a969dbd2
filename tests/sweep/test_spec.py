"""A sweep file: what it says, one line for each of its faults, and which inputs it rests on."""

import copy
import math
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from fault_tables import faults_of
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.errors import SpecError
from disagg_sim.facts.load import load_traffic
from disagg_sim.facts.yaml_files import PATH_VARIABLE, list_specs, spec_files
from disagg_sim.sweep.cases import cases_of
from disagg_sim.sweep.digests import differences, inputs_of
from disagg_sim.sweep.spec import ColocatedOptions, PointLimits, load_sweep, same_system
from disagg_sim.sweep.traffic import Traffic

GOOD = """
name: trial
models: [llama_3_1_8b]
systems: {h100_sxm: fp8}
traffic:
  - {isl: 1024, osl: 128}
limits: {ftl_s: 10.0}
profile: measured
"""

#: Keys in place of those of ``GOOD``, or what of its text is replaced ``=>`` by what :: what is said of it.
FAULTS = faults_of(Path(__file__).with_name("faults.txt").read_text(encoding="utf-8"))
LONG = "allow_long_context: true\n"


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "trial.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_good_file_is_read(tmp_path):
    spec = load_sweep(write(tmp_path, GOOD))
    assert (spec.models, spec.pools) == (("llama_3_1_8b",), (same_system("h100_sxm", "fp8"),))
    assert (spec.traffic, spec.limits) == ((Traffic(isl=1024, osl=128),), (PointLimits(ftl_s=10.0),))
    assert math.isinf(spec.limits[0].ttl_s)


def test_the_command_line_overrides_profile_and_engine(tmp_path):
    spec = load_sweep(write(tmp_path, GOOD), profile="optimistic", engine="vllm")
    assert (spec.profile, spec.engine) == ("optimistic", "vllm")


def test_faults_of_a_file_that_a_sweep_names_stand_below_their_file(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.yaml").write_text("nonsense: 1\nhiden: 2\n")
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path))
    text = GOOD.replace("[llama_3_1_8b]", "[mine]").replace("10.0", "-2")
    with pytest.raises(SpecError) as caught:
        load_sweep(write(tmp_path, text))
    lines = str(caught.value).splitlines()
    own = [line for line in lines if line.startswith("  - ")]
    assert [line.split(":")[0] for line in own] == ["  - models[0]", "  - limits.ftl_s"]
    assert own[0].endswith("mine.yaml:")
    below = [line for line in lines if line.startswith("    - ")]
    assert any("'nonsense'" in line for line in below)
    assert len(lines) == 1 + len(own) + len(below)


def test_faults_of_options_and_file_stand_apart(tmp_path):
    text = GOOD.replace("10.0", "-2") + "per: usd\nprices: {h100_smx: 2}\n"
    with pytest.raises(SpecError) as caught:
        load_sweep(write(tmp_path, text), engine="foo", prices={"b200": 3.0})
    option, price, file, *own = str(caught.value).splitlines()
    assert option.startswith("--engine: 'foo' is unknown")
    assert price.startswith("--price b200: unknown system 'b200', did you mean 'b200_sxm'")
    assert file.endswith("trial.yaml:")
    assert [line.split(":")[0] for line in own] == ["  - limits.ftl_s", "  - prices.h100_smx"]


def refusal(path: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_sweep(path)
    assert "trial.yaml" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("change", "parts"), FAULTS, ids=[change for change, _ in FAULTS])
def test_each_fault_is_one_line_with_file_and_remedy(tmp_path, change, parts):
    old, replaced, new = change.partition(" =>")
    assert old in GOOD or not replaced
    changed = yaml.safe_dump(yaml.safe_load(GOOD) | yaml.safe_load(f"{{{change}}}")) if not replaced else ""
    message = refusal(write(tmp_path, changed or GOOD.replace(old, new.removeprefix(" ").replace("\\n", "\n"), 1)))
    for part in parts:
        assert part in message
    assert len(message.splitlines()) == 1 or len(parts) > 1


def test_too_many_combinations_are_counted(tmp_path):
    ratios, numbers = [each + 0.5 for each in range(1, 901)], [*range(2, 902)]
    many = f"ctx_gen_ratio: {ratios}\nnvlink_domain: {numbers}\n"
    assert "810000 combinations; allowed: up to 100000" in refusal(write(tmp_path, GOOD + many))
    limits = f"{{ftl_s: {numbers[:500]}, gpu_cap: {numbers[:500]}}}"
    said = refusal(write(tmp_path, GOOD.replace("{ftl_s: 10.0}", limits)))
    assert "limits: 250000 combinations; allowed: up to 100000" in said


def test_a_longer_prompt_is_allowed_when_asked_for(tmp_path):
    text = GOOD.replace("1024", "131072") + LONG
    assert load_sweep(write(tmp_path, text)).traffic == (Traffic(isl=131072, osl=128),)


@pytest.mark.parametrize(("said", "steps"), [("tuned", None), ("none", ()), ("64", (64,))])
def test_prompts_may_be_held_back(tmp_path, said, steps):
    spec = load_sweep(write(tmp_path, GOOD + f"modes: [colocated]\nhold_steps: {said}\n"))
    assert spec.sharing.hold_steps == steps
    assert load_sweep(write(tmp_path, GOOD)).sharing.hold_steps == ()


def test_seconds_in_exponent_form_are_a_number(tmp_path):
    assert load_sweep(write(tmp_path, GOOD.replace("10.0", "1e-1"))).limits[0].ftl_s == 0.1  # YAML 1.1 reads text


@pytest.mark.parametrize("name", spec_files("sweep"))
def test_shipped_sweeps_are_valid(name):
    assert load_sweep(name).name == name


def test_axes_are_lists_or_single_values(tmp_path):
    text = GOOD.replace("{ftl_s: 10.0}", "{ftl_s: [1, 10], gpu_cap: 16, nic_gb_per_s: [none, 50]}") + (
        "ctx_gen_ratio: [optimal, 0.5, 1/3]\nnvlink_domain: [own, 72]\nmla_form: naive\n"
        "modes: [piggyback, disaggregated]\n"
        "ttl_measure: p99\nevery_step_mixed: true\n"
    )
    spec = load_sweep(write(tmp_path, text))
    assert spec.limits == tuple(
        PointLimits(ftl_s=ftl, gpu_cap=16, nic_limit=nic) for ftl in (1.0, 10.0) for nic in (math.inf, 50e9)
    )
    assert spec.ctx_gen_ratios == (None, Fraction(1, 2), Fraction(1, 3))
    assert (spec.nvlink_domains, spec.mla_forms, spec.modes) == ((None, 72), ("naive",), ("piggyback", "disaggregated"))
    assert spec.sharing == ColocatedOptions(ttl_measure="p99", every_step_mixed=True)


def test_a_law_of_lengths_brings_the_constant_lengths_that_stand_for_it(tmp_path):
    """Medians 4096 and 512, which stand there already; means 4096*exp(0.985^2/2) and 512*exp(0.859^2/2)."""
    text = GOOD.replace("  - {isl: 1024, osl: 128}", "  - {isl: 4096, osl: 512}\n  - log_normal_4096_512")
    constant, law = load_sweep(write(tmp_path, text)).traffic
    assert (constant, law.shape, law.law) == (Traffic(isl=4096, osl=512), (4096, 512), "log_normal_4096_512")
    assert law.isl == pytest.approx(4096 * math.exp(0.985**2 / 2), rel=1e-3)
    assert law.osl == pytest.approx(512 * math.exp(0.859**2 / 2), rel=1e-3)
    alone = load_sweep(write(tmp_path, text.replace("  - {isl: 4096, osl: 512}\n", ""))).traffic
    assert alone == (constant, law)


def test_models_may_have_recipes_and_traffic_limits_of_their_own(tmp_path):
    """Two models in one recipe, the second in another on one system; an FTL for the long prompts alone."""
    text = (
        GOOD.replace("[llama_3_1_8b]", "[llama_3_1_8b, deepseek_r1]")
        .replace("{h100_sxm: fp8}", "{h100_sxm: [fp8, bf16], h200_sxm: fp8}")
        .replace("128}", "128}\n  - {isl: 65536, osl: 128, ftl_s: 60}")
    )
    spec = load_sweep(write(tmp_path, text + "recipes: {deepseek_r1: {h100_sxm: bf16}}\n"))
    assert spec.pools_of("llama_3_1_8b") == spec.pools
    assert spec.pools_of("deepseek_r1") == (same_system("h100_sxm", "bf16"), same_system("h200_sxm", "fp8"))
    cases = [case for case in cases_of(spec) if case.model == "deepseek_r1"]
    assert [(case.pools.system, case.isl, case.limits.ftl_s) for case in cases] == [
        ("h100_sxm", 1024, 10.0),
        ("h200_sxm", 1024, 10.0),
        ("h100_sxm", 65536, 60.0),
        ("h200_sxm", 65536, 60.0),
    ]
    assert len({case.name for case in cases}) == 4


def test_pools_may_differ(tmp_path):
    mixed_entry = "{prefill: {a100_sxm_80gb: bf16}, decode: {h100_sxm: bf16}}"
    text = GOOD.replace("{h100_sxm: fp8}", f"[{{h100_sxm: bf16}}, {mixed_entry}]")
    same, mixed = load_sweep(write(tmp_path, text + "per: usd\n"), prices={"h100_sxm": 3.0}).pools
    assert same == same_system("h100_sxm", "bf16")
    assert (mixed.prefill_system, mixed.system, mixed.alike) == ("a100_sxm_80gb", "h100_sxm", False)


def test_limits_and_shipped_traffic_are_read(tmp_path):
    text = GOOD.replace("{ftl_s: 10.0}", "{nic_gb_per_s: 50, ttl_s: 0.05, gpu_cap: 64, max_gpus: 16}")
    name = next(name for name in list_specs("traffic") if load_traffic(name).shapes)
    spec = load_sweep(write(tmp_path, text.replace("  - {isl: 1024, osl: 128}", f"  - {name}") + LONG))
    assert spec.limits == (PointLimits(nic_limit=50e9, ttl_s=0.05, gpu_cap=64, max_gpus=16),)
    assert tuple((traffic.isl, traffic.osl) for traffic in spec.traffic) == load_traffic(name).shapes


GPU: dict[str, Any] = {
    "hw_specs/gpu.yaml": {
        "hbm_bandwidth": "3.35 TB/s",
        "peak_flops": {"bf16": "989 TFLOPS", "fp8": "1979 TFLOPS"},
        "sm_count": 132,
        "rows": [{"op": "gemm", "e": 0.9}, {"op": "attention", "e": 0.8}, {"op": "norm", "e": 0.7}],
    }
}


def told(change: Any) -> list[str]:
    """Lines of what differs after ``change`` did something to the file."""
    new = copy.deepcopy(GPU)
    change(new["hw_specs/gpu.yaml"])
    return [str(each) for each in differences(GPU, new)]


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda gpu: gpu.update(hbm_bandwidth="3.0 TB/s"), ["hbm_bandwidth: 3.35 TB/s -> 3.0 TB/s"]),
        (lambda gpu: gpu["peak_flops"].pop("fp8"), ["peak_flops.fp8: 1979 TFLOPS -> (none)"]),
        (lambda gpu: gpu.update(sm_count=144, l2="50 MB"), ["sm_count: 132 -> 144", "l2: (none) -> 50 MB"]),
        (lambda gpu: gpu["rows"][1].update(e=0.784), ["rows[1].e: 0.8 -> 0.784"]),
        (lambda gpu: gpu["rows"].pop(0), ['rows[0]: {"op": "gemm", "e": 0.9} -> (none)']),
        (lambda gpu: gpu["rows"].insert(1, {"op": "x"}), ['rows[1]: (none) -> {"op": "x"}']),
        (lambda gpu: gpu.update(rows="none"), None),
        (lambda gpu: None, []),
    ],
)
def test_a_change_is_a_line_with_key_values_and_file(change, lines):
    if lines is None:
        (line,) = told(change)
        assert line.startswith('rows: [{"op": "gemm"')
        assert line.endswith("... -> none in hw_specs/gpu.yaml")
    else:
        assert told(change) == [f"{line} in hw_specs/gpu.yaml" for line in lines]


def test_a_file_of_one_side_is_one_line():
    assert [str(each) for each in differences({}, GPU)] == ["file: (none) -> present in hw_specs/gpu.yaml"]


values = st.recursive(
    st.integers(0, 3) | st.sampled_from(["a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=8,
)


@given(values, values)
def test_something_is_told_exactly_when_something_differs(old, new):
    assert bool(differences({"f": {"k": old}}, {"f": {"k": new}})) == (old != new)


def test_inherited_fits_bring_the_files_that_they_come_from():
    inputs, sources = inputs_of(["hardware/h200_sxm", "efficiency/gh200", "model/llama_3_1_8b"])
    assert {"hw_specs/h200_sxm.yaml", "models/llama_3_1_8b.yaml"} < set(inputs)
    parent = inputs["hw_specs/efficiency/gh200.yaml"]["inherits"]
    assert f"hw_specs/efficiency/{parent}.yaml" in inputs
    assert inputs["hw_specs/h200_sxm.yaml"]["hbm_bandwidth"].endswith("TB/s")
    assert len(sources) == len(inputs)
    assert all(source.is_as_it_was for source in sources)


def test_a_file_of_another_installation_is_the_same_if_it_says_the_same(tmp_path, monkeypatch):
    """As on a worker elsewhere: written at another time, or in another place; another content is another file."""
    here, there = (tmp_path / name / "models" / "llama_3_1_8b.yaml" for name in ("here", "there"))
    for path in (here, there):
        path.parent.mkdir(parents=True)
        path.write_bytes((Path(__file__).parents[2] / "models" / path.name).read_bytes())
    monkeypatch.setenv("DISAGG_SIM_PATH", str(tmp_path / "here"))
    _, (source,) = inputs_of(["model/llama_3_1_8b"])
    os.utime(here, ns=(1, 1))
    assert source.is_as_it_was
    here.unlink()
    monkeypatch.setenv("DISAGG_SIM_PATH", str(tmp_path / "there"))
    assert source.is_as_it_was
    there.write_text(there.read_text() + "# another\n")
    assert not source.is_as_it_was
