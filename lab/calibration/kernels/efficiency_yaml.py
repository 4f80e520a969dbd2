"""Write a calibration as ``hw_specs/efficiency/*.yaml``: fitted rows, assumptions, and their sources.

The same data give the same bytes: nothing of the clock, the user or the directory goes in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from disagg_sim.errors import StoreError
from disagg_sim.facts.efficiency import (
    LIBRARIES,
    SECTIONS,
    AllToAllFit,
    AttentionPartFit,
    CollectiveFit,
    DataFile,
    DecodeAttentionFit,
    EfficiencySpec,
    ElementwiseFit,
    ExpertKernels,
    Fit,
    GemmFit,
    Inherited,
    MoeFit,
    PrefillAttentionFit,
    PrefillKeys,
    efficiency_of,
)
from disagg_sim.facts.load import load_efficiency
from disagg_sim.facts.schema import OneOf, keys_of, units_of, validate
from disagg_sim.facts.yaml_files import DIRECTORIES, read_mapping, spec_roots
from disagg_sim.units import GB, US
from lab.calibration.files import Writer
from lab.calibration.kernels.fit import DIGITS, Calibration

#: Directory, beside the efficiency files, of what no table measures.
ASSUMPTIONS = "assumptions"
#: Engines in the order of preference where nothing else is said.
_ORDER = ("trtllm", "vllm", "sglang", "nccl", "torch")
#: What stands above the parts of a file.
COMMENTS = Path(__file__).with_name("comments.yaml")
#: Fields of a fit that its row does not hold.
_TOLD_ELSEWHERE = ("inherited_from", "stands_for", "keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions(Inherited):
    """What no table of a system measures: order of its engines, assumed rows, rows taken over from other systems."""

    engine_order: tuple[Annotated[str, OneOf(LIBRARIES)], ...]
    gemm: tuple[GemmFit, ...] = ()
    prefill_attention: tuple[PrefillAttentionFit, ...] = ()
    decode_attention: tuple[DecodeAttentionFit, ...] = ()
    moe: tuple[MoeFit, ...] = ()
    collectives: tuple[CollectiveFit, ...] = ()
    alltoall: tuple[AllToAllFit, ...] = ()
    elementwise: tuple[ElementwiseFit, ...] = ()
    attention_parts: tuple[AttentionPartFit, ...] = ()
    prefill_keys: tuple[PrefillKeys, ...] = ()
    expert_kernels: tuple[ExpertKernels, ...] = ()


def assumptions_of(path: Path) -> Assumptions:
    """Read the assumptions of a file of ``hw_specs/efficiency/assumptions/``."""
    return Assumptions(**dict(validate(keys_of(Assumptions), read_mapping(path), path)))


def find_assumptions(system: str) -> Path | None:
    """Find the shipped (or user's) file of assumptions of a system, if there is one."""
    paths = (root / DIRECTORIES["efficiency"] / ASSUMPTIONS / f"{system}.yaml" for root in spec_roots())
    return next((path for path in paths if path.is_file()), None)


def efficiency_text(
    calibration: Calibration, *, data: str, date: str, assumptions: Path | None = None, split: bool = True
) -> str:
    """Write the YAML of a calibration as text: the same fits give the same text."""
    beside = assumptions_of(assumptions) if assumptions else Assumptions(engine_order=())
    fitted_engines = {fit.engine for fits in calibration.fits.values() for fit in fits} - set(beside.engine_order)
    order = (*beside.engine_order, *(engine for engine in _ORDER if engine in fitted_engines))
    seen = "shapes that were held out" if split else "the rows fitted; no shape was held out"
    comments = read_mapping(COMMENTS)
    lines = [
        f"# Fitted kernel efficiencies of the {calibration.system.title}: shares of the vendor's peaks.",
        "# Written by 'disagg-sim calibrate kernels': robust least squares of the logarithm of the time (soft L1).",
        f"# Errors are shares of the measured time; held_out_* and sigma_log are those of {seen}.",
        f"system: {calibration.system.name}",
        f"data: {plain_word(data)}",
        f"date: {plain_word(date)}  # of the data",
        f"engine_order: [{', '.join(order)}]  # whose fit is taken first, operator by operator",
        "",
        "files:",
        *(f"  - {file_line(each)}" for each in calibration.files),
    ]
    for section in SECTIONS:
        fitted, assumed = calibration.fits.get(section, ()), getattr(beside, section)
        lines += ["", f"# {comments['forms'][section]}", f"{section}:" if fitted or assumed else f"{section}: []"]
        lines += [f"  - {fit_line(fit)}" for fit in fitted]
        if assumed:
            lines += ["  # assumed, not measured", *(f"  - {fit_line(fit)}" for fit in assumed)]
    if beside.prefill_keys:
        lines += ["", f"# {comments['prefill_keys']}", "prefill_keys:"]
        lines += [f"  - {_flow(_words(dataclasses.asdict(row)))}" for row in beside.prefill_keys]
    if beside.expert_kernels:
        lines += ["", f"# {comments['expert_kernels']}", "expert_kernels:"]
        usual = {field.name: field.default for field in dataclasses.fields(ExpertKernels)}
        units, rows = units_of(ExpertKernels), (dataclasses.asdict(row).items() for row in beside.expert_kernels)
        lines += [
            f"  - {_flow({key: _value(told, units[key]) for key, told in row if told != usual[key]})}" for row in rows
        ]
    if beside.inherits_rows:
        lines += ["", "# Rows taken over from another system; each is marked as inherited in every output."]
        lines += ["inherits_rows:", *(f"  - {_flow(_words(dataclasses.asdict(row)))}" for row in beside.inherits_rows)]
    return "\n".join(lines) + "\n"


def _parent(name: str) -> EfficiencySpec:
    spec = load_efficiency(name)
    if spec is None:
        raise StoreError(f"no efficiency file of {name!r}, whose rows should be inherited")
    return spec


def fit_line(fit: Fit) -> str:
    """Format a fit on one line: provenance first, without numbers that equal their default."""
    pairs: dict[str, str] = {}
    units = units_of(type(fit))
    for field in dataclasses.fields(fit):
        value = getattr(fit, field.name)
        if field.name in _TOLD_ELSEWHERE or (field.default is not dataclasses.MISSING and value == field.default):
            continue
        if field.name == "valid":
            pairs["valid"] = _flow({size: f"[{number_text(low)}, {number_text(high)}]" for size, low, high in value})
        else:
            pairs[field.name] = _value(value, units[field.name])
    own = [field.name for field in dataclasses.fields(fit) if field.name not in Fit.__dataclass_fields__]
    order = ["engine", "version", *own, *(name for name in Fit.__dataclass_fields__)]
    return _flow({name: pairs[name] for name in dict.fromkeys(order) if name in pairs})


def file_line(file: DataFile) -> str:
    """Format on one line what became of the rows of a table."""
    return _flow(_words(dataclasses.asdict(file)))


def _words(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        plain_word(key): _flow(_words(value)) if isinstance(value, Mapping) else _value(value, "")
        for key, value in row.items()
    }


def _value(value: object, unit: str) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        scale, name = {"s": (US, "us"), "B/s": (GB, "GB/s")}.get(unit, (1.0, ""))
        return f"{number_text(value / scale)} {name}".rstrip()
    return str(value) if isinstance(value, int) else plain_word(str(value))


def number_text(value: float) -> str:
    """A number of ``DIGITS`` digits, whole numbers in full."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:.{DIGITS}g}"


def plain_word(text: str) -> str:
    """Text as YAML reads it back, quoted where it has to be."""
    plain = text.replace("_", "a").replace(".", "a").replace("-", "a").isalnum() and text[0].isalpha()
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _flow(pairs: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in dict(pairs).items()) + "}"


#: Writes an efficiency file.
write_efficiency = Writer(lambda path, part: efficiency_of(path, read_mapping(part), _parent))
