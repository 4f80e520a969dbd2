"""A published study from its sweeps to figures: what is computed once, what a figure shows, what is written."""

from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from disagg_sim.cli.main import run
from disagg_sim.errors import InputError
from disagg_sim.facts.load import list_specs
from disagg_sim.sweep.spec import load_sweep
from lab.studies.beyond_the_buzz.figures import FIGURES, best_colocated, figure_data
from lab.studies.beyond_the_buzz.frontiers import FIGURE_5, Frontiers, parts_of, pipelined_prefill, study_files
from lab.studies.beyond_the_buzz.reproduce import reproduce

SMALL = """
name: small
models: [llama_3_1_8b]
systems: {gb200_nvl72: nvfp4_fp8kv}
traffic: {isl: 1024, osl: 128}
limits: {max_gpus: 4, gpu_cap: 32}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Small sweeps in place of the shipped ones of the same names."""
    folder = tmp_path_factory.mktemp("user") / "sweeps" / "beyond_the_buzz"
    folder.mkdir(parents=True)
    (folder / "fig06.yaml").write_text(SMALL + "modes: [disaggregated, colocated, piggyback]\n")
    (folder / "fig06_every_step_mixed.yaml").write_text(SMALL + "modes: [piggyback]\nevery_step_mixed: true\n")
    (folder / "fig09.yaml").write_text(SMALL)
    return folder.parents[1]


@pytest.fixture(autouse=True)
def small_sweeps(root, monkeypatch):
    monkeypatch.setenv("DISAGG_SIM_PATH", str(root))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("out")


@pytest.mark.parametrize("profile", list_specs("profile"))
def test_every_shipped_sweep_of_the_study_is_valid(profile, monkeypatch):
    monkeypatch.delenv("DISAGG_SIM_PATH")
    for name, path in study_files().items():
        assert load_sweep(str(path), profile=profile).profile == profile, name


def test_every_figure_of_the_paper_has_a_sweep_and_a_picture():
    paper = {f"fig{number:02d}" for number in (1, 5, 6, 7, 8, 9, 10, 11, 12, 14)}
    assert set(FIGURES) == paper
    assert {name for name in (FIGURE_5, *study_files()) if name[3:].isdecimal()} == paper


def test_a_figure_is_its_own_sweep_and_those_named_after_it():
    names = ("fig01", "fig1", "fig10", "fig10_colocated")
    assert parts_of("fig10", names) == ("fig10", "fig10_colocated")
    assert parts_of("fig10_colocated", names) == ("fig10_colocated",)
    with pytest.raises(InputError, match="'fig11' is unknown, did you mean 'fig10'"):
        parts_of("fig11", ("fig10",))


def computed(listener: Mock) -> int:
    """Design points that runs computed."""
    return sum(call.args[0] for call in listener.start.call_args_list)


def test_what_lies_on_disk_is_not_computed_again(out):
    first, second = Mock(), Mock()
    frontiers = Frontiers(out, first)
    table = frontiers.frontier("fig06", "ideal")
    assert set(table["sweep"]) == {"fig06", "fig06_every_step_mixed"}
    assert set(table["mode"]) == {"disaggregated", "colocated", "piggyback"}
    assert computed(first) > 0
    again = Frontiers(out, second)
    pd.testing.assert_frame_equal(again.frontier("fig06", "ideal"), table)
    assert computed(second) == 0
    assert again.design_points == frontiers.design_points > 0


def test_sweeps_with_a_case_in_common_compute_it_once(out, tmp_path):
    """Figure 9 is one mode of the case of figure 6: beside that it takes nothing, and gives the same as alone."""
    alone, told = Frontiers(out, Mock()), Mock()
    together = Frontiers(tmp_path, told)
    together.prepare(["fig06", "fig09"], ["ideal"])
    pd.testing.assert_frame_equal(together.frontier("fig09", "ideal"), alone.frontier("fig09", "ideal"))
    assert together.design_points == computed(told) + alone.design_points


def test_both_axes_of_a_panel_end_at_one(out):
    table = figure_data(Frontiers(out, Mock()), "fig06", "ideal").table
    assert table["x"].max() == table["y"].max() == 1
    np.testing.assert_allclose(table["x"] * table["x_unit"], table["tokens_per_s_per_user"])
    assert table["curve"].nunique() == 3


def test_the_best_colocated_curve_is_the_upper_envelope_of_both_modes(out):
    points = Frontiers(out, Mock()).frontier("fig06", "ideal")
    best = best_colocated(points)
    assert set(best["mode"]) <= {"colocated", "piggyback"}
    for _, point in points[points["mode"] != "disaggregated"].iterrows():
        reached = best[best["tokens_per_s_per_user"] >= point["tokens_per_s_per_user"]]
        assert reached["tokens_per_s_per_gpu"].max() >= point["tokens_per_s_per_gpu"]


def test_a_pipeline_holds_one_prompt_a_rank_and_answers_sooner():
    table = pipelined_prefill("ideal")
    assert (table["ep"] * table["pp"] == 64).all()
    assert (table["batch"] == table["ep"]).all()
    assert (table["fits"] == (table["memory_bytes"] <= table["memory_limit_bytes"])).all()
    for _, depths in table.groupby("mla_form"):
        assert (np.diff(depths["ftl_s"]) < 0).all()
        flat = depths[depths["pp"] == 1].iloc[0]
        assert flat["request_rate_per_s"] * flat["ftl_s"] == pytest.approx(64)
    one, other = (table[table["mla_form"] == form].set_index("pp") for form in ("naive", "cached"))
    assert one.loc[1, "ftl_s"] == other.loc[1, "ftl_s"]  # nothing is recomputed in a whole prompt
    assert one.loc[4, "ftl_s"] > other.loc[4, "ftl_s"]
    assert one.loc[4, "memory_bytes"] < other.loc[4, "memory_bytes"]


def test_figures_are_written_with_their_data(out, capsys):
    arguments = ["--figure", "5", "--figure", "fig06", "--profile", "ideal", "--out", str(out), "--jobs", "1"]
    assert run(["reproduce", "beyond-the-buzz", *arguments]) == 0
    assert "design points, 2 pictures" in capsys.readouterr().out
    for name in ("fig05", "fig06"):
        assert (out / "ideal" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        data = pd.read_csv(out / "ideal" / f"{name}.csv")
        assert {"panel", "curve", "x", "y"} <= set(data)
        assert len(data) > 3


def test_everything_is_the_figures_and_the_claims(tmp_path, monkeypatch, capsys):
    claims = pd.DataFrame({"id": ["C1", "C2"], "profile": "ideal", "verdict": ["holds", "fails"], "value": [1.5, 2.0]})
    monkeypatch.setattr("lab.studies.beyond_the_buzz.reproduce.FIGURES", ("fig05",))
    monkeypatch.setattr("lab.studies.beyond_the_buzz.reproduce.judged_claims", lambda *_: claims)
    monkeypatch.setattr("lab.studies.claims.PaperText.as_authors", ())
    done = reproduce(Frontiers(tmp_path, Mock(), study="tiny"), profiles=["ideal"])
    assert [path.name for path in done.pictures] == ["fig05.png"]
    assert (tmp_path / "as_authors.csv").read_text().startswith("id,statement,place,setting,paper,inferred,engine,")
    assert (tmp_path / "claims.csv").read_text() == "id,profile,verdict,value\nC1,ideal,holds,1.5\nC2,ideal,fails,2\n"
    monkeypatch.setattr(Frontiers, "names", ("fig05",))
    assert run(["reproduce", "beyond-the-buzz", "--profile", "ideal", "--out", str(tmp_path), "--jobs", "1"]) == 0
    assert "ideal: 1 of 2 claims hold; not: C2" in capsys.readouterr().out
