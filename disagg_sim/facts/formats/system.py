"""``hw_specs/*.yaml``: what a vendor says of a GPU and its links."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg_sim.errors import nearest, quoted
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.schema import (
    choice,
    integer,
    line,
    mapping_of,
    optional,
    quantity,
    schema_of,
    span,
    validate,
    values,
)
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.units import GB, GIB, KB, TB, TERA

#: Arithmetic that a chip may have.
ARITHMETICS = ("bf16", "fp8", "nvfp4", "int8", "tf32", "fp32")

#: A nominal size in GB often counts GiB, so that a driver reports up to that much more. [1]
BINARY_GB = GIB / GB
#: Numbers are written with some five digits. [1]
ROUNDING = 1.0001

_link = quantity("B/s", 0.1 * GB, 100 * TB)
_System = schema_of(
    SystemSpec,
    {
        "title": line(),
        "vendor": line(),
        "architecture": line(),
        "confidence": line(),
        "peak_flops": mapping_of(choice(ARITHMETICS), quantity("FLOP/s", TERA, 1e6 * TERA), at_least=1),
        "hbm_capacity": quantity("B", GB, 10 * TB),
        "hbm_reported": quantity("B", GB, 10 * TB),
        "hbm_bandwidth": quantity("B/s", 10 * GB, 100 * TB),
        "l2_capacity": quantity("B", KB, 10 * GB),
        "sm_count": integer(1, 10_000),
        "attention_tile_rows": integer(1, 10_000),
        "nvlink_bandwidth": _link,
        "nvlink_domain": integer(1, 10_000),
        "nic_bandwidth": _link,
        "tdp": quantity("W", 10.0, 10_000.0),
        "usd_per_gpu_hour": optional(span(0.0, 1000.0)),
        "sources": mapping_of(str, str),
    },
    without=("name",),
)
_WORDS = ("title", "vendor", "architecture", "confidence", "sources")  # need no source


def system_of(path: Path, data: Mapping[str, Any], name: str) -> SystemSpec:
    """A system from its file; every figure must have a source."""
    spec = SystemSpec(name=name, **values(validate(_System, data, path)))
    figures = [key for key in _System.model_fields if key not in _WORDS]
    found = [f"sources: missing key {key!r}" for key in figures if data[key] is not None and key not in spec.sources]
    unknown = [key for key in spec.sources if key not in figures]
    found += [f"sources: unknown key {quoted(key)}{nearest(key, figures)}" for key in unknown]
    if spec.hbm_reported > spec.hbm_capacity * BINARY_GB * ROUNDING:
        found.append(
            f"hbm_reported: {quoted(data['hbm_reported'])} is above hbm_capacity {quoted(data['hbm_capacity'])}, "
            "even where its GB are GiB"
        )
    if found:
        raise spec_error(path, found)
    return spec
