"""The comparison to the byte of ``benchmarks/goldens.py`` on two of its files."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def goldens(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("goldens")


def test_two_writes_are_equal_and_a_changed_digit_is_named(goldens, tmp_path, capsys):
    only = ["--only", "frontier_llama_8b_h100_fp8|explain_dcp"]
    assert goldens.main(["--write", str(tmp_path), *only]) == 0
    assert goldens.main(["--compare", str(tmp_path), *only]) == 0
    path = tmp_path / "frontier_llama_8b_h100_fp8.csv"
    head, first, *rest = path.read_text().split("\n")
    cells = first.split(",")
    place = head.split(",").index("ttl_s")
    was, cells[place] = cells[place], cells[place] + "1"
    path.write_text("\n".join([head, ",".join(cells), *rest]))
    capsys.readouterr()
    assert goldens.main(["--compare", str(tmp_path), *only]) == 1
    assert capsys.readouterr().out.splitlines() == [f"{path}: line 2, ttl_s: {was}1 -> {was}", "1 of 2 files differ"]
    (tmp_path / "explain_dcp_decode.json").unlink()
    assert [*goldens.differences(tmp_path, {"explain_dcp_decode.json": str})] == [
        f"{tmp_path}/explain_dcp_decode.json: not written"
    ]
