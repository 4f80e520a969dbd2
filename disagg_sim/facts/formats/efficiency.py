"""Read ``hw_specs/efficiency/*.yaml``: fitted rows of one system, its own or inherited from another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disagg_sim.errors import nearest, quoted
from disagg_sim.facts.efficiency import ANY_REGIME, ASSUMED, EAGER, LIBRARIES, SECTIONS, DataFile, EfficiencySpec, Fit
from disagg_sim.facts.formats.model import attention_kinds
from disagg_sim.facts.precision import FORMATS
from disagg_sim.facts.schema import (
    checked,
    choice,
    integer,
    list_of,
    mapping_of,
    number,
    optional,
    quantity,
    schema_of,
    span,
    table,
    texts,
    unit_of,
    validate,
    values,
)
from disagg_sim.units import GB, MB, MS

_engine = choice((*LIBRARIES, ASSUMED))
_format = choice(FORMATS)
_bf16_or_fp8 = choice(("bf16", "fp8"))
_share = number(1e-6, 2.0)  # of the BF16 peak: fp8 arithmetic passes 1
_time = quantity("s", 0.0, 1.0)
_ranges = checked(mapping_of(str, span(0.0, 1e18)), lambda lines: tuple((size, *ends) for size, ends in lines.items()))
_origin = {
    "engine": _engine,
    "points": integer(0, 10**9),
    "median_error": number(0.0, 10.0),
    "p90_error": number(0.0, 10.0),
    "parameters": integer(0, 100),
    "held_out_points": integer(0, 10**9),
    "held_out_median_error": number(0.0, 10.0),
    "held_out_p90_error": number(0.0, 10.0),
    "sigma_log": number(0.0, 10.0),
    "valid": _ranges,
}
_curve = {"format": _format, "e_compute": _share, "e_memory": _share, "t0": _time, "blend_q": number(1.0, 20.0)}


def _known_kind(kind: str) -> str:
    if kind not in attention_kinds():
        near = nearest(kind, attention_kinds())
        raise ValueError(f"{quoted(kind)} is unknown{near}; allowed: {', '.join(attention_kinds())}")
    return kind


_attention = {"kind": checked(str, _known_kind), "cache": _bf16_or_fp8, "t0": _time}
_TYPES: dict[str, dict[str, Any]] = {
    "gemm": _curve
    | {
        "k_step": _time,
        "k_split": _time,
        "reuse": optional(number(1.0, 1e9)),
        "e_quantise": optional(_share),
        "least_row": number(0.0, 1e6),
    },
    "prefill_attention": _attention
    | {"compute": _bf16_or_fp8, "e_compute": _share, "s_half": number(0.0, 1e6)}
    | {"e_io": optional(_share), "tail": number(0.0, 1.0)},
    "decode_attention": _attention
    | {
        "e_memory": _share,
        "e_compute": optional(_share),
        "block_time": optional(_time),
        "serial_time": _time,
        "serial_power": number(0.0, 2.0),
        "ramp": _time,
    },
    "moe": _curve
    | {
        "regime": choice(("single", "tp", "ep2_8", "ep16_256", ANY_REGIME)),
        "picks": choice(("T*k/ep", "T*k")),
        "e_compute": optional(_share),
        "least_rows": number(0.0, 1e4),
        "per_expert": _time,
        "e_handling": optional(_share),
        "stray": number(0.0, 1.0),
    },
    "collectives": {
        "op": choice(("all_reduce", "all_gather", "reduce_scatter", "alltoall")),
        "gpus": integer(0, 10_000),
        "latency": _time,
        "e_bandwidth": _share,
        "algorithm": choice(("", "ring", "ring_ll", "one_shot", "two_shot", "in_switch", EAGER)),
        "hop": _time,
        "ramp": _time,
    },
    "alltoall": {
        "phase": choice(("dispatch", "combine", "combine_low_precision", "prepare")),
        "format": choice((*FORMATS, "unlabelled", "default")),
        "ranks": integer(0, 10_000),
        "nodes": integer(0, 10_000),
        "bytes_per_element": optional(number(0.1, 8.0)),
        "link": choice(("nvlink", "nic")),
        "latency": _time,
        "e_bandwidth": optional(_share),
        "seconds_per_token": optional(quantity("s", 0.0, MS)),
        "step": _time,
        "token_bandwidth": optional(quantity("B/s", MB, MB * GB)),
    },
}
_TYPES["elementwise"] = {"op": choice(("scale_matrix", "compute_scale")), "e_memory": _share, "t0": _time}
_Rows = {key: schema_of(SECTIONS[key], _origin | _TYPES[key], without=("inherited_from",)) for key in SECTIONS}
_Transfer = table("Transfer", section=choice(SECTIONS), system=str, where=(mapping_of(str, str), {}), reason=str)
_DataFile = schema_of(DataFile, {"dropped": mapping_of(str, integer(0, 10**9))})
_Assumptions = table(
    "Assumptions",
    engine_order=texts(LIBRARIES),
    **{key: (list_of(_Rows[key]), []) for key in SECTIONS},
    inherits_rows=(list_of(_Transfer), []),
)
_Header = {"system": str, "data": str, "date": str, "engine_order": texts(LIBRARIES)}
_File = table(
    "Efficiency",
    **_Header,
    **{key: (list_of(_Rows[key]), []) if key == "elementwise" else list_of(_Rows[key]) for key in SECTIONS},
    inherits_rows=(list_of(_Transfer), []),
    files=(list_of(_DataFile), []),
)
_Heir = table("Heir", system=str, inherits=str, reason=str)


def efficiency_of(path: Path, data: Mapping[str, Any], load: Callable[[str], EfficiencySpec]) -> EfficiencySpec:
    """Fits of one system: its own rows, rows taken over from another system, or all of a parent's (``inherits``)."""
    rows: dict[str, Any]
    if "inherits" in data:
        heir: Any = validate(_Heir, data, path)
        parent = load(heir.inherits)
        rows = {key: tuple(_taken_over(row, parent.system) for row in getattr(parent, key)) for key in SECTIONS}
        return replace(parent, system=heir.system, **rows)
    file: Any = validate(_File, data, path)
    rows = {key: tuple(SECTIONS[key](**values(row)) for row in getattr(file, key)) for key in SECTIONS}
    for transfer in file.inherits_rows:
        parent = load(transfer.system)
        rows[transfer.section] += tuple(
            _taken_over(row, parent.system)
            for row in getattr(parent, transfer.section)
            if all(str(getattr(row, key, None)) == value for key, value in transfer.where.items())
        )
    header = {key: getattr(file, key) for key in _Header}
    files = tuple(DataFile(**values(each)) for each in file.files)
    return EfficiencySpec(measured_on=file.system, files=files, **header, **rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no table of a system measures: order of its engines, assumed rows, rows taken over from other systems."""

    engine_order: tuple[str, ...]
    rows: Mapping[str, tuple[Fit, ...]]  # by section
    inherits_rows: tuple[Mapping[str, Any], ...]


def assumptions_of(path: Path, data: Mapping[str, Any]) -> Assumptions:
    """The assumptions of a file of ``hw_specs/efficiency/assumptions/``."""
    file: Any = validate(_Assumptions, data, path)
    return Assumptions(
        engine_order=file.engine_order,
        rows={key: tuple(SECTIONS[key](**values(row)) for row in getattr(file, key)) for key in SECTIONS},
        inherits_rows=tuple(values(row) for row in file.inherits_rows),
    )


def unit_of_field(section: str, field: str) -> str:
    """Dimension in which a field of a row is written, "" for a pure number or a word."""
    return unit_of((_origin | _TYPES[section]).get(field))


def _taken_over(row: Any, origin: str) -> Any:
    return replace(row, inherited_from=row.inherited_from or origin)
