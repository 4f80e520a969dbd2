"""The page of results as a file: what it holds and loads, its first screen, and that names stay text."""

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

import disagg_sim.report.page as package
from disagg_sim.errors import InputError
from disagg_sim.report.page.assemble import SCRIPTS, Content, pack, page_html
from disagg_sim.report.page.write import content_of
from disagg_sim.report.summary import summary
from disagg_sim.report.verdicts import verdict_of
from disagg_sim.sweep.fidelity import SPEEDS, CaseFidelity, fidelity_of
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import MODES, PointLimits, SweepSpec, same_system
from disagg_sim.sweep.traffic import Traffic
from tests.report.pages import SPOILT, plan_directory, small_sweep

ASSETS = Path(package.__file__).parent / "assets"
#: SHA-256 of the files of uPlot 1.6.32 as its npm package has them.
UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


class Elements(HTMLParser):
    """Tags with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.raw:
            self.raw[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:  # inside a script or a style
            self.raw[self.cdata_elem][-1] += data


def unpacked(text: str) -> dict[str, pd.DataFrame]:
    """The tables of a page, read as its script reads them: columns at their places."""
    elements = Elements(text)
    content, data = json.loads(elements.raw["script"][0]), gzip.decompress(base64.b64decode(elements.raw["script"][1]))
    tables = {}
    for name, table in content["tables"].items():
        columns = {}
        for column in table["columns"]:
            values = np.frombuffer(data, f"<{column['type']}", table["rows"], column["at"])
            words = column.get("words")
            columns[column["name"]] = [words[code] for code in values] if words else values
        tables[name] = pd.DataFrame(columns)
    return tables


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return small_sweep(tmp_path_factory.mktemp("sweep"))


def test_numbers_and_words_come_back_as_they_were_packed():
    table = pd.DataFrame(
        {
            "mode": ["b", "a", "b"],
            "gpus": [8, 16, 2**30],
            "row": [-1, 7, 300],
            "pp": [1, 2, 300],
            "ttl_s": [0.1, np.nan, np.inf],
        }
    )
    text = page_html(Content(kind="sweep", title="t", facts={}, tables={"points": table}))
    found = unpacked(text)["points"]
    assert found["mode"].tolist() == ["b", "a", "b"]
    assert found["gpus"].tolist() == [8, 16, 2**30]
    assert found["row"].tolist() == [-1, 7, 300]
    assert found["pp"].tolist() == [1, 2, 300]
    np.testing.assert_allclose(found["ttl_s"], [0.1, np.nan, np.inf], rtol=1e-7)


def test_the_same_tables_pack_to_the_same_text():
    table = {"points": pd.DataFrame({"x": np.arange(1000.0)})}
    assert pack(table) == pack(table)


def test_points_of_a_sweep_are_those_of_its_frontier_with_others_beside(results):
    tables = unpacked(page_html(content_of(results, beside=200, breakdowns=False)))
    front = pd.read_csv(results / "frontier.csv")
    points = tables["points"]
    on = points[points["row"] >= 0]
    assert on["row"].tolist() == front.index.tolist()
    np.testing.assert_allclose(on["tokens_per_s_per_gpu"], front["tokens_per_s_per_gpu"], rtol=1e-6)
    beside = points[points["row"] < 0]
    assert 0 < len(beside) <= 200
    for row in beside.itertuples():  # none of them beats the frontier of its own mode
        mine = on[(on["mode"] == row.mode) & (on["case"] == row.case)]
        better = mine[mine["tokens_per_s_per_user"] >= row.tokens_per_s_per_user * (1 - 1e-6)]
        assert better["tokens_per_s_per_gpu"].max() >= row.tokens_per_s_per_gpu * (1 - 1e-6)


def test_parts_of_each_latency_add_up_to_it(results):
    tables = unpacked(page_html(content_of(results, beside=0)))
    points = tables["points"].set_index("row")
    sums = tables["parts"].pivot_table("seconds", "row", "latency", "sum")
    np.testing.assert_allclose(sums["ttl"], points["ttl_s"].loc[sums.index], rtol=1e-5)
    np.testing.assert_allclose(sums["ftl"], points["ftl_s"].loc[sums.index], rtol=1e-5)
    held = tables["memory"][tables["memory"]["phase"] == "decode"].groupby("row")["bytes"].sum()
    np.testing.assert_allclose(held, points["decode_memory_bytes"].loc[held.index], rtol=1e-5)


def test_gains_are_the_ratio_of_the_best_points_of_both_kinds(results):
    gains = unpacked(page_html(content_of(results, beside=0, breakdowns=False)))["gains"]
    front = pd.read_csv(results / "frontier.csv")
    row = gains[gains["at"] == 20].iloc[0]
    mine = front[(front["case"] == row["case"]) & (front["tokens_per_s_per_user"] >= 20)]
    best = mine.groupby(mine["mode"] == "disaggregated")["tokens_per_s_per_gpu"].max()
    assert row["gain"] == pytest.approx(best[True] / best[False], rel=1e-6)


def test_a_page_may_load_nothing_and_run_its_own_script_alone(tmp_path):
    text = page_html(content_of(plan_directory(tmp_path)))
    elements = Elements(text)
    (policy,) = (given["content"] for tag, given in elements.tags if given.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    script = elements.raw["script"][-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    for tag, given in elements.tags:
        assert not {"src", "srcset", "action", "background"} & given.keys(), tag
        assert given.get("href", "#").startswith("#"), tag
        assert not [name for name in given if name.startswith("on") or name == "style"], tag


def test_names_of_users_stay_text(tmp_path):
    text = page_html(content_of(plan_directory(tmp_path)))
    elements = Elements(text)
    assert [tag for tag, _ in elements.tags].count("script") == 3
    assert SPOILT not in text
    assert json.loads(elements.raw["script"][0])["facts"]["plan"]["question"]["model"] == SPOILT


def test_scripts_make_no_html_of_text_and_reach_for_no_network():
    assert {*SCRIPTS} == {path.name for path in ASSETS.glob("*.js")}
    for path in ASSETS.glob("*.js"):
        code = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in code, f"{path.name}: {word}"
        assert not re.search(r"\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon|import\(", code), path.name
        assert len(code.splitlines()) <= 400, f"{path.name}: split it"


def test_the_library_is_as_its_authors_published_it():
    for name, digest in UPLOT.items():
        assert hashlib.sha256((ASSETS / "vendor" / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, r"no results to report; allowed: a directory with manifest.json of sweep, .*"),
        ({"plan.json": "{"}, r"plan.json: damaged: not a plan .*"),
        ({"plan.json": '{"schema": "disagg-sim/pools/1"}'}, r"plan.json: damaged: not a plan .*"),
        ({"summary.csv": "a,b\n1,2\n"}, r"summary.csv: missing column 'rate_scale'"),
        ({"manifest.json": "{}"}, r"manifest.json: damaged: .*"),
    ],
)
def test_what_is_no_result_is_one_clear_line(tmp_path, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=said) as told:
        content_of(tmp_path)
    assert "\n" not in str(told.value)


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
