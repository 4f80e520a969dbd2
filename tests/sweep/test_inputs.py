"""Where two sets of inputs differ: every value by name, and no row told that did not change."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.sweep.digests import differences, inputs_of

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
