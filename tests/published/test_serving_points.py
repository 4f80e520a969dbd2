"""Published runs of serving engines, one number a line with its source, against the steady state of the engine.

The files of measurements themselves are not shipped; these lines are a few dozen of them. TTFT, TPOT and latency are
in s, throughputs per s and GPU. The lengths of InferenceX runs are 0.9 of the stated ones, as it draws them.
"""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.calibration.served.cells import instance
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.rows import Measurement, ServingRow, WorkerGroup

LINES = list(csv.DictReader((Path(__file__).parent / "serving_points.csv").open(encoding="utf-8")))
#: Largest error of a single number, and of the median. The noise between two engines on one system is 16 %.
SINGLE, MEDIAN = 0.35, 0.12
#: Source that states copies of experts (EPLB), and their number.
COPIED, COPIES = "large-scale-ep.md", 32
#: The one known miss, and its error: the measured block-scaled fp8 MoE kernels of SGLang on GB200 reach 0.21 of the
#: peak, at which the routed experts alone take as long as the whole published pass; it ran another kernel.
KNOWN, KNOWN_ERROR = ("gb200-part-2.md", "fp8_bf16kv"), -0.44


def number(line: dict[str, str], key: str, blank: float = float("nan")) -> float:
    return float(line[key]) if line[key] else blank


def workers(line: dict[str, str], side: str = "") -> WorkerGroup | None:
    if not line[f"{side}gpus"]:
        return None
    gpus, ep, groups = (int(line[side + key]) for key in ("gpus", "ep", "groups"))
    mapping = replace(instance(gpus, ep=ep, dp=groups), redundant_slots=COPIES if COPIED in line["source"] else 0)
    return WorkerGroup(count=int(line[f"{side}workers"]), mapping=mapping)


def row_of(line: dict[str, str]) -> ServingRow:
    quantity = Measurement(
        name=line["quantity"],
        basis=line["basis"],
        gpus=number(line, "per_gpus", 1.0),
        measured=number(line, "measured"),
    )
    prefill = workers(line, "prefill_")
    return ServingRow(
        file="serving_points.csv",
        row=line["source"],
        form="points",
        quantities=(quantity,),
        model=line["model"],
        system=line["system"],
        engine=line["engine"],
        recipe=line["recipe"],
        load=line["load"],
        mode="disaggregated" if prefill else "aggregated",
        workers=workers(line),
        prefill=prefill,
        isl=number(line, "isl"),
        osl=number(line, "osl"),
        concurrency=number(line, "concurrency"),
        batch=number(line, "batch"),
        waves=number(line, "waves"),
    )


@pytest.fixture(scope="module")
def errors():
    return evaluate([row_of(line) for line in LINES])["relative_error"].to_numpy()


def test_every_point_names_its_source_and_is_evaluated(errors):
    assert all(" @ " in line["source"] for line in LINES)
    assert np.isfinite(errors).all()


def is_known(line: dict[str, str]) -> bool:
    source, recipe = KNOWN
    return source in line["source"] and line["recipe"] == recipe


def test_each_point_but_one_is_met_within_twice_the_noise_between_engines(errors):
    off = [line["source"] for line, e in zip(LINES, errors, strict=True) if abs(e) > SINGLE and not is_known(line)]
    assert not off


def test_fp8_prefill_on_gb200_is_missed_by_44_percent(errors):
    """Its kernel is in no table; see ``KNOWN``."""
    known = [e for line, e in zip(LINES, errors, strict=True) if is_known(line)]
    assert known == [pytest.approx(KNOWN_ERROR, abs=0.03)]


def test_the_median_error_is_below_the_noise_between_engines(errors):
    assert np.median(np.abs(errors)) <= MEDIAN
