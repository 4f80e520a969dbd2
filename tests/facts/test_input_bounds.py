"""Spec files with a fault, or that would take the memory, the stack or the screen: each is refused in one line."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fault_tables import faults_of
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.errors import LONGEST_SHOWN, SpecError, given_twice, nearest, printable, quoted
from disagg_sim.facts.load import check_file, list_specs, load_efficiency, load_model, load_system
from disagg_sim.facts.yaml_files import kind_of, read_mapping, spec_files
from disagg_sim.facts.yaml_text import DEEPEST, MOST_BYTES, MOST_VALUES, parse_yaml

SHIPPED = {name: spec_files("hardware")[name].read_text(encoding="utf-8") for name in ("h200_sxm",)}


def refusal(path: Path) -> str:
    """The one line with which a file is refused, at once."""
    begun = time.perf_counter()
    with pytest.raises(SpecError) as caught:
        check_file(path)
    assert time.perf_counter() - begun < 10.0
    return str(caught.value)


def doubled(times: int) -> str:
    """A document that unfolds to ``2**times`` texts and as many lists."""
    lines = [f"a{level}: &a{level} [*a{level - 1}, *a{level - 1}]" for level in range(1, times + 1)]
    return "\n".join(["a0: &a0 x", *lines, ""])


def test_aliases_are_counted_with_all_that_they_stand_for(tmp_path):
    """Line k unfolds to 2**k texts: 2**40 of them would be a terabyte, and 2**10 are nothing."""
    assert parse_yaml(doubled(10))["a2"] == [["x", "x"], ["x", "x"]]
    path = tmp_path / "bomb.yaml"
    path.write_text(doubled(40), encoding="utf-8")
    assert f"more than {MOST_VALUES} values with aliases expanded" in refusal(path)


def test_merged_mappings_count_like_aliases(tmp_path):
    lines = [f"a{level}: &a{level} {{<<: [*a{level - 1}, *a{level - 1}], k{level}: 1}}" for level in range(1, 40)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(["a0: &a0 {k: 1}", *lines, ""]), encoding="utf-8")
    assert "with aliases expanded" in refusal(path)


def test_an_alias_inside_what_it_stands_for_is_refused():
    with pytest.raises(ValueError, match=r"line 1, column 8: alias '\*a' contains itself"):
        parse_yaml("x: &a [*a]")


@pytest.mark.parametrize("text", ["x: " + "[" * 10**6, "x: " + "[" * 2000 + "]" * 2000, "- " * 10**6 + "1"])
def test_deep_nesting_reaches_no_stack(text):
    """A C parser dies of a list in a list a hundred thousand times over, or refuses a thousand in words of its own."""
    with pytest.raises(ValueError, match=f"more than {DEEPEST} lists and mappings inside each other"):
        parse_yaml(text)


@pytest.mark.parametrize(("text", "base"), [("17:04", 60), ("1:30.5", 60), ("-2:00", 60), ("010", 8), ("01_000", 8)])
def test_a_number_in_another_base_than_it_looks_is_refused(text, base):
    """``isl: 17:04`` is 1,024 in YAML 1.1, and ``010`` is 8."""
    with pytest.raises(ValueError, match=f"line 2, column 6: '{text}' is a number in base {base} to YAML; write"):
        parse_yaml(f"name: x\nisl: {text}\n")
    assert parse_yaml(f"isl: '{text}'") == {"isl": text}


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("0.5", 0.5), ("1_000", 1000), ("0x10", 16), ("0.010", 0.01)])
def test_numbers_that_are_what_they_look_like_are_read(text, value):
    assert parse_yaml(f"isl: {text}") == {"isl": value}


def test_a_file_that_has_no_end_is_not_read_to_its_end():
    with pytest.raises(SpecError, match=r"/dev/zero: cannot be read: larger than 16 MB"):
        read_mapping(Path("/dev/zero"))
    assert MOST_BYTES == 16e6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1" + "0" * 6000, "line 1, column 7: '1000"),
        ("a: !!int x", "'x' cannot be read as int"),
        ('a: "b\\x1b[31m"', "a text holds the control character '\\x1b'"),
        ('"a\\nb": 1', "key 'a\\nb' has a line end in it"),
        ("? " + "[1, 2]\n: 3", "key [1, 2] is not text"),
    ],
)
def test_what_is_no_value_is_told_with_its_place(text, said):
    with pytest.raises(ValueError, match=r"^broken YAML: line 1, column \d+: ") as caught:
        parse_yaml(text)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 2 * LONGEST_SHOWN


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("hbm_capacity: 141 GB", "hbm_capacity: 100 GB"), "hbm_reported: '139.8 GiB' is above hbm_capacity '100 GB'"),
        (("title: ", "title: |\n  two\n  lines\nvendr: "), "title: 'two\\nlines\\n' has a line end in it"),
        (("sm_count: 132", f"sm_count: {'x' * 10**5}"), "sm_count: 'xxx"),
        (("tdp: 700 W", f"tdp: 700 W\n? {'k' * 10**4}\n: 1"), "unknown key 'kkk"),
    ],
)
def test_a_fault_of_a_system_is_one_short_line(tmp_path, edit, said):
    assert edit[0] in SHIPPED["h200_sxm"]
    path = tmp_path / "mine.yaml"
    path.write_text(SHIPPED["h200_sxm"].replace(*edit, 1), encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_system(path)
    (line,) = [each for each in str(caught.value).splitlines() if said in each]
    assert len(line) < 2 * LONGEST_SHOWN + len(str(path))


def test_an_architecture_is_a_name_and_decides_nothing(tmp_path):
    """What a chip does has keys of its own: a new name keeps the reduction in the switch."""
    path = tmp_path / "mine.yaml"
    path.write_text(SHIPPED["h200_sxm"].replace("architecture: Hopper", "architecture: Rubin"), encoding="utf-8")
    assert load_system(path) == replace(load_system("h200_sxm"), name="mine", architecture="Rubin")


def test_the_layers_of_a_model_are_bounded(tmp_path):
    text = spec_files("model")["llama_3_1_8b"].read_text(encoding="utf-8")
    path = tmp_path / "tall.yaml"
    runs = "  - {count: 9000, attention: gqa, ffn: dense}\n"
    path.write_text(text.replace("  - {count: 32, attention: gqa, ffn: dense}\n", 2 * runs), encoding="utf-8")
    with pytest.raises(SpecError, match="layers: 18000 in all; allowed: up to 10000"):
        load_model(path)


@pytest.fixture
def inheriting(tmp_path, monkeypatch):
    """Writes efficiency files that inherit from each other into a directory of the user's own."""
    folder = tmp_path / "hw_specs" / "efficiency"
    folder.mkdir(parents=True)
    monkeypatch.setenv("DISAGG_SIM_PATH", str(tmp_path))

    def write(**parents: str) -> None:
        for name, parent in parents.items():
            text = f"system: {name}\ninherits: {parent}\nreason: none\n"
            (folder / f"{name}.yaml").write_text(text, encoding="utf-8")

    return write


def test_files_that_inherit_in_a_circle_are_refused(inheriting):
    inheriting(aa="bb", bb="cc", cc="bb")
    with pytest.raises(SpecError, match=r"cc.yaml: inherits in a circle: bb -> cc -> bb"):
        load_efficiency("aa")
    inheriting(cc="h100_sxm")
    assert load_efficiency("aa").measured_on == "h100_sxm"


def test_a_long_chain_of_heirs_is_refused(inheriting):
    inheriting(**{f"s{number}": f"s{number + 1}" for number in range(100)})
    with pytest.raises(SpecError, match=r"inherits through more than 20 files: s0 -> s1 -> s2 -> s3 -> \.\.\."):
        load_efficiency("s0")


@given(st.recursive(st.none() | st.integers() | st.floats() | st.text(), st.lists))
def test_any_value_is_shown_in_one_short_line(value):
    text = quoted(value)
    assert len(text) <= LONGEST_SHOWN + len("... (1,000,000 characters)")
    assert text.isprintable()


def test_values_that_have_no_repr_are_shown_all_the_same():
    deep: list[object] = []
    for _ in range(10**5):
        deep = [deep]
    assert quoted(deep) == "a value nested too deeply to be shown"
    assert quoted(10**5000) == "a number too long to be shown"
    assert nearest("x" * 10**6, ["y"]) == ""


@given(st.text())
def test_a_printed_text_moves_no_cursor(text):
    lines = printable(text).split("\n")
    assert all(line.isprintable() for line in lines)
    assert len(lines) == text.count("\n") + 1


def test_the_first_name_given_twice():
    assert given_twice(["a", "b", "a", "b"]) == "a"
    assert given_twice(iter(["a", "b"])) == ""


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


@pytest.mark.parametrize(
    ("kind", "name", "fault"),
    [
        ("power", "h200_sxm", "laws: none is of kind 'gemm', which stands for kinds without one"),
        ("uncertainty", "measured", "kinds: missing key 'gemm'"),
    ],
)
def test_power_and_spreads_of_matrix_multiplies_are_needed(tmp_path, kind, name, fault):
    lines = spec_files(kind)[name].read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path / f"{name}.yaml"
    path.write_text("".join(line for line in lines if "kind: gemm," not in line and "  gemm:" not in line))
    with pytest.raises(SpecError) as refusal:
        check_file(path)
    assert str(refusal.value) == message(path, [fault])


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
    (b"\x89PNG\r\n\x1a\n\xff\xfe", "not a YAML file: it is no UTF-8 text"),
    (b"- a\n- b\n", "expected 'key: value' lines, found a list"),
    (b"title: x\nhidden: [1, 2\n", r"broken YAML: line 3, column 1: .*"),
    (b"title: x\nhidden: 1\ntitle: y\n", r"broken YAML: line 3, column 1: key 'title' is given twice"),
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


@pytest.mark.parametrize(("kind", "name"), [("hardware", "mi300x"), ("model", "opt_30b"), ("efficiency", "h100_sxm")])
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
