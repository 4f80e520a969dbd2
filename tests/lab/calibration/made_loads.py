"""A served run that tests change: Llama-3.1-8B in fp8 on one H100 under vLLM, in a closed loop."""

import csv
from pathlib import Path

from lab.calibration.served.cells import instance
from lab.calibration.served.rows import Measurement, ServingRow, WorkerGroup


def made_run(row: str = "1", **changes: object) -> ServingRow:
    words = {"file": "runs.csv", "form": "made", "model": "llama_3_1_8b", "system": "h100_sxm", "engine": "vllm"}
    words |= {"recipe": "fp8", "load": "closed_loop", "mode": "aggregated"}
    numbers = {"isl": 1024.0, "osl": 1024.0, "concurrency": 1.0, "workers": WorkerGroup(mapping=instance(1))}
    return ServingRow(**{"row": row, "quantities": (), **words, **numbers, **changes})


def latencies(**seconds: float) -> tuple[Measurement, ...]:
    return tuple(Measurement(name=name, measured=value) for name, value in seconds.items())


def write_lines(path: Path, *lines: dict[str, object]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return path
