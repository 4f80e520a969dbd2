"""Estimate ``hw_specs/uncertainty/``: systematic and idiosyncratic errors of fits, and what served runs add.

Spreads come from the rows of the FITTED part only; the held-out rows check the bands (``coverage`` in the summaries of
both validations). A spread is the standard deviation of the normal distribution whose 80 % band holds 80 % of the
rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError
from disagg_sim.facts.efficiency import SECTIONS
from disagg_sim.facts.load import load_efficiency, load_system
from disagg_sim.facts.uncertainty import KindSpread, ServedSpread, UncertaintySpec, uncertainty_of
from disagg_sim.facts.yaml_files import canonical_name, read_mapping
from lab.calibration.files import Writer
from lab.calibration.kernels.efficiency_yaml import COMMENTS
from lab.calibration.kernels.judge import judge_kernels
from lab.calibration.kernels.registry import OPERATORS
from lab.calibration.kernels.residuals import CLIP, deviation, part_of
from lab.calibration.kernels.tables import read_all

#: Sizes that tell rows of one group of shapes apart: they change from step to step, the others are the model's.
_WITHIN = (
    *("m", "batch", "seq_len", "kv_len", "q_len", "past_len", "new_tokens", "past_tokens", "num_tokens"),
    *("rank0_num_tokens", "message_bytes", "sms"),
)
#: Every so many rows are predicted by the fits of another system.
STRIDE = 7


def kernel_spreads(
    paths: Sequence[Path], *, exclude: Path | None = None, efficiency: Path | None = None
) -> tuple[dict[str, KindSpread], dict[str, float]]:
    """Estimate the spread of operator kinds by section, and of tables predicted from the fits of others. [1]"""
    verdicts = judge_kernels(paths, exclude=exclude, efficiency=efficiency)
    good = verdicts[verdicts["evaluated"] & (verdicts["masked"] == "") & (verdicts["part"] == part_of(held_out=False))]
    if not len(good):
        raise InputError("no row of these tables was fitted: spreads are estimated on the tables that fits came from")
    good = good.assign(error=np.log((good["measured_us"] / good["predicted_us"]).to_numpy(dtype=float)))
    composed = {
        form: deviation(good.loc[good["operator"] == form, "error"].to_numpy(dtype=float))
        for form, operator in OPERATORS.items()
        if operator.fit is None and (good["operator"] == form).any()
    }
    sections = good["operator"].map({form: op.sections[0] for form, op in OPERATORS.items() if op.fit is not None})
    moved = transfers(paths, exclude=exclude, efficiency=efficiency)
    kinds = {}
    for section in SECTIONS:
        mine = good[sections == section]
        alike, across = (moved.get((section, same), 0.0) for same in (True, False))
        kinds[section] = KindSpread(
            shared=shared_part(mine, mine["error"].to_numpy(dtype=float)) if len(mine) else 1.0,
            transfer=alike or across,
            transfer_across=max(across, alike),
            rows=len(mine),
        )
    return kinds, composed


def shared_part(rows: pd.DataFrame, errors: Floats) -> float:
    """Share of the variance of ``errors`` that groups of shapes have in common, within fits. [1]

    Groups are the rows of one library, system and kernel that differ in ``_WITHIN`` alone; their means, less what the
    mean of so few errors would vary anyway, against all.
    """
    shape = rows["shape"].str.split(" ").map(lambda words: " ".join(w for w in words if w.split("=")[0] not in _WITHIN))
    keys = [rows["operator"], rows["system"], rows["framework"], rows["kernel_source"], shape]
    limit = CLIP * deviation(errors)
    table = pd.DataFrame({"error": np.clip(errors, -limit, limit)}, index=rows.index)
    groups = table.groupby(keys, sort=False)["error"]
    count, mean, spread = groups.count(), groups.mean(), groups.var(ddof=1)
    several = count > 1
    if not several.any():
        return 1.0
    between = float(np.average(mean[several] ** 2 - spread[several] / count[several], weights=count[several]))
    whole = float(np.average(table["error"] ** 2))
    return float(np.clip(between / whole, 0.0, 1.0)) if whole else 1.0


def transfers(
    paths: Sequence[Path], *, exclude: Path | None = None, efficiency: Path | None = None
) -> dict[tuple[str, bool], float]:
    """What fits of another measured system err more than a system's own, by section and by whether the chips are alike.

    Each system is predicted with the fits of each other, at its own peaks: the error in excess is the transfer. [1]
    """
    own: dict[tuple[str, bool], list[Floats]] = {}
    other: dict[tuple[str, bool], list[Floats]] = {}
    for table in read_all(paths, exclude, strict=False):
        operator = OPERATORS.get(table.form.name)
        if operator is None or operator.fit is None:
            continue
        rows = table.rows
        seen = rows[(rows["masked"] == "") & (rows["fault"] == "") & ~rows["held_out"]]
        specs = {
            name: spec
            for name in rows["system"].unique()
            if (spec := load_efficiency(str(name) if efficiency is None else efficiency / f"{name}.yaml")) is not None
        }
        for here, there in permutations(specs, 2):
            rows, system = seen[seen["system"] == here].iloc[::STRIDE], load_system(here)
            measured = rows["latency"].to_numpy(dtype=float)
            both = [operator.predict(rows, system, operator.fits_of(specs[name])) for name in (here, there)]
            known = np.isfinite(both[0]) & np.isfinite(both[1]) & np.isfinite(measured)
            key = operator.sections[0], system.architecture == load_system(there).architecture
            own.setdefault(key, []).append(np.log(both[0] / measured)[known])
            other.setdefault(key, []).append(np.log(both[1] / measured)[known])
    found = {}
    for key, parts in own.items():
        mine, theirs = np.concatenate(parts), np.concatenate(other[key])
        if mine.size:
            found[key] = float(np.sqrt(max(deviation(theirs) ** 2 - deviation(mine) ** 2, 0.0)))
    return found


def spreads_text(
    spread: UncertaintySpec, served: tuple[float, Mapping[str, ServedSpread]], *, data: str, date: str
) -> str:
    """Write the YAML of a file of ``hw_specs/uncertainty/`` as text: the same text for the same numbers."""

    def flow(value: Any) -> str:
        fields = ((name, getattr(value, name)) for name in type(value).__dataclass_fields__)
        return "{" + ", ".join(f"{k}: {v if isinstance(v, int) else f'{v:.3g}'}" for k, v in fields) + "}"

    def words(factors: Mapping[str, float]) -> str:
        return "{" + ", ".join(f"{json.dumps(level)}: {value:.3g}" for level, value in factors.items()) + "}"

    def lines_of_spread(name: str, found: ServedSpread) -> list[str]:
        levels = (f"      {kind}: {words(factors)}" for kind, factors in found.levels.items())
        head = [f"  {name}:", f"    base: {found.base:.3g}", f"    rows: {found.rows}", "    levels:"]
        return [*head, *levels, f"    unseen: {words(found.unseen)}"]

    shared, spreads = served
    lines = [
        "# Spreads behind error bars: how errors of fits are shared out, what served runs add (docs/uncertainty.md).",
        "# Written by 'disagg-sim calibrate uncertainty' from rows of the fitted part: their 80 % quantile over 1.28.",
        "title: spreads of the fitted kernels and of served runs",
        f'data: "{data}"',
        f'date: "{date}"',
        f"assumed: {spread.assumed:g}",
        f"per_doubling: {spread.per_doubling:g}",
        f"kv_transfer: {spread.kv_transfer:g}",
        "text_skew: [{:g}, {:g}]".format(*spread.text_skew),
        "kinds:",
        *(f"  {name}: {flow(kind)}" for name, kind in spread.kinds.items()),
        "composed: {" + ", ".join(f"{name}: {value:.3g}" for name, value in spread.composed.items()) + "}",
        f"shared: {shared:.3g}",
        "served:",
        *(line for name, found in spreads.items() for line in lines_of_spread(name, found)),
        "sources:",
        *(f'  {name}: "{text}"' for name, text in read_mapping(COMMENTS)["sources"].items()),
    ]
    return "\n".join(lines) + "\n"


#: Writes an uncertainty file.
write_spreads = Writer(lambda path, part: uncertainty_of(path, read_mapping(part), canonical_name(path.stem)))
