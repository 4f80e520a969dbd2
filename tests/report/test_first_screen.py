"""The first screen of a sweep: which mode is better where, by how much, and how sure."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import pytest

from disagg_sim.report.summary import summary
from disagg_sim.report.verdicts import verdict_of
from disagg_sim.sweep.fidelity import SPEEDS, CaseFidelity, fidelity_of
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import MODES, PointLimits, SweepSpec, load_sweep, same_system
from disagg_sim.sweep.traffic import Traffic

Y = "tokens_per_s_per_gpu"


def case(**throughput: float | None) -> SimpleNamespace:
    """A case whose modes have one throughput at every speed; None = no design is so fast."""

    def mode(name: str, value: float | None) -> SimpleNamespace:
        return SimpleNamespace(mode=name, at=lambda _: None if value is None else {Y: value, "mode": name})

    found = tuple(mode(*each) for each in throughput.items())
    return SimpleNamespace(found=found, plan=SimpleNamespace(case=SimpleNamespace(throughput=Y)))


def bars(low: float, high: float, probability: float) -> CaseFidelity:
    """Error bars of the gain of disaggregation at 50 tokens/s/user."""
    row = {"tokens_per_s_per_user": [50.0], "gain_p10": [low], "gain_p90": [high], "probability": [probability]}
    nothing = pd.DataFrame()
    return CaseFidelity(case="one", outside=nothing, bands=nothing, gain=pd.DataFrame(row))


#: Throughput of disaggregated, co-located, piggybacking; ends and likelihood of the gain; what is said; what is taken.
VERDICTS = """
300 90 100 | | **disaggregated** 3.0× | disaggregated
300 90 100 | 1.68 3.2 0.999 | **disaggregated** 3.0× (1.68–3.2), > 99 % sure | disaggregated
120 100 90 | 0.9 1.5 0.89 | not sure: disaggregated 1.20× (0.90–1.50), 89 % sure to be ahead | colocated
109 100 90 | 1.01 1.5 0.95 | either will do: disaggregated 1.09× (1.01–1.50), 95 % sure to be ahead | colocated
109.6 100 90 | 0.9 1.5 0.398 | either will do: disaggregated 1.09× (0.90–1.50), 39 % sure to be ahead | colocated
120 100 90 | 0.9 1.5 0.896 | not sure: disaggregated 1.20× (0.90–1.50), 89 % sure to be ahead | colocated
80 90 100 | 0.5 0.8 0.04 | **co-located** 1.25× (1.25–2.0), 96 % sure | piggyback
80 90 100 | 0.5 1.6 0.4 | not sure: co-located 1.25× (0.62–2.0), 60 % sure to be ahead | piggyback
80 - - | 1 inf 0.91 | **disaggregated** alone reaches it, 91 % sure | disaggregated
80 - - | 0 inf 0.6 | not sure: disaggregated alone reaches it, 60 % sure to be ahead | disaggregated
- - 70 | | **co-located** alone reaches it | piggyback
- - - | | – | -
"""


@pytest.mark.parametrize("line", VERDICTS.strip().splitlines())
def test_a_mode_is_better_where_the_gain_is_large_and_sure(line):
    modes, sure, text, taken = (part.strip() for part in line.split("|"))
    speeds = [None if each == "-" else float(each) for each in modes.split()]
    item = case(**dict(zip(("disaggregated", "colocated", "piggyback"), speeds, strict=True)))
    found = verdict_of(item, bars(*map(float, sure.split())) if sure else None, 50.0)
    assert found.text == text
    assert (found.take or {"mode": "-"})["mode"] == taken


def test_error_bars_of_another_speed_say_nothing():
    found = verdict_of(case(disaggregated=300.0, colocated=100.0), bars(0.5, 4.0, 0.5), 20.0)
    assert found.text == "**disaggregated** 3.0×"


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two cases that an idle axis tells apart: no NIC limit, and one that nothing reaches."""
    root = tmp_path_factory.mktemp("out")
    spec = SweepSpec(
        source="trial.yaml",
        name="trial",
        models=("llama_3_1_8b",),
        pools=(same_system("h100_sxm", "fp8"), same_system("a100_sxm_80gb", "bf16")),
        traffic=(Traffic(isl=2048, osl=256),),
        modes=MODES,
        limits=(PointLimits(max_gpus=2, gpu_cap=64), PointLimits(max_gpus=2, gpu_cap=64, nic_limit=1e13)),
    )
    return run_sweep(plan_sweep(spec), root, jobs=1, listener=Mock(), outside=True), root


def test_the_first_table_compares_modes_as_the_frontiers_do(swept):
    result, root = swept
    fidelity = fidelity_of(result, root, error_bars=True)
    table = summary(result, fidelity=fidelity).split("\n\n")[3].splitlines()
    assert table[0].startswith("| model | system, precision | tokens in/out |")
    front = result.frontier
    for line, system in zip(table[2:], ("h100_sxm", "a100_sxm_80gb"), strict=True):
        cells = line.strip("| ").split(" | ")
        (gain,) = (
            each.gain
            for each in fidelity
            if each.case.startswith(f"llama_3_1_8b-{system}") and "nic" not in each.case.replace("nic_none", "")
        )
        for cell, speed in zip(cells[-3:], SPEEDS, strict=True):
            mine = front[(front["system"] == system) & (front["tokens_per_s_per_user"] >= speed)]
            best = mine.groupby(mine["mode"] == "disaggregated")[Y].max()
            ratio = best[True] / best[False]
            (row,) = gain[gain["tokens_per_s_per_user"] == speed].to_dict("records")
            named = max(ratio, 1 / ratio)
            clear = named >= 1.1 and max(row["probability"], 1 - row["probability"]) >= 0.9
            assert f" {named:.2f}× (" in cell or f" {named:.1f}× (" in cell
            assert cell.startswith("**") == clear
            assert ("disaggregated" in cell) == (ratio >= 1)


def test_cases_that_an_idle_axis_tells_apart_share_a_row(swept):
    result, _ = swept
    text = summary(result)
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("| llama_3_1_8b | h100_sxm, fp8 | 2048/256 | nic none or ")
    ]
    assert len(rows) == 2  # of verdicts, and of throughput


def test_a_summary_without_error_bars_says_how_to_get_them(swept):
    result, _ = swept
    assert "`--uncertainty` adds it" in summary(result)


def test_a_sweep_of_one_kind_of_modes_compares_nothing(swept):
    result, _ = swept
    modes = [replace(item, modes=item.modes[1:]) for item in result.cases]
    spec = replace(result.plan.spec, modes=MODES[1:])
    alone = replace(result, cases=tuple(modes), plan=replace(result.plan, spec=spec))
    text = summary(alone)
    assert "Disaggregated or co-located?" not in text
    shared = result.frontier[result.frontier["mode"] != "disaggregated"]
    best = shared.groupby("system", observed=True)[Y].max()
    assert f"| {best['h100_sxm']:,.0f} |" in text


def test_the_demo_has_error_bars_and_no_idle_axis():
    spec = load_sweep("demo")
    assert spec.uncertainty
    assert len(plan_sweep(spec).cases) == 2 * 3 * 2
