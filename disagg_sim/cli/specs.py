"""``disagg-sim specs list | show | check``: what is shipped, what it says, and whether a file is sound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from disagg_sim.cli.tables import print_table
from disagg_sim.errors import SpecError, UnknownNameError, nearest
from disagg_sim.facts.efficiency import ASSUMED, SECTIONS, EfficiencySpec
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import (
    list_specs,
    load_efficiency,
    load_model,
    load_precision,
    load_profile,
    load_system,
    load_traffic,
)
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import PrecisionRecipe
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.facts.traffic import ConstantLength, LengthSpec, TrafficSpec
from disagg_sim.facts.yaml_files import DIRECTORIES, shown, spec_files
from disagg_sim.units import GB, MB, TB, TERA, US

app = typer.Typer(
    help="Shipped systems, models, traffic, precision recipes and profiles.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Line = tuple[str, ...]


@app.command("list")
def list_(kind: Annotated[str, typer.Argument(help="hardware, model, traffic, precision or profile")] = "") -> None:
    """List what is shipped, with titles."""
    kinds = (_known_kind(kind),) if kind else tuple(_KINDS)
    rows = [(each, name, _KINDS[each][0](name).title) for each in kinds for name in list_specs(each)]
    print_table(rows, header=("kind", "name", "title"))


@app.command()
def show(
    kind: Annotated[str, typer.Argument(help="hardware, model, traffic, precision or profile")],
    name: Annotated[str, typer.Argument(help="a name that 'specs list' prints, or a YAML file")],
    fits: Annotated[bool, typer.Option("--fits", help="hardware: every fitted efficiency, one a line")] = False,
) -> None:
    """Show one spec with units and sources."""
    load, lines = _KINDS[_known_kind(kind)]
    spec = load(name)
    print_table(lines(spec))
    if isinstance(spec, SystemSpec):
        efficiency = load_efficiency(spec.name)
        typer.echo()
        if efficiency is None:
            typer.echo("no fitted efficiencies: only the profile 'ideal' can be used")
        elif fits:
            print_table(_fit_rows(efficiency), header=("operator", "engine", "fit", "median", "p90", "measured on"))
        else:
            print_table(_fit_summary(efficiency), header=("fitted operator", "rows", "engines", "measured on"))


@app.command()
def check(
    files: Annotated[list[Path] | None, typer.Argument(help="YAML files; all shipped ones when none is given")] = None,
) -> None:
    """Check spec files and name every fault."""
    from disagg_sim.facts.check import check_file
    from disagg_sim.sweep.spec import load_sweep

    rows, faulty = [], []
    for path in files or [path for kind in DIRECTORIES for path in spec_files(kind).values()]:
        try:
            kind = check_file(path)
            if kind == "sweep":
                load_sweep(str(path))
            rows.append(("ok", kind, shown(path)))
        except SpecError as error:
            faulty.append(str(error))
    if rows:
        print_table(rows)
    if faulty:
        raise SpecError("\n".join(faulty))


def _system_lines(spec: SystemSpec) -> Iterator[Line]:
    yield from (
        ("name", spec.name),
        ("title", spec.title),
        ("vendor", spec.vendor),
        ("architecture", spec.architecture),
    )
    for arithmetic, peak in spec.peak_flops.items():
        yield f"peak {arithmetic}, dense", f"{peak / TERA:g} TFLOPS", spec.sources["peak_flops"]
    figures = {
        "hbm_capacity": f"{spec.hbm_capacity / GB:g} GB",
        "hbm_reported": f"{spec.hbm_reported / GB:.4g} GB",
        "hbm_bandwidth": f"{spec.hbm_bandwidth / TB:g} TB/s",
        "l2_capacity": f"{spec.l2_capacity / MB:g} MB",
        "sm_count": f"{spec.sm_count}",
        "nvlink_bandwidth": f"{spec.nvlink_bandwidth / GB:g} GB/s one way",
        "nvlink_domain": f"{spec.nvlink_domain} GPUs",
        "nic_bandwidth": f"{spec.nic_bandwidth / GB:g} GB/s one way",
        "pcie_bandwidth": f"{spec.pcie_bandwidth / GB:g} GB/s one way",
        "tdp": f"{spec.tdp:g} W",
    }
    if spec.usd_per_gpu_hour is not None:
        low, high = spec.usd_per_gpu_hour
        figures["usd_per_gpu_hour"] = f"{low:g}-{high:g} USD/h"
    for key, text in figures.items():
        yield key, text, spec.sources[key]
    yield "confidence", spec.confidence


def _model_lines(spec: ModelSpec) -> Iterator[Line]:
    yield from (("name", spec.name), ("title", spec.title))
    yield "parameters", f"{spec.total_params:,}"
    yield "active parameters", f"{spec.active_params:,}"
    yield "matmul weights of the layers per token", f"{spec.linear_params_per_token:,}"
    for name in ("bf16", "fp8"):
        yield f"cache per token, {name}", f"{spec.kv_bytes_per_token(name):,.0f} B"
    sure = "" if spec.max_context_sure else " (unsure)"
    yield "context limit", f"{spec.max_context:,} tokens{sure}"
    yield "hidden, vocabulary", f"{spec.hidden:,}, {spec.vocab:,}"
    for kind, count in zip(spec.kinds, spec.kind_counts, strict=True):
        yield f"{count} layers", _described(kind.attention), _described(kind.ffn)
    yield "fp8 checkpoints", "128x128 block scales" if spec.block_scaled_fp8 else "per tensor scales"
    yield "source", spec.source


def _described(part: Any) -> str:
    fields = {key: getattr(part, key) for key in part.__dataclass_fields__}
    said = (key if value is True else f"{key} {value}" for key, value in fields.items() if value)
    return f"{type(part).__name__}: {', '.join(said)}"


def _traffic_lines(spec: TrafficSpec) -> Iterator[Line]:
    from disagg_sim.workload.lengths import representative_shape

    yield from (("name", spec.name), ("title", spec.title))
    for number, case in enumerate(spec.cases, 1):
        yield f"case {number}", f"input: {_length(case.isl)}", f"output: {_length(case.osl)}"
        if not (isinstance(case.isl, ConstantLength) and isinstance(case.osl, ConstantLength)):
            isl, osl = representative_shape(case)
            yield "  nearest constant shape", f"{isl}/{osl} tokens"
    yield "source", spec.source


def _length(length: LengthSpec) -> str:
    from disagg_sim.workload.lengths import length_distribution

    if isinstance(length, ConstantLength):
        return f"{length.tokens} tokens"
    it = length_distribution(length)
    return (
        f"{type(it).__name__}, median {it.quantile(0.5):.0f}, mean {it.mean:.0f}, 99 % {it.quantile(0.99):.0f} tokens"
    )


def _precision_lines(spec: PrecisionRecipe) -> Iterator[Line]:
    yield from (("name", spec.name), ("title", spec.title))
    for key in ("attention_projection", "ffn", "expert"):
        group = getattr(spec, key)
        yield key, group.gqa if group.gqa == group.mla else f"{group.gqa} (MLA models: {group.mla})"
    for key in ("attention", "cache", "embedding", "head", "router"):
        yield key, getattr(spec, key)
    yield "on the wire: dispatch", f"{spec.dispatch_bytes:g} B"
    yield "on the wire: combine, all-reduce", f"{spec.combine_bytes:g} B"
    yield "source", spec.source


def _profile_lines(spec: ProfileSpec) -> Iterator[Line]:
    sources = dict(spec.sources)
    for key in ProfileSpec.__dataclass_fields__:
        if key != "sources":
            yield key, _profile_value(key, getattr(spec, key)), sources.get(key, "")


_TIMES = ("_t0", "_latency", "_quantised", "_inside", "_across", "host")


def _profile_value(key: str, value: Any) -> str:
    if value is None:
        return "none" if key.endswith("_quantised") else "as fitted"
    if key.endswith(_TIMES):
        return f"{value / US:g} us"
    if key.endswith("_bytes"):
        return f"{value / GB:g} GB"
    return str(value)


_PROVENANCE = ("engine", "version", "points", "median_error", "p90_error", "inherited_from")


def _origin(row: Any, efficiency: EfficiencySpec) -> str:
    if row.engine == ASSUMED:
        return "nothing (assumption)"
    return f"{row.inherited_from} (inherited)" if row.inherited_from else efficiency.system


def _fit_summary(efficiency: EfficiencySpec) -> Iterator[Line]:
    for section in SECTIONS:
        rows = getattr(efficiency, section)
        for origin in dict.fromkeys(_origin(row, efficiency) for row in rows):
            own = [row for row in rows if _origin(row, efficiency) == origin]
            engines = dict.fromkeys(f"{row.engine} {row.version}" for row in own)
            yield section, str(len(own)), ", ".join(engines), origin
    yield "data", "", f"{efficiency.data}, {efficiency.date}", ""


def _fit_rows(efficiency: EfficiencySpec) -> Iterator[Line]:
    for section in SECTIONS:
        for row in getattr(efficiency, section):
            terms = (_term(key, getattr(row, key)) for key in row.__dataclass_fields__ if key not in _PROVENANCE)
            errors = (f"{row.median_error:.1%}", f"{row.p90_error:.1%}") if row.points else ("-", "-")
            yield section, f"{row.engine} {row.version}", " ".join(terms), *errors, _origin(row, efficiency)


def _term(key: str, value: Any) -> str:
    if value is None:
        return f"{key}=-"
    if key in ("t0", "latency", "seconds_per_token"):
        return f"{key}={value / US:g}us"
    return f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"


_KINDS: dict[str, tuple[Callable[[str], Any], Callable[[Any], Iterable[Line]]]] = {
    "hardware": (load_system, _system_lines),
    "model": (load_model, _model_lines),
    "traffic": (load_traffic, _traffic_lines),
    "precision": (load_precision, _precision_lines),
    "profile": (load_profile, _profile_lines),
}


def _known_kind(kind: str) -> str:
    if kind not in _KINDS:
        raise UnknownNameError(f"unknown kind {kind!r}{nearest(kind, _KINDS)}; known: {', '.join(_KINDS)}")
    return kind
