"""Read tables of the power of kernels, fit the equation of ``physics.power`` to them, and write it.

Columns (CSV or Parquet): ``system``, ``framework``, ``version``, ``kind``, ``latency_us`` of a call, ``power_w`` (mean
power of the board of one GPU while the kernel repeats), ``power_limit_w``, and the sizes of the kind in ``KINDS``;
other columns are ignored. A ``flag`` of ``DROPPED`` leaves a row out. Rows of one class, engine and form have a law, by
robust least squares of the logarithm of the power (``lab.calibration.kernels.robust``). Classes whose work is not
counted have the power of a kernel by its time alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.errors import StoreError, nearest, quoted
from disagg_sim.facts.efficiency import INDEX, INDEX_STEP, LIBRARIES, DataFile
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_power, load_system
from disagg_sim.facts.power import WINDOWED, PowerLaw, PowerSpec, power_of
from disagg_sim.facts.precision import FORMATS
from disagg_sim.facts.uncertainty import HALF
from disagg_sim.facts.yaml_files import read_mapping, shown
from disagg_sim.parquet import read_parquet
from disagg_sim.physics.power import kernel_power
from disagg_sim.physics.work import ACTIVATION_BYTES, Numeric, Work, expert_rows, expert_work, gemm_work
from disagg_sim.reading import read_file, table_of, unpacked
from disagg_sim.units import US
from lab.calibration.files import Writer, kept_from_fits
from lab.calibration.kernels.attention import context_attention, generation_attention, mla_context, mla_generation
from lab.calibration.kernels.efficiency_yaml import file_line, fit_line, number_text, plain_word
from lab.calibration.kernels.gemm import FORMAT_OF
from lab.calibration.kernels.limits import column_of
from lab.calibration.kernels.robust import Parameter, by_name, error_quantiles, origin, solved
from lab.calibration.kernels.tables import TableError, as_table_faults, require_numbers, spec_name

#: Columns that every table has.
COLUMNS = ("system", "framework", "version", "kind", "latency_us", "power_w", "power_limit_w")
#: Least time [us] and power [W] that a row may have: above 0.
LEAST = 1e-9
_WORDS = read_mapping(Path(__file__).with_name("table.yaml"))
DROPPED, NO_LAW, _PARTS, _WRITTEN = (_WORDS[name] for name in ("dropped", "no_law", "parts", "written"))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of row: whose law it is, the sizes by which shapes are told apart, and how its work is counted."""

    law: str  # operator kind of the law
    sizes: tuple[str, ...]
    form: Callable[[pd.DataFrame], pd.Series]
    work: Callable[[pd.DataFrame], Work] | None = None  # None: power by time alone


def _named(name: str) -> Callable[[pd.DataFrame], pd.Series]:
    return lambda rows: pd.Series(name, index=rows.index)


def _gemm(rows: pd.DataFrame) -> Work:
    m, n, k = (column_of(rows, name) for name in ("m", "n", "k"))
    return gemm_work(m, n, k, weight_bytes=_weight_bytes(rows))


def _weight_bytes(rows: pd.DataFrame) -> Numeric:
    return np.array([FORMATS[FORMAT_OF[word]].bytes for word in rows["dtype"]])


def _attention(rows: pd.DataFrame) -> Work:
    """Of grouped-query attention, prefill or decode, with windows."""
    flops, moved = np.zeros((2, len(rows)))
    windows = column_of(rows, "window_size")
    for window in np.unique(windows):
        mine = windows == window
        part = rows[mine]
        if part["kind"].iloc[0] == "context_attention":
            work = context_attention(part, column_of(part, "past_tokens"), float(window)).work
        else:
            work = generation_attention(part.assign(kv_len=part["seq_len"]), float(window)).work
        flops[mine], moved[mine] = work
    return Work(flops, moved)


def _mla(rows: pd.DataFrame) -> Work:
    named = rows.rename(columns={"q_heads": "heads"})
    if rows["kind"].iloc[0] == "context_mla":
        return mla_context(named).work
    return mla_generation(named.assign(kv_len=named["seq_len"])).work


def _experts(rows: pd.DataFrame) -> Work:
    """Of evenly spread picks: the rows do not say how a power law falls on the rank."""
    sizes: dict[str, Any] = {name: column_of(rows, name) for name in _EXPERTS}
    counted = expert_rows(
        tokens=sizes["num_tokens"],
        experts=sizes["num_experts"],
        top_k=sizes["topk"],
        hidden=sizes["hidden"],
        width=sizes["inter"] / sizes["tp"],
        ep=sizes["ep"],
        imbalance=1.0,
    )
    return expert_work(counted, weight_bytes=_weight_bytes(rows))


def _elementwise(rows: pd.DataFrame) -> Work:
    elements = column_of(rows, "m") * column_of(rows, "k")
    written = rows["kind"].map(_WRITTEN).to_numpy(dtype=float)
    return Work(0.0 * elements, elements * (ACTIVATION_BYTES + written))


def _format(rows: pd.DataFrame) -> pd.Series:
    return rows["dtype"].map(FORMAT_OF)


def _windowed(rows: pd.DataFrame) -> pd.Series:
    """Kernels of sliding windows have laws of their own."""
    return pd.Series(np.where(column_of(rows, "window_size") > 0, WINDOWED, "gqa"), index=rows.index)


def _part(rows: pd.DataFrame) -> pd.Series:
    return rows["kernel_source"].map(_PARTS)


_HEADS = ("batch", "seq_len", "past_tokens", "q_heads", "kv_heads", "head_dim", "window_size")
_LINEAR = ("batch", "seq_len", "num_tokens", "k_heads", "v_heads")
_MODULE = ("batch", "new_tokens", "past_tokens", "q_heads")
_EXPERTS = ("num_tokens", "hidden", "inter", "topk", "num_experts", "tp", "ep")
#: Kind of a row -> how it is read.
KINDS = {
    "gemm": Kind("gemm", ("m", "n", "k"), _format, _gemm),
    "context_attention": Kind("prefill_attention", _HEADS, _windowed, _attention),
    "generation_attention": Kind("decode_attention", _HEADS, _windowed, _attention),
    "context_mla": Kind("prefill_attention", ("batch", "seq_len", "q_heads"), _named("mla"), _mla),
    "generation_mla": Kind("decode_attention", ("batch", "seq_len", "q_heads"), _named("mla"), _mla),
    "moe": Kind("experts", _EXPERTS, _format, _experts),
    "scale_matrix": Kind("elementwise", ("m", "k"), _named(""), _elementwise),
    "computescale": Kind("elementwise", ("m", "k"), _named(""), _elementwise),
    "gdn": Kind("attention_part", _LINEAR, _part),
    "mamba2": Kind("attention_part", _LINEAR, _part),
    "dsa_context_module": Kind("attention_part", _MODULE, _named(INDEX)),
    "dsa_generation_module": Kind("attention_part", _MODULE, _named(INDEX_STEP)),
}


@dataclass(frozen=True, slots=True)
class PowerTable:
    """Rows of one system: kind, law and form, ``time`` [s], ``watts``, ``compute`` and ``memory`` (shares of the peaks
    that it reaches [1], 0 where no work is counted), and why a row is ``dropped``.
    """

    name: str
    sha256: str
    system: SystemSpec
    limit: float  # [W]
    rows: pd.DataFrame


def read_power_table(path: Path, system: str) -> PowerTable:
    """Read the rows of one system; a shape is held out alike on every system, engine and format."""
    data, rows = _read(path)
    missing = [name for name in COLUMNS if name not in rows]
    if missing:
        raise TableError(f"{shown(path)}: missing column {missing[0]!r} of a table of power")
    spec = load_system(system)
    rows = rows[rows["system"].fillna("").astype(str).map(spec_name) == spec.name].reset_index(drop=True)
    if not len(rows):
        raise TableError(f"{shown(path)}: no row of system {spec.name!r}")
    for column, known in (("kind", (*KINDS, *NO_LAW)), ("framework", LIBRARIES)):
        unknown = [word for word in rows[column].unique() if word not in known]
        if unknown:
            word = str(unknown[0])
            raise TableError(f"{shown(path)}: {column} {quoted(word)} is unknown{nearest(word, known)}")
    rows = require_numbers(path, rows, ("latency_us", "power_w", "power_limit_w"), least=LEAST)
    try:
        found = pd.concat([_counted(path, kind, part, spec) for kind, part in rows.groupby("kind", sort=True)])
    except KeyError as error:  # a column that some kinds have, or a word in it
        raise TableError(f"{shown(path)}: {error} is missing or unknown") from None
    limit = float(rows["power_limit_w"].max())
    return PowerTable(path.name, hashlib.sha256(data).hexdigest(), spec, limit, found.reset_index(drop=True))


def _read(path: Path) -> tuple[bytes, pd.DataFrame]:
    with as_table_faults(path):
        data = read_file(path)
        if path.suffix == ".parquet":
            return data, read_parquet(path)
        return data, table_of(unpacked(data), path, low_memory=False, dtype={"version": str})


def _counted(path: Path, name: object, rows: pd.DataFrame, system: SystemSpec) -> pd.DataFrame:
    """The rows of one kind, with what they multiply and move."""
    kind = KINDS.get(str(name))
    found = rows[["kind", "framework", "version"]].copy()
    found["time"], found["watts"] = (rows["latency_us"] * US).astype(float), rows["power_w"].astype(float)
    flags = rows["flag"].fillna("") if "flag" in rows else pd.Series("", index=rows.index)
    found["dropped"] = flags.map(DROPPED).fillna("") if kind else NO_LAW[str(name)]
    found["law"], found["form"], found["compute"], found["memory"] = "", "", 0.0, 0.0
    found["held_out"] = False
    if kind is None:
        return found
    needed = [size for size in kind.sizes if size not in rows and size not in ("past_tokens", "window_size")]
    if needed:
        raise TableError(f"{shown(path)}: missing column {needed[0]!r} of rows of kind {name!r}")
    rows = rows.assign(**{size: 0 for size in ("past_tokens", "window_size") if size not in rows})
    rows = require_numbers(path, rows.fillna(dict.fromkeys(kind.sizes, 0)), kind.sizes)
    found["law"], found["form"] = kind.law, kind.form(rows)
    found.loc[found["form"].isna(), "dropped"] = "a format or kernel without a law"
    sizes = [column_of(rows, size).astype(int).astype(str) for size in kind.sizes]
    keys = pd.Series(["|".join((str(name), *each)) for each in zip(*sizes, strict=True)], index=rows.index)
    found["held_out"] = keys.map({key: kept_from_fits(f"power|{key}") for key in keys.unique()}).astype(bool)
    used = found["dropped"] == ""
    if kind.work and used.any():
        work, time = kind.work(rows[used]), found.loc[used, "time"].to_numpy()
        found.loc[used, "compute"] = work.flops / time / _peaks(kind, found.loc[used, "form"], system)
        found.loc[used, "memory"] = work.hbm_bytes / time / system.hbm_bandwidth
    return found


def _peaks(kind: Kind, forms: pd.Series, system: SystemSpec) -> Numeric:
    """Peak of the arithmetic of a format, of BF16 for an attention. [FLOP/s]"""
    bf16 = system.peak_flops["bf16"]
    if kind.law not in ("gemm", "experts"):
        return bf16
    return np.array([system.peak_flops.get(FORMATS[form].arithmetic, bf16) for form in forms])


#: A GPU that waits draws what the least drawing of these shares of all rows draws. [1]
IDLE_QUANTILE = 0.01
#: Rows that a law needs. [1]
FEWEST = 15
_BY_TIME = (Parameter("base", 0.3, 1e-3, 2.0), Parameter("gap", 20 * US, 0.1 * US, 2000 * US))
_BY_WORK = (
    Parameter("compute", 0.9, 1e-3, 5.0),
    Parameter("compute_power", 0.7, 0.2, 1.5),
    Parameter("memory", 0.7, 1e-3, 5.0),
    Parameter("memory_power", 0.7, 0.2, 1.5),
)


@dataclass(frozen=True, slots=True)
class PowerFit:
    """Laws of one system, and how they do on every row."""

    table: PowerTable
    idle: float  # share of the limit [1]
    laws: tuple[PowerLaw, ...]
    file: DataFile
    rows: pd.DataFrame  # of the table that have a law, with ``predicted`` [W]


def calibrate_power(table: PowerTable) -> PowerFit:
    """Fit one law a class, engine and form."""
    rows = table.rows.assign(predicted=np.nan)
    kept = rows[rows["dropped"] == ""]
    idle = float(kept["watts"].quantile(IDLE_QUANTILE)) / table.limit
    laws: list[PowerLaw] = []
    few = "fewer rows of its class, engine and form than a law needs"
    for (law, _, form), mine in kept.groupby(["law", "framework", "form"], sort=True):
        seen = mine[~mine["held_out"]]
        if len(seen) < FEWEST:
            rows.loc[mine.index, "dropped"] = few
            continue
        fitted = _fit(seen, str(law), str(form), idle, table.limit)
        rows.loc[mine.index, "predicted"] = _watts(fitted, mine, idle, table.limit)
        unseen = mine[mine["held_out"]]
        laws.append(_judged(fitted, unseen, idle, table.limit) if len(unseen) else fitted)
    dropped = rows[rows["dropped"] != ""].groupby("dropped").size().to_dict()
    used = rows[rows["dropped"] == ""]
    unseen_rows = int(used["held_out"].sum())
    file = DataFile(
        name=table.name,
        sha256=table.sha256,
        rows=len(rows),
        fitted=len(used) - unseen_rows,
        held_out=unseen_rows,
        dropped={str(reason): int(count) for reason, count in dropped.items()},
    )
    return PowerFit(table, idle, tuple(laws), file, used)


def _watts(law: PowerLaw, rows: pd.DataFrame, idle: float, limit: float) -> NDArray[np.float64]:
    compute, memory, time = (rows[name].to_numpy(dtype=float) for name in ("compute", "memory", "time"))
    return np.asarray(limit * kernel_power(law, compute=compute, memory=memory, time=time, idle=idle))


def _fit(rows: pd.DataFrame, kind: str, form: str, idle: float, limit: float) -> PowerLaw:
    """The law of rows of one class, engine and form."""
    counted = any(each.law == kind and each.work for each in KINDS.values())
    numbers = (*_BY_TIME, *(_BY_WORK if counted else ()))
    sizes = ("compute", "memory", "time") if counted else ("time",)
    same = origin(rows, sizes) | {"kind": kind, "form": form, "parameters": len(numbers)}

    def law(values: NDArray[np.float64]) -> PowerLaw:
        return PowerLaw(**same, **by_name(numbers, values))

    watts = rows["watts"].to_numpy(dtype=float)
    _, found = solved(law, lambda each: _watts(each, rows, idle, limit), watts, numbers)
    median, p90 = error_quantiles(_watts(found, rows, idle, limit), watts)
    return replace(found, median_error=median, p90_error=p90)


def _judged(law: PowerLaw, rows: pd.DataFrame, idle: float, limit: float) -> PowerLaw:
    """The law with its errors on rows that it did not see."""
    watts = rows["watts"].to_numpy(dtype=float)
    predicted = _watts(law, rows, idle, limit)
    median, p90 = error_quantiles(predicted, watts)
    logs = np.log(watts / predicted)
    sigma = float(np.median(np.abs(logs - np.median(logs))) / HALF)
    return replace(
        law, held_out_points=len(rows), held_out_median_error=median, held_out_p90_error=p90, sigma_log=sigma
    )


def power_text(fit: PowerFit, *, data: str, date: str) -> str:
    """Write the YAML of a calibration as text."""

    lines = [
        f"# Fitted power of kernels of the {fit.table.system.title}: shares of the power limit of one GPU.",
        "# Written by 'disagg-sim calibrate power': robust least squares of the logarithm of the power (soft L1).",
        "# Errors are shares of the measured power; held_out_* and sigma_log are those of shapes that were held out.",
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
