"""A served run, and a line of its verdict, that tests change: in fp8 on H100 under vLLM, in a closed loop."""

import csv
from pathlib import Path

import pandas as pd

from lab.calibration.served.cells import instance
from lab.calibration.served.rows import Measurement, ServingRow, WorkerGroup


def made_run(row: str = "1", **changes: object) -> ServingRow:
    words = {"file": "runs.csv", "form": "made", "model": "llama_3_1_8b", "system": "h100_sxm", "engine": "vllm"}
    words |= {"recipe": "fp8", "load": "closed_loop", "mode": "aggregated"}
    numbers = {"isl": 1024.0, "osl": 1024.0, "concurrency": 1.0, "workers": WorkerGroup(mapping=instance(1))}
    return ServingRow(**{"row": row, "quantities": (), **words, **numbers, **changes})


def latencies(**seconds: float) -> tuple[Measurement, ...]:
    return tuple(Measurement(name=name, measured=value) for name, value in seconds.items())


LINE = {
    **{"file": "runs.csv", "row": "1", "point": "p", "quantity": "tpot", "measured": 1.0, "predicted": 1.0},
    **{"evaluated": True, "reason": "", "saturated": False, "held_out": False, "part": "fitted", "version": ""},
    **{"load": "closed_loop", "mode": "aggregated", "workers": "TP4", "prefill_workers": "", "gpus": 4.0},
    **{"system": "h100_sxm", "family": "dense", "engine": "vllm", "recipe": "fp8", "layout": "TP"},
    **{"prefill_layout": "TP", "concurrency": 64.0},
}


def made_lines(*changes: dict[str, object], **same: object) -> pd.DataFrame:
    """Lines of ``evaluate`` that differ by their changes."""
    table = pd.DataFrame([LINE | same | each for each in changes])
    return table.assign(relative_error=table["predicted"] / table["measured"] - 1.0)


def write_lines(path: Path, *lines: dict[str, object]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return path
