"""Operating points: re-runs of one count once; layouts are told apart; groups and limits follow from small tables."""

import numpy as np
import pandas as pd
import pytest
from made_loads import made_lines, made_run

from disagg_sim.certainty.evidence import family_of, layout_kinds
from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_model
from lab.calibration.kernels.tables import TableError
from lab.calibration.served.cells import instance, version_in
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.groups import (
    coverage,
    errors_of,
    groups,
    judged,
    per_instance,
    points,
    side_by_side,
    with_dimensions,
)
from lab.calibration.served.read import read_files
from lab.calibration.served.rows import Measurement, WorkerGroup


def lines(*runs, **columns):
    """Lines of runs (point, measured, predicted), all of one group."""
    same = {"part": "held-out", "held_out": True, "form": "inferencex_dsr1", "model": "deepseek_r1", "version": "1.2"}
    same |= {"family": "mla_moe", "layout": "DP-EP", "prefill_layout": "DP-EP", "workers": "DP8-EP8"}
    same |= {"system": "b200_sxm", "engine": "trtllm"}
    return made_lines(*({"point": p, "measured": m, "predicted": f} for p, m, f in runs), **same | columns)


def test_a_point_that_was_run_three_times_counts_once_with_its_median():
    """Errors -0.2, -0.2, 0.25 of one point and 0.5 of another: medians -0.2 and 0.5, hence 0.35 and a bias of 0.15."""
    table = lines(("a", 1.0, 0.8), ("a", 1.25, 1.0), ("a", 0.8, 1.0), ("b", 2.0, 3.0))
    once = points(table)
    assert once["point"].tolist() == ["a", "b"]
    assert once["relative_error"].tolist() == pytest.approx([-0.2, 0.5])
    assert once["measured"].tolist() == pytest.approx([1.25, 2.0])  # the median prediction, 1.0, less its error
    found = errors_of(table)
    assert (found["rows"], found["points"]) == (4, 2)
    assert found["median_error"] == pytest.approx(0.35)
    assert found["bias"] == pytest.approx(0.15)
    assert found["median_error_of_rows"] == pytest.approx(0.225)


def test_a_point_is_inside_its_band_where_its_median_run_is():
    table = lines(("a", 1.0, 1.0), ("a", 1.0, 1.0), ("a", 9.0, 1.0), ("b", 1.0, 1.0), ("c", 3.0, 1.0))
    table = table.assign(predicted_p10=0.5 * table["predicted"], predicted_p90=2.0 * table["predicted"])
    found = errors_of(table)
    assert found["coverage"] == pytest.approx(2 / 3)
    assert found["coverage_of_rows"] == pytest.approx(3 / 5)


def test_the_same_run_on_another_day_is_the_same_point_and_another_load_or_layout_is_not():
    def row(**changes):
        wide = WorkerGroup(mapping=instance(8, ep=8, dp=0))
        return made_run(**{"isl": 900.0, "osl": 900.0, "concurrency": 4.0, "workers": wide} | changes)

    first = row()
    assert row(row="2", version="1.3").point == first.point
    others = [row(concurrency=8.0), row(isl=901.0), row(workers=WorkerGroup(mapping=instance(8, dp=0)))]
    assert len({first.point, *(other.point for other in others)}) == 4


def test_kinds_of_layouts_and_families():
    wide = instance(16, ep=8, dp=0, pp=2)
    several = [instance(8), instance(8, ep=8), instance(8, dp=0), instance(8, ep=8, dp=0), instance(4, pp=4), wide]
    kinds = ["TP", "TP-EP", "DP", "DP-EP", "TP-PP", "DP-EP-PP"]
    assert layout_kinds(Sharding.stack(several)).tolist() == kinds
    assert layout_kinds(Sharding(dp_attn=np.array([1, 4]), ep=4)).tolist() == ["TP-EP", "DP-EP"]
    names = ("llama_3_1_70b", "deepseek_r1", "kimi_k2", "qwen3_235b_a22b")
    assert [family_of(load_model(name)) for name in names] == ["dense", "mla_moe", "mla_moe", "other_moe"]


@pytest.mark.parametrize(
    ("image", "stated", "version"),
    [
        ("", "1.0.0rc3", "1.0"),
        ("lmsysorg/sglang:v0.5.12-cu130", "", "0.5"),
        ("nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:0.8.1.post1", "", "dynamo-0.8"),
        ("nvcr.io/nvidia/tensorrt-llm/release:gpt-oss-dev", "", "gpt-oss-dev"),
        ("", "", ""),
    ],
)
def test_versions(image, stated, version):
    assert version_in(image, stated) == version


def test_requests_of_an_instance():
    table = pd.DataFrame({"workers": ["2xTP4", "DP8-EP8", ""], "concurrency": [16.0, 16.0, 3.0]})
    assert per_instance(table).tolist() == [8.0, 16.0, 3.0]


def test_layouts_are_judged_apart():
    slow = lines(*((f"d{n}", 1.0, 0.8) for n in range(3)))
    right = lines(*((f"t{n}", 1.0, 1.1) for n in range(5)), layout="TP", workers="TP8")
    table = pd.concat([slow, right], ignore_index=True)
    found = groups(table)
    assert set(found["part"]) == {"held-out", "all"}
    by = found[found["part"] == "held-out"].set_index(["dimension", "value"])
    assert by.loc[("attention", "DP"), "bias"] == pytest.approx(-0.2)
    assert by.loc[("attention", "TP"), "bias"] == pytest.approx(0.1)
    assert by.loc[("experts", "EP"), "points"] == 3
    assert by.loc[("family and layout", "mla_moe, TP, aggregated"), "points"] == 5
    assert by.loc[("engine and version", "trtllm 1.2"), "points"] == 8
    assert set(with_dimensions(table)["requests of an instance"]) == {"more than 4, or not stated"}
    shown = side_by_side(found[found["part"] == "held-out"]).set_index(["by", "group"])
    assert shown.loc[("attention", "DP"), "tpot"] == "3: 20.0%, -20%"
    bars = judged(table).set_index("bar")
    bias = bars.loc["TPOT, decode with attention DP and EP: bias"]
    assert (bias["points"], bias["met"]) == (3, False)
    assert bars.loc["TPOT, DeepSeek-R1", "reached"] == pytest.approx(0.1)  # of 0.2 three times and 0.1 five times


def test_saturated_rows_are_judged_by_no_bar():
    assert judged(lines(("a", 1.0, 2.0), saturated=True)).empty


def test_coverage_is_judged_from_fifty_rows_on():
    table = lines(*((f"p{n}", 1.0 if n < 40 else 3.0, 1.0) for n in range(50)))
    table = table.assign(predicted_p10=0.5, predicted_p90=2.0)
    found = coverage(table)
    assert found["coverage"].tolist() == pytest.approx([0.8] * len(found))
    assert found["met"].all()
    assert judged(table)["coverage"].tolist() == pytest.approx([0.8] * 3)  # R1, its DP and EP, all ranks
    assert not coverage(table.assign(predicted_p90=4.0))["met"].any()  # all 50 of 50 inside: too wide
    assert coverage(table.head(49)).empty


def test_a_file_that_cannot_be_read_is_one_line_and_the_others_are_read(tmp_path):
    good = tmp_path / "manifest.csv"
    good.write_text("file,sha256\n")
    bad = tmp_path / "other.csv"
    bad.write_text("a,b\n1,2\n")
    rows, faults = read_files([bad, good, tmp_path / "none.csv"])
    assert rows == []
    assert ["other.csv" in faults[0], "none.csv: no such file" in faults[1], len(faults)] == [True, True, 2]
    with pytest.raises(TableError, match="no known form"):
        read_files([bad])


def test_a_median_first_token_does_not_wait_for_the_start_of_the_loop():
    """Of ten waves the first waits for its own prompts: the mean is longer by a tenth of half of that, no median is."""

    def first(statistic, waves):
        row = made_run(
            model="llama_3_1_70b",
            workers=WorkerGroup(mapping=instance(4)),
            isl=4096.0,
            osl=512.0,
            concurrency=64.0,
            waves=waves,
            quantities=(Measurement(name="ttft", measured=1.0, statistic=statistic),),
        )
        return evaluate([row])["predicted"][0]

    assert first("median", 10.0) == first("mean", 0.0)
    assert first("mean", 10.0) > first("median", 10.0)
