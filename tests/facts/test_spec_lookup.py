"""Where specs are looked for, and which spellings mean the same."""

import os

import pytest

from disagg_sim.errors import SpecError, UnknownNameError
from disagg_sim.facts.load import list_specs, load_efficiency, load_model, load_system, resolve_precision
from disagg_sim.facts.yaml_files import PATH_VARIABLE, canonical_name, spec_files


@pytest.mark.parametrize("spelling", ["llama_3_1_70b", "llama-3.1-70b", "Llama-3.1-70B", "LLAMA.3_1-70b"])
def test_dashes_dots_underscores_and_case_do_not_matter(spelling):
    assert load_model(spelling) is load_model("llama_3_1_70b")


def test_canonical_names():
    assert canonical_name("Qwen2.5-7B") == "qwen2_5_7b"


def test_a_path_loads_that_file(tmp_path):
    path = tmp_path / "My-H100.yaml"
    path.write_bytes(spec_files("hardware")["h100_sxm"].read_bytes())
    assert load_system(path).name == "my_h100"
    assert load_system(str(path)).peak_flops == load_system("h100_sxm").peak_flops


def test_the_users_directories_come_first(tmp_path, monkeypatch):
    shipped = spec_files("hardware")["h100_sxm"].read_text(encoding="utf-8")
    for folder, nic in (("first", "100 GB/s"), ("second", "25 GB/s")):
        directory = tmp_path / folder / "hw_specs"
        directory.mkdir(parents=True)
        text = shipped.replace("nic_bandwidth: 50 GB/s", f"nic_bandwidth: {nic}")
        (directory / "H100-SXM.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "second" / "hw_specs" / "h100_pcie.yml").write_text(shipped, encoding="utf-8")
    assert load_system("h100_sxm").nic_bandwidth == pytest.approx(50e9)
    monkeypatch.setenv(PATH_VARIABLE, os.pathsep.join([str(tmp_path / "first"), str(tmp_path / "second")]))
    assert load_system("h100_sxm").nic_bandwidth == pytest.approx(100e9)
    assert load_system("h100_pcie").name == "h100_pcie"
    assert {"h100_pcie", "h100_sxm", "mi300x"} <= set(list_specs("hardware"))


def test_a_users_system_may_inherit_fits_and_a_recipe_may_be_added(tmp_path, monkeypatch):
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path))
    hardware = tmp_path / "hw_specs"
    (hardware / "efficiency").mkdir(parents=True)
    (hardware / "precision").mkdir()
    (hardware / "x100.yaml").write_bytes(spec_files("hardware")["b200_sxm"].read_bytes())
    (hardware / "efficiency" / "x100.yaml").write_text(
        "system: x100\ninherits: b200_sxm\nreason: a guess\n", encoding="utf-8"
    )
    recipe = spec_files("precision")["nvfp4_fp8kv"].read_text(encoding="utf-8")
    (hardware / "precision" / "nvfp4_bf16att.yaml").write_text(
        recipe.replace("\nattention: fp8", "\nattention: bf16"), encoding="utf-8"
    )
    efficiency = load_efficiency("x100")
    assert efficiency is not None
    assert (efficiency.system, efficiency.measured_on) == ("x100", "b200_sxm")
    precision = resolve_precision("nvfp4_bf16att", load_model("deepseek_r1"), load_system("x100"))
    assert (precision.attention, precision.cache.name) == ("bf16", "fp8")


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "m.yaml"
    text = spec_files("model")["llama_3_1_8b"].read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    assert len(load_model(path).layers) == 32
    path.write_text(text.replace("count: 32", "count: 16"), encoding="utf-8")
    os.utime(path, ns=(1, 1))
    assert len(load_model(path).layers) == 16


def test_an_unknown_kind_is_refused():
    with pytest.raises(UnknownNameError) as refusal:
        list_specs("modle")
    assert str(refusal.value) == (
        "unknown kind 'modle', did you mean 'model'?; "
        "known: hardware, efficiency, power, precision, profile, engine, scheduler, uncertainty, layout, evidence, "
        "failures, launcher, checkpoint, model, "
        "traffic, speculation, sweep, scenario"
    )


def test_anchors_and_merges_are_read(tmp_path):
    path = tmp_path / "m.yaml"
    text = spec_files("model")["gpt_oss_120b"].read_text(encoding="utf-8")
    path.write_text(
        text.replace("  sliding: {", "  sliding: &a {").replace(
            text.split("  full: ")[1].split("\n")[0], "{<<: *a, window: 0}"
        ),
        encoding="utf-8",
    )
    assert load_model(path).layers == load_model("gpt_oss_120b").layers


def test_every_fault_of_the_search_path_is_a_line(tmp_path, monkeypatch):
    for name in ("good/models", "empty"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").write_text("models: here")
    (tmp_path / "empty" / "hw_specs").write_text("a file by the name of a directory")
    entries = [tmp_path / name for name in ("good", "gone", "file", "empty")]
    monkeypatch.setenv(PATH_VARIABLE, os.pathsep.join([*map(str, entries), ""]))
    known = "hw_specs, models, scenarios, speculation, sweeps, traffic"
    for look_up in (lambda: load_system("h100_sxm"), lambda: list_specs("model")):
        with pytest.raises(SpecError) as caught:
            look_up()
        assert str(caught.value).splitlines() == [
            f"{PATH_VARIABLE}: {tmp_path / 'gone'}: no such directory",
            f"{PATH_VARIABLE}: {tmp_path / 'file'}: a file; name the directory that holds {known}",
            f"{PATH_VARIABLE}: {tmp_path / 'empty'}: holds none of the directories {known}",
        ]
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "good"))
    assert load_system("h100_sxm").name == "h100_sxm"
