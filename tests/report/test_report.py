"""What people read: words for mappings, the summary, and labels that do not cover each other."""

from dataclasses import replace
from itertools import combinations
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from disagg_sim.domain import SHARDING
from disagg_sim.report.drawing import MOST, place_labels
from disagg_sim.report.figures import MARK, draw_figures
from disagg_sim.report.summary import summary
from disagg_sim.report.words import mapping_text, ratio_text
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import MODES, PointLimits, SweepSpec, same_system
from disagg_sim.sweep.store import RunListener
from disagg_sim.sweep.traffic import Traffic


def point(*cut: int) -> dict[str, int]:
    return {f"decode_{name}": value for name, value in zip(SHARDING, cut, strict=False)}


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ((1, 1, 1, 1, 1, 0), "1 GPU"),
        ((8, 1, 8, 1, 1, 0), "TP8"),
        ((8, 1, 1, 8, 1, 0), "TP8 EP8"),
        ((1, 32, 1, 32, 1, 0), "DP32 EP32"),
        ((2, 32, 4, 16, 2, 0), "DP32 TP2 FFN-TP4 EP16 PP2"),
        ((1, 8, 8, 1, 1, 0), "DP8 FFN-TP8"),
        ((1, 1, 1, 1, 4, 0), "PP4"),
        ((1, 48, 1, 48, 1, 32), "DP48 EP48+32"),
    ],
)
def test_a_mapping_reads_as_engineers_write_it(degrees, text):
    assert mapping_text(point(*degrees), "decode") == text


def test_a_ratio_shows_instances_and_their_size():
    counts = {"prefill_instances": 3, "prefill_gpus": 8, "decode_instances": 2, "decode_gpus": 16}
    assert ratio_text(counts) == "3×8 : 2×16"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    listener: RunListener = Mock()
    spec = SweepSpec(
        source="trial.yaml",
        name="trial",
        models=("llama_3_1_8b", "llama_3_1_405b"),
        pools=(same_system("h800_sxm", "fp8"),),
        traffic=(Traffic(isl=1024, osl=128),),
        modes=MODES,
        limits=(PointLimits(max_gpus=2),),
    )
    return run_sweep(plan_sweep(spec), tmp_path_factory.mktemp("out"), jobs=1, listener=listener)


def test_the_summary_names_the_ftl_limit_of_each_traffic(result):
    spec = result.plan.spec
    longer = replace(spec, traffic=(*spec.traffic, Traffic(isl=65536, osl=128, ftl_s=60.0)))
    assert "FTL at most 10 s," in summary(result, figures=False)
    assert "FTL at most 10 or 60 s," in summary(replace(result, plan=replace(result.plan, spec=longer)), figures=False)


def test_every_table_of_the_summary_is_rectangular(result):
    text = summary(result, figures=True)
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) >= 3
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "fits on no allowed mapping" in text
    assert "h800_sxm, fp8 \\*" in text


@settings(max_examples=8)
@given(st.integers(1, 60), st.floats(0.2, 4.0), st.integers(0, 10**6))
def test_labels_never_cover_each_other(count, bend, seed):
    x = np.sort(np.random.default_rng(seed).uniform(5, 200, count))
    y = 1000 * (1 - (x / 210) ** bend)
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(x, y)
    axes.set_xlim(0, 240)
    axes.set_ylim(0, 1200)
    labels = [f"decode DP{i} EP{i}, batch {i}\nprefill TP8, batch 4" for i in range(count)]
    points = list(zip(x, y, labels, strict=True))
    placed = place_labels(figure, axes, points)
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    boxes = [Text.get_window_extent(note, renderer) for note in axes.texts]
    assert 1 <= placed == len(boxes) <= MOST
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_no_point_no_label():
    figure = Figure()
    FigureCanvasAgg(figure)
    assert place_labels(figure, figure.add_subplot(), []) == 0


def test_pictures_of_an_axis_compare_its_values(tmp_path, result):
    """Two cases: one picture each of the co-located modes alone, and one that compares them."""
    limits = (PointLimits(max_gpus=2), PointLimits(max_gpus=2, ftl_s=0.5))
    spec = replace(result.plan.spec, models=("llama_3_1_8b",), modes=MODES[1:], limits=limits)
    both = run_sweep(plan_sweep(spec), tmp_path, jobs=1, listener=Mock())
    assert draw_figures(both, tmp_path, jobs=1) == 3
    names = {path.relative_to(tmp_path / "figures").as_posix() for path in (tmp_path / "figures").glob("**/*.png")}
    cases = [case.plan.case.name for case in both.cases]
    assert names == {"llama_3_1_8b.png", *(f"{name}/pareto.png" for name in cases)}
    assert cases[1].endswith("-ftl0.5-instance2")
    assert "![llama_3_1_8b](figures/llama_3_1_8b.png)" in summary(both, figures=True)


def test_figures_of_an_earlier_sweep_are_removed(tmp_path, result):
    run_sweep(result.plan, tmp_path, jobs=1, listener=Mock())
    stale = tmp_path / "figures" / "gone" / "pareto.png"
    stale.parent.mkdir(parents=True)
    stale.write_text(MARK)
    (mine := stale.with_name("mine.png")).write_text("of somebody else")
    assert draw_figures(result, tmp_path, jobs=1) == 3  # one case has results, one has none; no overview of one
    assert not stale.exists()
    mine.unlink()
    assert len(list((tmp_path / "figures").glob("**/*.png"))) == 3
