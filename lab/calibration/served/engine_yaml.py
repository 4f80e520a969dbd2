"""Write a fitted engine profile as ``hw_specs/engines/*.yaml``: the shipped file with the fitted numbers.

The same data give the same bytes: nothing of the clock, the user or the directory goes in.
"""

from __future__ import annotations

import re

from disagg_sim.facts.engine import engine_of
from disagg_sim.facts.yaml_files import find_file, read_mapping
from disagg_sim.units import MS, US
from lab.calibration.files import Writer
from lab.calibration.served.engine_fit import EngineFit

#: Fitted parameter -> its unit in the file, and the digits after the point.
UNITS = {
    "step_host": ("ms", MS, 3),
    "sequence_host": ("us", US, 1),
    "rank_host": ("ms", MS, 4),
    "prefill_stretch": ("", 1.0, 3),
    "kernel_launch": ("us", US, 2),
    "request_host": ("ms", MS, 0),
    "exchange_stretch": ("", 1.0, 2),
}


def provenance(fit: EngineFit, date: str) -> str:
    """Source text of every fitted number: files and rows used, numbers, error, date of the data."""
    files = ", ".join(f"{name} ({rows} rows)" for name, rows in fit.files)
    error = f"{fit.lines} numbers, median error {fit.median_error:.1%}"
    return f"fitted end to end on {files}, fitted part alone: {error}; data of {date}"


def engine_text(fit: EngineFit, *, date: str) -> str:
    """Write the file of the profile that the fit started from, with the fitted numbers and their provenance.

    >>> from dataclasses import replace
    >>> from disagg_sim.facts.load import load_engine
    >>> engine = replace(load_engine("vllm"), step_host=0.004)
    >>> fit = EngineFit(engine, ("step_host",), lines=90, median_error=0.05, files=(("mine.csv", 45),))
    >>> print(next(line for line in engine_text(fit, date="2026-01").splitlines() if line.startswith("step_host")))
    step_host: 4 ms
    """
    text = find_file("engine", fit.engine.name).read_text(encoding="utf-8")
    for key in fit.fitted:
        unit, scale, digits = UNITS[key]
        number = f"{round(getattr(fit.engine, key) / scale, digits):g} {unit}".rstrip()
        source = provenance(fit, date).replace('"', "'")
        text = re.sub(rf"^{key}: .*$", f"{key}: {number}", text, flags=re.MULTILINE)
        text = re.sub(rf"^  {key}: .*$", f'  {key}: "{source}"', text, flags=re.MULTILINE)
    return text


#: Writes an engine profile.
write_engine = Writer(lambda path, part: engine_of(path, read_mapping(part), path.stem))
