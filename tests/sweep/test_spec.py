"""A sweep file: what it says, and one line for each of its faults."""

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from disagg_sim.errors import SpecError
from disagg_sim.facts.load import load_traffic
from disagg_sim.facts.yaml_files import PATH_VARIABLE, list_specs, spec_files
from disagg_sim.physics.passes.mixed import Interference
from disagg_sim.sweep.cases import cases_of
from disagg_sim.sweep.plan import plan_sweep
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

#: (replaced text, new text, what the message must hold)
FAULTS = {
    "unknown model": ("llama_3_1_8b", "lama_3_1_8b", ["unknown model 'lama_3_1_8b'", "did you mean 'llama_3_1_8b'"]),
    "unknown system": ("h100_sxm", "h100_smx", ["'h100_smx'", "did you mean 'h100_sxm'"]),
    "unknown precision": ("fp8", "fp9", ["'fp9'", "fp8"]),
    "unknown profile": ("measured", "mesured", ["profile", "'mesured'", "did you mean 'measured'"]),
    "misspelt key": ("limits:", "limts:", ["unknown key 'limts'", "did you mean 'limits'"]),
    "misspelt limit": ("ftl_s:", "ftl:", ["limits: unknown key 'ftl'", "did you mean 'ftl_s'"]),
    "misspelt shape key": ("isl:", "ils:", ["traffic[0]: unknown key 'ils'", "missing key 'isl'"]),
    "missing key": ("name: trial", "", ["missing key 'name'"]),
    "wrong unit": ("10.0", '"10 ms"', ["limits.ftl_s: '10 ms'", "write 0.01"]),
    "unreadable unit": ("10.0", "ten", ["limits.ftl_s: 'ten'", "counts in s"]),
    "negative FTL": ("10.0", "-1.0", ["limits.ftl_s: -1.0 is out of range; allowed: from 1e-06 to 1e+06 s"]),
    "infinite FTL": ("10.0", ".inf", ["limits.ftl_s", "out of range"]),
    "not a number FTL": ("10.0", ".nan", ["limits.ftl_s", "out of range"]),
    "osl 0": ("128", "0", ["traffic[0].osl: 0", "2 or more"]),
    "osl 1": ("128", "1", ["traffic[0].osl: 1", "prefill only"]),
    "negative osl": ("128", "-5", ["traffic[0].osl: -5 is out of range; allowed: from 2 to "]),
    "fractional isl": ("1024", "10.5", ["traffic[0].isl: 10.5 is not a whole number"]),
    "isl 0": ("1024", "0", ["traffic[0].isl: 0 is out of range; allowed: from 1 to "]),
    "beyond context": ("1024", "131072", ["exceed the context limit of llama_3_1_8b, 131072", "allow_long_context"]),
    "recipe the GPU lacks": ("h100_sxm: fp8", "a100_sxm_80gb: fp8", ["systems.a100_sxm_80gb", "fp8", "bf16"]),
    "duplicate model": ("[llama_3_1_8b]", "[llama_3_1_8b, llama-3.1-8b]", ["models: llama_3_1_8b", "2 times"]),
    "duplicate shape": ("  - {isl", "  - {isl: 1024, osl: 128}\n  - {isl", ["traffic: 1024/128", "2 times"]),
    "key twice": ("profile: measured", "profile: ideal\nprofile: measured", ["'profile' is given twice"]),
    "unknown mode": ("profile:", "modes: [disagregated]\nprofile:", ["modes", "did you mean 'disaggregated'"]),
    "empty modes": ("profile:", "modes: []\nprofile:", ["modes: the list is empty"]),
    "unknown matching": ("profile:", "matching: exakt\nprofile:", ["matching", "did you mean 'exact'"]),
    "unknown engine": ("profile:", "engine: vlm\nprofile:", ["engine", "did you mean 'vllm'"]),
    "empty traffic": ("  - {isl: 1024, osl: 128}", "  []", ["traffic: the list is empty"]),
    "unknown traffic": ("  - {isl: 1024, osl: 128}", "  - no_such_traffic", ["traffic[0]", "no_such_traffic"]),
    "systems as a list": ("{h100_sxm: fp8}", "[h100_sxm]", ["systems", "mapping of system to precision"]),
    "models as a number": ("[llama_3_1_8b]", "7", ["models: 7 is not the name of a model"]),
    "gpu_cap 1": ("ftl_s: 10.0", "gpu_cap: 1", ["limits.gpu_cap: 1 is out of range; allowed: from 2 to "]),
    "gpu_cap true": ("ftl_s: 10.0", "gpu_cap: true", ["limits.gpu_cap: true is not a whole number"]),
    "limits a list": ("{ftl_s: 10.0}", "[10]", ["limits: [10] is not 'key: value' lines"]),
    "fixed ratio as a word": ("profile:", "ctx_gen_ratio: half\nprofile:", ["ctx_gen_ratio: 'half'", "too: optimal"]),
    "fixed ratio 0": ("profile:", "ctx_gen_ratio: [optimal, 0]\nprofile:", ["ctx_gen_ratio[1]: 0 is out of range"]),
    "fixed ratio of the paper's matching": (
        "profile:",
        "ctx_gen_ratio: 0.5\nmatching: paper\nprofile:",
        ["ctx_gen_ratio", "needs 'matching: exact'"],
    ),
    "domain 1": (
        "profile:",
        "nvlink_domain: [1, 8]\nprofile:",
        ["nvlink_domain[0]: 1 is out of range; allowed: from 2 to 1024"],
    ),
    "domain as a word": ("profile:", "nvlink_domain: wide\nprofile:", ["nvlink_domain: 'wide'", "allowed, too: own"]),
    "own domain twice": (
        "profile:",
        "nvlink_domain: [own, 8, 72]\nprofile:",
        ["nvlink_domain: 8 equals 'own' on h100_sxm"],
    ),
    "value twice": ("10.0", "[1, 1.0]", ["limits.ftl_s: 1.0 stands there 2 times"]),
    "empty axis": ("10.0", "[]", ["limits.ftl_s: the list is empty"]),
    "one bad value of an axis": ("10.0", "[1, -2]", ["limits.ftl_s[1]: -2 is out of range"]),
    "unknown layouts": (
        "ftl_s: 10.0",
        "layouts: launchabel",
        ["layouts: 'launchabel' is unknown", "mean 'launchable'"],
    ),
    "NIC limit in GB": ("ftl_s: 10.0", "nic_gb_per_s: 5 GB", ["nic_gb_per_s: '5 GB'", "GB/s", "too: none"]),
    "unknown MLA form": ("profile:", "mla_form: [naif]\nprofile:", ["mla_form", "did you mean 'naive'"]),
    "unknown measure": ("profile:", "ttl_measure: p90\nprofile:", ["ttl_measure", "did you mean 'p99'"]),
    "a share of a step": ("profile:", "hold_steps: 0.5\nprofile:", ["hold_steps: 0.5", "too: none, tuned"]),
    "no step": ("profile:", "hold_steps: 0\nprofile:", ["hold_steps: 0 is out of range; allowed: from 1 to 1000000"]),
    "mixed as a number": ("profile:", "every_step_mixed: 1\nprofile:", ["every_step_mixed: 1 is not true or false"]),
    "efficiency above 1": (
        "profile:",
        "interference: {minority_efficiency: 1.5}\nprofile:",
        ["minority_efficiency: 1.5 is out of range"],
    ),
    "misspelt knob": ("profile:", "interference: {overlap_los: 0}\nprofile:", ["did you mean 'overlap_loss'"]),
    "unknown objective": ("profile:", "per: wat\nprofile:", ["per", "did you mean 'watt'"]),
    "prices without use": ("profile:", "prices: {h100_sxm: 2}\nprofile:", ["prices: act with 'per: usd' or 'columns"]),
    "price of an unknown system": (
        "profile:",
        "per: usd\nprices: {h100_smx: 2}\nprofile:",
        ["prices", "did you mean 'h100_sxm'"],
    ),
    "price 0": ("profile:", "per: usd\nprices: {h100_sxm: 0}\nprofile:", ["prices.h100_sxm: 0 is out of range"]),
    "one pool": ("{h100_sxm: fp8}", "[{prefill: {h100_sxm: fp8}}]", ["systems[0]: missing key 'decode'"]),
    "misspelt pool": (
        "{h100_sxm: fp8}",
        "[{prefil: {h100_sxm: fp8}, decode: {h100_sxm: fp8}}]",
        ["systems[0]: unknown key 'prefil'", "'prefill'"],
    ),
    "caches that differ": (
        "{h100_sxm: fp8}",
        "[{prefill: {a100_sxm_80gb: bf16}, decode: {h100_sxm: fp8}}]",
        ["cannot hand over the KV cache", "writes bf16", "reads fp8"],
    ),
    "pools that differ in one instance": (
        "systems: {h100_sxm: fp8}",
        "modes: [colocated]\nsystems: [{prefill: {a100_sxm_80gb: bf16}, decode: {h100_sxm: bf16}}]",
        ["serves disaggregated only; modes has colocated"],
    ),
    "ratio without pools": (
        "profile:",
        "modes: [colocated]\nctx_gen_ratio: [0.5]\nprofile:",
        ["ctx_gen_ratio: acts in disaggregated only; modes has colocated"],
    ),
    "measure of no shared instance": (
        "profile:",
        "ttl_measure: p99\nprofile:",
        ["ttl_measure: acts in colocated and piggyback only; modes has disaggregated"],
    ),
    "mixing without mixed steps": (
        "profile:",
        "modes: [disaggregated, colocated]\nevery_step_mixed: true\nprofile:",
        ["every_step_mixed: acts in piggyback only; modes has disaggregated, colocated"],
    ),
    "prompts held back without passes": (
        "profile:",
        "modes: [piggyback]\nhold_steps: tuned\nprofile:",
        ["hold_steps: acts in colocated only; modes has piggyback"],
    ),
    "interference without mixed steps": (
        "profile:",
        "modes: [colocated]\ninterference: {overlap_loss: 0.2}\nprofile:",
        ["interference: acts in piggyback only; modes has colocated"],
    ),
    "too many combinations": (
        "profile:",
        "ctx_gen_ratio: [" + ", ".join(f"{n}.5" for n in range(1, 901)) + "]\n"
        "nvlink_domain: [" + ", ".join(map(str, range(2, 902))) + "]\nprofile:",
        ["810000 combinations; allowed: up to 100000"],
    ),
    "too many limits": (
        "{ftl_s: 10.0}",
        "{ftl_s: " + str([*range(1, 501)]) + ", gpu_cap: " + str([*range(2, 502)]) + "}",
        ["limits: 250000 combinations; allowed: up to 100000"],
    ),
    "recipe of a model that is not there": (
        "profile:",
        "recipes: {llama_3_1_70b: {h100_sxm: bf16}}\nprofile:",
        ["recipes.llama_3_1_70b: models has llama_3_1_8b"],
    ),
    "recipe on a system that is not there": (
        "profile:",
        "recipes: {llama_3_1_8b: {h200_sxm: bf16}}\nprofile:",
        ["recipes.llama_3_1_8b.h200_sxm: systems has h100_sxm"],
    ),
    "recipe of a model that the GPU lacks": (
        "profile:",
        "recipes: {llama_3_1_8b: {h100_sxm: nvfp4_fp8kv}}\nprofile:",
        ["recipes.llama_3_1_8b: ", "nvfp4"],
    ),
    "misspelt recipe": (
        "profile:",
        "recipes: {llama_3_1_8b: {h100_sxm: bf61}}\nprofile:",
        ["recipes.llama_3_1_8b.h100_sxm", "did you mean 'bf16'"],
    ),
    "FTL of a traffic beside several": (
        "  - {isl: 1024, osl: 128}\nlimits: {ftl_s: 10.0}",
        "  - {isl: 1024, osl: 128, ftl_s: 2}\nlimits: {ftl_s: [1, 10]}",
        ["traffic: ftl_s is a limit of its own, and limits.ftl_s has several"],
    ),
    "a ratio without bounds": (
        "profile:",
        "ctx_gen_ratio: '1e999999999'\nprofile:",
        ["'1e999999999' is not a ratio such as 0.5"],
    ),
    "a name of two lines": ("name: trial", 'name: "a\\nb"', ["name: 'a\\nb' is not a name; allowed: one line"]),
    "broken": ("[llama_3_1_8b]", "[llama_3_1_8b", ["broken YAML: line"]),
}
LONG = "allow_long_context: true\n"

ENGINES = "sglang, trtllm, trtllm_engine, vllm, vllm_0_12, vllm_eager, vllm_v0, kernels"


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "foo"}, f"--engine: 'foo' is unknown; allowed: {ENGINES}"),
        ({"engine": "nccl"}, f"--engine: 'nccl' is unknown; allowed: {ENGINES}"),
        ({"profile": "ideal", "engine": "foo"}, f"--engine: 'foo' is unknown; allowed: {ENGINES}"),
        (
            {"profile": "mesured"},
            "--profile: 'mesured' is unknown, did you mean 'measured'?; allowed: ideal, measured, optimistic",
        ),
        (
            {"prices": {"h100_sxm": 2.0}},
            "--price: act with 'per: usd' or 'columns: token_prices' only, and per is 'gpu'",
        ),
        ({"prices": {"h100_sxm": 0.0}}, "--price h100_sxm: 0.0 is out of range; allowed: from 0.001 to 10000 USD/h"),
    ],
)
def test_a_fault_of_an_option_names_the_option_and_no_file(tmp_path, options, said):
    with pytest.raises(SpecError) as caught:
        load_sweep(write(tmp_path, GOOD), **options)
    assert str(caught.value) == said


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


@pytest.mark.parametrize("case", FAULTS)
def test_each_fault_is_one_line_with_file_and_remedy(tmp_path, case):
    old, new, parts = FAULTS[case]
    assert old in GOOD
    with pytest.raises(SpecError) as caught:
        load_sweep(write(tmp_path, GOOD.replace(old, new, 1)))
    message = str(caught.value)
    assert "trial.yaml" in message
    for part in parts:
        assert part in message
    assert len(message.splitlines()) == 1 or len(parts) > 1


def test_all_faults_of_a_file_come_at_once(tmp_path):
    text = GOOD.replace("llama_3_1_8b", "lama").replace("128", "1").replace("10.0", "-2").replace("profile", "profil")
    with pytest.raises(SpecError) as caught:
        load_sweep(write(tmp_path, text))
    for part in ("lama", "osl: 1", "ftl_s: -2", "'profil'"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "empty"), (b"\x89PNG\r\n\x1a\n\xff\xfe", "UTF-8"), (b"a\x00b: 1", "YAML"), ("- 1\n- 2\n", "list")],
)
def test_what_is_no_sweep_is_one_line(tmp_path, content, said):
    with pytest.raises(SpecError) as caught:
        load_sweep(write(tmp_path, content))
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file_names_the_shipped_ones(tmp_path):
    with pytest.raises(SpecError, match="no such file or shipped sweep"):
        load_sweep(str(tmp_path / "none.yaml"))
    with pytest.raises(SpecError, match="did you mean 'demo'"):
        load_sweep("dmeo")
    with pytest.raises(SpecError, match="is a directory"):
        load_sweep(str(tmp_path))


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
        "modes: [piggyback, disaggregated]\ninterference: {overlap_loss: 0.1}\n"
        "ttl_measure: p99\nevery_step_mixed: true\n"
    )
    spec = load_sweep(write(tmp_path, text))
    assert spec.limits == tuple(
        PointLimits(ftl_s=ftl, gpu_cap=16, nic_limit=nic) for ftl in (1.0, 10.0) for nic in (math.inf, 50e9)
    )
    assert spec.ctx_gen_ratios == (None, Fraction(1, 2), Fraction(1, 3))
    assert (spec.nvlink_domains, spec.mla_forms, spec.modes) == ((None, 72), ("naive",), ("piggyback", "disaggregated"))
    knobs = Interference(minority_efficiency=1.0, overlap_loss=0.1)
    assert spec.sharing == ColocatedOptions(ttl_measure="p99", every_step_mixed=True, interference=knobs)


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


def test_the_sweep_of_new_attention_plans_each_model_in_its_recipe_at_three_lengths():
    spec = load_sweep("new_attention")
    assert len(cases_of(spec)) == 7 * 2 * 3
    one = plan_sweep(replace(spec, models=("kimi_k3",), pools=spec.pools[1:], modes=("disaggregated",)))
    assert [(each.case.pools.precision, each.case.limits.ftl_s) for each in one.cases] == [
        ("mxfp4_fp8kv", 5.0),
        ("mxfp4_fp8kv", 60.0),
        ("mxfp4_fp8kv", 600.0),
    ]
    assert min(each.points for each in one.cases) > 0


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
