"""Write the power of kernels as ``hw_specs/power/*.yaml``: the same rows give the same bytes."""

from __future__ import annotations

from disagg_sim.errors import StoreError
from disagg_sim.facts.load import load_power
from disagg_sim.facts.power import PowerSpec, power_of
from disagg_sim.facts.yaml_files import read_mapping
from lab.calibration.files import Writer
from lab.calibration.kernels.efficiency_yaml import file_line, fit_line, number_text, plain_word
from lab.calibration.power.fit import PowerFit


def power_text(fit: PowerFit, *, data: str, date: str, split: bool = True) -> str:
    """Write the YAML of a calibration as text.

    >>> import pandas as pd
    >>> from lab.calibration.power.table import PowerTable
    >>> from disagg_sim.facts.efficiency import DataFile
    >>> from disagg_sim.facts.load import load_system
    >>> table = PowerTable("mine.csv", "", load_system("h200_sxm"), 700.0, pd.DataFrame())
    >>> file = DataFile(name="mine.csv", sha256="0", rows=0, fitted=0, held_out=0, dropped={})
    >>> text = power_text(PowerFit(table, 0.19, (), file, pd.DataFrame()), data="mine", date="2026")
    >>> [line.partition("  #")[0] for line in text.splitlines() if line.startswith(("limit", "idle"))]
    ['limit: 700 W', 'idle: 0.19']
    """
    seen = "shapes that were held out" if split else "the rows fitted; no shape was held out"
    lines = [
        f"# Fitted power of kernels of the {fit.table.system.title}: shares of the power limit of one GPU.",
        "# Written by 'disagg-sim calibrate power': robust least squares of the logarithm of the power (soft L1).",
        f"# Errors are shares of the measured power; held_out_* and sigma_log are those of {seen}.",
        f"system: {fit.table.system.name}",
        f"data: {plain_word(data)}",
        f"date: {plain_word(date)}  # of the data",
        f"limit: {number_text(fit.table.limit)} W  # under which the rows were measured",
        f"idle: {number_text(fit.idle)}  # of a GPU that waits: 1 % of the rows draw less",
        "",
        "files:",
        f"  - {file_line(fit.file)}",
        "",
        "# the form of disagg_sim/physics/power.py",
        "laws:",
        *(f"  - {fit_line(law)}" for law in fit.laws),
    ]
    return "\n".join(lines) + "\n"


def _parent(name: str) -> PowerSpec:
    spec = load_power(name)
    if spec is None:
        raise StoreError(f"no power file of {name!r}, whose laws should be inherited")
    return spec


#: Writes a power file.
write_power = Writer(lambda path, part: power_of(path, read_mapping(part), _parent))
