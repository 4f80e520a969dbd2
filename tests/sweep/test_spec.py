"""A sweep file: what it says, and one line for each of its faults."""

import math
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from fault_tables import faults_of

from disagg_sim.errors import SpecError
from disagg_sim.facts.load import load_traffic
from disagg_sim.facts.yaml_files import PATH_VARIABLE, list_specs, spec_files
from disagg_sim.sweep.cases import cases_of
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
FAULTS = faults_of(r"""
models: [lama_3_1_8b] :: models[0]: unknown model 'lama_3_1_8b', did you mean 'llama_3_1_8b'?; known: those of
models: 7 :: models: 7 is not the name of a model
models: [llama_3_1_8b, llama-3.1-8b] :: models: llama_3_1_8b stands there 2 times
systems: {h100_smx: fp8} :: systems.h100_smx: unknown system 'h100_smx', did you mean 'h100_sxm'?; known: a100
systems: {h100_sxm: fp9} :: systems.h100_sxm: unknown precision recipe 'fp9', did you mean 'fp8'?; known: bf16
systems: [h100_sxm] :: systems[0]: 'h100_sxm' is not a mapping of system to precision, such as 'h100_sxm: fp8'
systems: {a100_sxm_80gb: fp8}
  systems.a100_sxm_80gb: precision 'fp8' needs fp8 arithmetic, which a100_sxm_80gb lacks; recipes that it can run: bf16
systems: [{prefill: {h100_sxm: fp8}}] :: systems[0]: missing key 'decode'
systems: [{prefil: {h100_sxm: fp8}, decode: {h100_sxm: fp8}}]
  systems[0]: missing key 'prefill'
  systems[0]: unknown key 'prefil', did you mean 'prefill'?
systems: [{prefill: {a100_sxm_80gb: bf16}, decode: {h100_sxm: fp8}}]
  a100_sxm_80gb/bf16 to h100_sxm/fp8 cannot hand over the KV cache: prefill writes bf16, decode reads fp8; take
modes: [colocated], systems: [{prefill: {a100_sxm_80gb: bf16}, decode: {h100_sxm: bf16}}]
  systems: a100_sxm_80gb/bf16 to h100_sxm/bf16 serves disaggregated only; modes has colocated
profile: mesured :: profile: 'mesured' is unknown, did you mean 'measured'?; allowed: ideal, measured, optimistic
limits: => limts: :: unknown key 'limts', did you mean 'limits'?
name: trial => :: missing key 'name'
name: "a\nb" :: name: 'a\nb' is not a name; allowed: one line of up to 200 characters
profile: measured => profile: ideal\nprofile: measured :: 'profile' is given twice
[llama_3_1_8b] => [llama_3_1_8b :: broken YAML: line
limits: {ftl: 10.0} :: limits: unknown key 'ftl', did you mean 'ftl_s'?
limits: [10] :: limits: [10] is not 'key: value' lines
limits: {ftl_s: 10 ms} :: limits.ftl_s: '10 ms' is not a plain number; the key counts in s: write 0.01
limits: {ftl_s: ten} :: limits.ftl_s: 'ten' is not a plain number; the key counts in s
limits: {ftl_s: -1.0} :: limits.ftl_s: -1.0 is out of range; allowed: from 1e-06 to 1e+06 s
limits: {ftl_s: .inf} :: limits.ftl_s: inf is out of range
limits: {ftl_s: .nan} :: limits.ftl_s: nan is out of range
limits: {ftl_s: [1, 1.0]} :: limits.ftl_s: 1.0 stands there 2 times
limits: {ftl_s: []} :: limits.ftl_s: the list is empty
limits: {ftl_s: [1, -2]} :: limits.ftl_s[1]: -2 is out of range
limits: {gpu_cap: 1} :: limits.gpu_cap: 1 is out of range; allowed: from 2 to 1000000
limits: {gpu_cap: true} :: limits.gpu_cap: true is not a whole number
limits: {layouts: launchabel} :: limits.layouts: 'launchabel' is unknown, did you mean 'launchable'?; allowed: served,
limits: {nic_gb_per_s: 5 GB}
  limits.nic_gb_per_s: '5 GB' is not a plain number; the key counts in GB/s; allowed, too: none
traffic: [] :: traffic: the list is empty
traffic: [no_such_traffic] :: traffic[0]: unknown traffic 'no_such_traffic'; known: azure
traffic: [{ils: 1024, osl: 128}]
  traffic[0]: missing key 'isl'
  traffic[0]: unknown key 'ils', did you mean 'isl'?
traffic: [{isl: 1024, osl: 0}] :: traffic[0].osl: 0 leaves nothing to decode; a frontier needs 2 or more
traffic: [{isl: 1024, osl: 1}] :: traffic[0].osl: 1 leaves nothing to decode; a frontier needs 2 or more (1 is prefill
traffic: [{isl: 1024, osl: -5}] :: traffic[0].osl: -5 is out of range; allowed: from 2 to 1000000000
traffic: [{isl: 10.5, osl: 128}] :: traffic[0].isl: 10.5 is not a whole number
traffic: [{isl: 0, osl: 128}] :: traffic[0].isl: 0 is out of range; allowed: from 1 to 1000000000
traffic: [{isl: 131072, osl: 128}]
  131200 tokens exceed the context limit of llama_3_1_8b, 131072 tokens; `allow_long_context`
traffic: [{isl: 1024, osl: 128}, {isl: 1024, osl: 128}] :: traffic: 1024/128 stands there 2 times
traffic: [{isl: 1024, osl: 128, ftl_s: 2}], limits: {ftl_s: [1, 10]}
  traffic: ftl_s is a limit of its own, and limits.ftl_s has several; the case would run twice
traffic: [{isl: 1024, osl: 64, cached: 1.2}] :: cached
traffic: [{isl: 1024, osl: 64, cached: {share: 0.5, block: 16}}] :: block_tokens
traffic: [{isl: 1024, osl: 64, cached: [0.5, 0.5]}] :: cached
traffic: [{name: nothing, cached: 0.5}] :: nothing
modes: [disagregated] :: modes[0]: 'disagregated' is unknown, did you mean 'disaggregated'?; allowed: disaggregated,
modes: [] :: modes: the list is empty
matching: exakt :: matching: 'exakt' is unknown, did you mean 'exact'?; allowed: exact, paper
engine: vlm :: engine: 'vlm' is unknown, did you mean 'vllm'?; allowed: sglang
ctx_gen_ratio: half :: ctx_gen_ratio: 'half' is not a ratio such as 0.5 or '1/3'; allowed, too: optimal
ctx_gen_ratio: '1e999999999' :: ctx_gen_ratio: '1e999999999' is not a ratio such as 0.5 or '1/3'; allowed, too: optimal
ctx_gen_ratio: [optimal, 0] :: ctx_gen_ratio[1]: 0 is out of range; allowed: from 0.001 to 1000
ctx_gen_ratio: 0.5, matching: paper :: ctx_gen_ratio: a fixed ratio needs 'matching: exact', and matching is 'paper'
ctx_gen_ratio: [0.5], modes: [colocated] :: ctx_gen_ratio: acts in disaggregated only; modes has colocated
nvlink_domain: [1, 8] :: nvlink_domain[0]: 1 is out of range; allowed: from 2 to 1024
nvlink_domain: wide :: nvlink_domain: 'wide' is not a whole number; allowed, too: own
nvlink_domain: [own, 8, 72] :: nvlink_domain: 8 equals 'own' on h100_sxm: the case would run twice
mla_form: [naif] :: mla_form[0]: 'naif' is unknown, did you mean 'naive'?; allowed: auto, naive, absorbed, cached
ttl_measure: p90 :: ttl_measure: 'p90' is unknown, did you mean 'p99'?; allowed: tpot, mean, p99
ttl_measure: p99 :: ttl_measure: acts in colocated and piggyback only; modes has disaggregated
hold_steps: 0.5 :: hold_steps: 0.5 is no whole number of steps; allowed, too: none, tuned
hold_steps: 0 :: hold_steps: 0 is out of range; allowed: from 1 to 1000000
hold_steps: tuned, modes: [piggyback] :: hold_steps: acts in colocated only; modes has piggyback
every_step_mixed: 1 :: every_step_mixed: 1 is not true or false
every_step_mixed: true, modes: [disaggregated, colocated]
  every_step_mixed: acts in piggyback only; modes has disaggregated, colocated
interference: {overlap_loss: 0.2} :: interference was removed: nothing measured says what phases
per: wat :: per: 'wat' is unknown, did you mean 'watt'?; allowed: gpu, usd, watt, joule
per: usd, prices: {h100_smx: 2} :: prices.h100_smx: unknown system 'h100_smx', did you mean 'h100_sxm'?; known: a100
per: usd, prices: {h100_sxm: 0} :: prices.h100_sxm: 0 is out of range; allowed: from 0.001 to 10000 USD/h
prices: {h100_sxm: 2} :: prices: act with 'per: usd' or 'columns: token_prices' only, and per is 'gpu'
recipes: {llama_3_1_70b: {h100_sxm: bf16}} :: recipes.llama_3_1_70b: models has llama_3_1_8b
recipes: {llama_3_1_8b: {h200_sxm: bf16}} :: recipes.llama_3_1_8b.h200_sxm: systems has h100_sxm
recipes: {llama_3_1_8b: {h100_sxm: nvfp4_fp8kv}}
  recipes.llama_3_1_8b: precision 'nvfp4_fp8kv' needs nvfp4 arithmetic, which h100_sxm lacks
recipes: {llama_3_1_8b: {h100_sxm: bf61}}
  recipes.llama_3_1_8b.h100_sxm: unknown precision recipe 'bf61', did you mean 'bf16'?; known: bf16
availability: 1 :: availability: 1 is out of range; allowed: from 0.001 to 1
availability: null :: availability: null is not a value; allowed: none
availability: 0.9, failures: rsc_3 :: did you mean 'rsc_
availability: 0.9, pools: [prefill, attention, ffn] :: availability: 0.9: sweeps count no spares of further pools
limits: {max_dcp: 2}, pools: [prefill, attention, ffn] :: limits.max_dcp: 2: attention GPUs
limits: {max_redundant_experts: 4}, pools: [prefill, attention, ffn]
  limits.max_redundant_experts: 4: a feed-forward pool has the fewest copies
failures: rsc_1 :: failures: act with 'availability' only
speculation: llama :: unknown speculation 'llama'
speculation: deepseek_v3_mtp :: 'deepseek_v3_mtp' was measured on deepseek_v3, not on llama_3_1_8b
speculation: mtp 0.6 0.8 :: acceptance 0.6, 0.8 rises
models: deepseek_r1, systems: {b200_sxm: fp8}, speculation: deepseek_r1_mtp, draft_tokens: [2]
  2 draft tokens are out of range; allowed: 0 to 1
draft_tokens: [2] :: draft_tokens: acts with 'speculation' only
expert_skew: 4 :: expert_skew: 4 is out of range; allowed: from 0 to 3
profile: ideal, expert_skew: 0.5 :: needs a profile of random routing, such as 'measured'
kv_link: {path: spline} :: did you mean 'spine'?
kv_link: {descriptor_us: -1} :: -1 is out of range
kv_link: {descriptor: 1} :: did you mean 'descriptor_us'?
kv_link: {path: rail}, modes: [colocated] :: kv_link: acts in disaggregated only; modes has colocated
kv_link: {path: rail}, pools: [prefill, attention, ffn] :: kv_link: link_rail does not go with pools other
columns: [token_price] :: did you mean 'token_prices'?
columns: energy, per: joule :: columns: 'energy' is what 'per: joule' has already
utilisation: 0.5 :: utilisation: acts with 'columns: token_prices' only
pools: [prefill, attention] :: pools: attention and ffn decode together; give both or neither
pools: [encode, decode], images: {images: 2, height: 1120, width: 1120}
  pools: encode, decode serve no request
  pools: encode needs a model with an encoder, and llama_3_1_8b has none
pools: [encode, prefill, decode] :: images: are missing: encode needs them
pools: [prefill, atention, ffn] :: did you mean 'attention'
pools: [prefill, attention, ffn], per: joule :: per: joule does not go with pools
pools: [prefill, attention, ffn], matching: paper :: matching: paper does not go with pools
images: {images: 2, height: 1120, width: 1120} :: images: need 'encode' among the pools
pools: [encode, prefill, decode], images: {images: 2, height: 1120, width: 1120} :: llama_3_1_8b has none
models: qwen3_5_35b_a3b, pools: [encode, prefill, decode], images: {images: 9, height: 1120, width: 1120}
  11025 tokens
traffic: [{sessions: coding_agent, sessions_per_s: 2, cache: {tiers: dran}}]
  h100_sxm has no tier 'dran', did you mean 'dram'
traffic: [{sessions: coding_agent, sessions_per_s: 2, cache: {tiers: hbm}}]
  tiers hbm: hbm has a key of its own, hbm: 20 GB
traffic: [{sessions: coding_agent, sessions_per_s: 2, cache: {hbm: 20}}] :: hbm: 20 has no unit; allowed: B, kB
traffic: [{sessions: coding_agent, sessions_per_s: 2, cache: {tiers: [dram, dram]}}] :: cache
traffic: [{sessions: coding_agent, sessions_per_s: 2, cache: {hbm: 300 GB}}]
  hbm 300 GB set aside of each GPU, and h100_sxm has
traffic: [{sessions: coding_agent, sessions_per_s: 2, cache: {writes: behind}}]
  'behind' is unknown; allowed: through, back
traffic: [{sessions: coding_agent, sessions_per_s: 2, cache: {tier: dram}}]
  unknown key 'tier', did you mean 'tiers'
traffic: [{sessions: coding_agent, sessions_per_s: 2}], kv_tiers: {dram: {bandwidth: 1 GB/s, latency_s: 0}}
  kv_tiers.dram: no traffic keeps prompts
traffic: [{sessions: coding_agent, sessions_per_s: 2, cache: {tiers: dram}}], kv_tiers: {dram: {bandwidth: 1 GB}}
  kv_tiers.dram.bandwidth: '1 GB' has unit 'GB'
  kv_tiers.dram: missing key 'latency_s'
traffic: [{sessions: reasoning, sessions_per_s: 1}]
  traffic reasoning has no sessions; allowed: one with the key 'session'
""")
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


def test_all_faults_of_a_file_come_at_once(tmp_path):
    text = GOOD.replace("llama_3_1_8b", "lama").replace("128", "1").replace("10.0", "-2").replace("profile", "profil")
    with pytest.raises(SpecError) as caught:
        load_sweep(write(tmp_path, text))
    for part in ("lama", "osl: 1", "ftl_s: -2", "'profil'"):
        assert part in str(caught.value)


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
