"""Constants that were set with data in view stand in a table of the documentation with the values of the code."""

import csv
import importlib
import re
from pathlib import Path

import pytest

from disagg_sim.facts.load import load_efficiency, load_engine, load_profile
from disagg_sim.physics.attention_parts import ASSUMED_PARTS

ROOT = Path(__file__).parent.parent
ROWS = list(csv.reader((ROOT / "docs" / "set_by_data.csv").read_text(encoding="utf-8").splitlines()))[1:]


def constants() -> list[tuple[str, float]]:
    """Names of constants with their modules, and the values of the table."""
    found = []
    for names, values, *_ in ROWS:
        module = ""
        spelled = re.findall(r"`([\w.]+)`", names)
        for name, value in zip(spelled, values.split(", "), strict=False):
            module = name.rpartition(".")[0] or module
            if module and name.split(".")[-1].isupper():
                number, *unit = value.split()
                found.append((f"{module}.{name.split('.')[-1]}", float(number) * {"ns": 1e-9}.get("".join(unit), 1.0)))
    return found


def test_values_of_the_table_are_those_of_the_code():
    listed = constants()
    assert len(listed) == 36
    for name, value in listed:
        module, _, constant = (name if name.startswith("lab.") else f"disagg_sim.{name}").rpartition(".")
        known = getattr(importlib.import_module(module), constant)
        assert (next(iter(known.values())) if isinstance(known, dict) else known) == value, name  # of formats the first
    assert load_profile("measured").gemm_t0_cap_static_scales == 4e-6
    assert load_engine("vllm").exchange_stretch == 2
    for system in ("h100_sxm", "h200_sxm"):
        fits = load_efficiency(system)
        assert fits is not None
        assert [row.e_memory for row in fits.moe if row.block_rows] == [0.687]


def test_assumed_parts_of_the_table_are_those_of_the_code():
    """Each part with its numbers: times, then shares of the BF16 peak and of the HBM bandwidth."""
    (values,) = [row[1] for row in ROWS if "ASSUMED_PARTS" in row[0]]
    listed = dict(re.findall(r"([a-z ]+): ([^;]+)", values))
    assert {name.strip().replace(" ", "_") for name in listed} == set(ASSUMED_PARTS)
    for name, numbers in listed.items():
        part = ASSUMED_PARTS[name.strip().replace(" ", "_")]
        times = [part.t0 * 1e6, part.token * 1e9, part.walk * 1e9]
        wanted = [*times, part.e_compute, part.e_memory, part.head_tile]
        found = [float(each) for each in re.findall(r"[\d.]+", numbers)]
        assert found == pytest.approx([number for number in wanted if number]), name


def test_every_constant_that_is_called_fitted_is_listed():
    listed = {name for name, _ in constants()}
    for path in (ROOT / "disagg_sim" / "physics").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "disagg_sim").with_suffix("").parts)
        for name in re.findall(r"^#: .*\(fitted.*\n([A-Z_0-9]+) =", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert f"{module}.{name}" in listed
