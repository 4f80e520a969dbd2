"""All faults of a file at once, each in one clear line."""

import re
from pathlib import Path

import pytest
from fault_tables import faults_of

from disagg_sim.errors import SpecError, UnknownNameError
from disagg_sim.facts.load import check_file, list_specs, load_model, load_system
from disagg_sim.facts.yaml_files import kind_of, spec_files

#: kind/shipped file, what is replaced ``=>`` by what :: the fault, or several
FAULTS = faults_of(Path(__file__).with_name("faults.txt").read_text(encoding="utf-8"))


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
