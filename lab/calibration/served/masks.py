"""Set runs aside that cannot be what their rows say, each with the reason: by what was measured, never by a forecast.

A run that would multiply at more than ``MOST_OF_PEAK`` of the peak of its GPUs found its prompts in a cache, or made
fewer tokens than stated; no other of 3,800 runs reaches more than 0.70. It speaks of its whole job, as the runs of one
job have the same flags. Images and jobs that are known to be faulty are named in ``masks.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from disagg_sim.facts.load import load_model, load_precision, load_system
from disagg_sim.facts.yaml_files import read_mapping
from lab.calibration.served.rows import ServingRow

#: Share of the peak of its arithmetic that no run multiplies at. [1]
MOST_OF_PEAK = 0.75
#: Floating-point operations of a token and parameter. [1]
FLOPS = 2.0


def masked(rows: Sequence[ServingRow]) -> list[ServingRow]:
    """The rows in order; those of faulty jobs, and of jobs with a run above any peak, with the reason."""
    above = {_job(row) for row in rows if not row.reason and share_of_peak(row) > MOST_OF_PEAK}
    why = f"a run of this job multiplies above {MOST_OF_PEAK:.0%} of the peak of its GPUs"
    told = [_of_job(row) or (why if _job(row) in above else "") for row in rows]
    return [row.refused(reason) if reason else row for row, reason in zip(rows, told, strict=True)]


def share_of_peak(row: ServingRow) -> float:
    """Share of the peak of its GPUs that products with weights take, at the stated or the loop's rate, else 0. [1]"""
    if row.load in ("prefill", "decode"):
        return 0.0
    told = {each.name: each for each in row.quantities}
    if "throughput" in told:
        made = told["throughput"]
        counted = {"total": row.isl + row.osl, "input": row.isl, "output": row.osl, "request": 1.0}[made.basis]
        rate = made.measured * made.gpus / counted
    elif row.load == "closed_loop" and {"ttft", "tpot"} <= told.keys():
        rate = row.concurrency / (told["ttft"].measured + (row.osl - 1.0) * told["tpot"].measured)
    else:
        return 0.0
    model, peaks = load_model(row.model), load_system(row.system).peak_flops
    recipe = load_precision(row.recipe).resolve(model)
    peak = max((peaks[name] for name in recipe.arithmetics if name in peaks), default=float("inf"))
    share = rate * (row.isl + row.osl) * FLOPS * model.active_params / (row.gpus * peak)
    return float(share)


def _job(row: ServingRow) -> tuple[Any, ...]:
    """Runs of one job: one server, several loads and lengths."""
    layouts = [each and each.mapping for each in (row.workers, row.prefill)]
    return (row.file, row.model, row.system, row.engine, row.version, row.recipe, *layouts)


def _of_job(row: ServingRow) -> str:
    """Why the job of a row is not judged; "" where it is."""
    return next((job["reason"] for job in _masks()["jobs"] if _says(row, job["runs"])), "")


def of_image(row: ServingRow, image: str) -> str:
    """Why a row that ran an image is not judged; "" where it is."""
    faulty = (each for each in _masks()["images"] if each["image"] in image)
    return next((each["reason"] for each in faulty if _says(row, each.get("runs", {}))), "")


def _says(row: ServingRow, stated: Mapping[str, str]) -> bool:
    return all(getattr(row, name) == value for name, value in stated.items())


@cache
def _masks() -> dict[str, Any]:
    return read_mapping(Path(__file__).with_name("masks.yaml"))
