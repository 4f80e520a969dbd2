"""A sweep's YAML to a frozen ``SweepSpec``; all faults of a file at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from disagg_sim.errors import DisaggSimError, SpecError, nearest
from disagg_sim.facts import load
from disagg_sim.facts.yaml_files import PATH_VARIABLE, is_path, read_mapping, spec_error, spec_files
from disagg_sim.units import GB, parse_quantity

KEYS = (
    "name", "models", "systems", "traffic", "modes", "limits", "profile", "engine", "matching", "block_points",
    "allow_long_context",
)  # fmt: skip
REQUIRED = ("name", "models", "systems", "traffic")
LIMIT_KEYS = ("ftl_s", "ttl_s", "gpu_cap", "max_gpus", "nic_gb_per_s")
MODES = ("disaggregated",)
MATCHINGS = ("exact", "paper")
BLOCK_POINTS = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a matched point must respect."""

    ftl_s: float = 10.0  # first-token latency of a prefill configuration [s]
    ttl_s: float = math.inf  # token-to-token latency of a decode configuration [s]
    gpu_cap: int = 576  # GPUs of a matched pair of pools [1]
    max_gpus: int | None = None  # GPUs of one instance; None = the system's own default [1]
    nic_limit: float = math.inf  # egress and ingress per GPU [B/s]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """One sweep as written by a person; every combination of its lists is a case."""

    source: str  # file that it was read from
    name: str
    models: tuple[str, ...]
    systems: tuple[tuple[str, str], ...]  # (system, precision recipe)
    shapes: tuple[tuple[int, int], ...]  # (isl, osl) [token]
    modes: tuple[str, ...] = MODES
    limits: Limits = field(default_factory=Limits)
    profile: str = "measured"
    engine: str = ""  # "" = the profile's own choice
    matching: str = "exact"
    block_points: int = BLOCK_POINTS  # design points of one block, about [1]


def load_sweep(name: str, *, profile: str = "", engine: str = "") -> SweepSpec:
    """Read a sweep from a file, or a shipped one by its name.

    Parameters
    ----------
    name : str
        Path of a YAML file, or the name of a shipped sweep such as ``demo``.
    profile, engine : str
        Put in place of the file's own when given.

    Raises
    ------
    SpecError
        With every fault of the file: key, value, what is allowed, the nearest valid name.
    """
    path = _find(name)
    document = read_mapping(path)
    overrides = {key: value for key, value in (("profile", profile), ("engine", engine)) if value}
    reader = _Reader()
    spec = _read(reader, {**document, **overrides}, source=str(path))
    if not reader.faults:
        _cross_check(reader, spec, long_context=bool(document.get("allow_long_context", False)))
    if reader.faults:
        raise spec_error(path, reader.faults)
    return spec


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    shipped = spec_files("sweep")
    if name in shipped:
        return shipped[name]
    if path.is_dir():
        raise SpecError(f"{name}: is a directory, not a sweep file")
    raise SpecError(f"{name}: no such file or shipped sweep ({', '.join(shipped)}){nearest(path.stem, shipped)}")


class _Reader:
    """Takes values out of a parsed document and collects what is wrong with them."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def keys(self, where: str, found: Iterable[object], allowed: tuple[str, ...]) -> None:
        for key in found:
            if key not in allowed:
                near = nearest(str(key), allowed) or f"; allowed: {', '.join(allowed)}"
                self.faults.append(f"unknown key {where + str(key)!r}{near}")

    def choice(self, key: str, value: object, allowed: Iterable[str]) -> str:
        names = tuple(allowed)
        if value not in names:
            near = nearest(str(value), names) or f"; allowed: {', '.join(names)}"
            self.faults.append(f"{key}: {value!r} is unknown{near}")
        return str(value)

    def number(self, key: str, value: object, *, low: float, high: float, unit: str = "") -> float:
        """A plain number in ``[low, high]``; ``unit`` is what the key counts in."""
        value = _plain_number(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.faults.append(f"{key}: {value!r} is not a plain number{_converted(value, unit)}")
        elif not low <= value <= high:
            self.faults.append(f"{key}: {value!r} is outside [{low:g}, {high:g}]{' ' + unit if unit else ''}")
        else:
            return float(value)
        return low

    def whole(self, key: str, value: object, *, low: int, high: int) -> int:
        """A whole number in ``[low, high]``."""
        if isinstance(value, bool) or not isinstance(value, int):
            self.faults.append(f"{key}: {value!r} is not a whole number")
        elif not low <= value <= high:
            self.faults.append(f"{key}: {value} is outside [{low}, {high}]")
        else:
            return value
        return low

    def attempt(self, where: str, call: Any, *args: Any) -> Any:
        """``call(*args)``, its expected failure being a fault of the file."""
        try:
            return call(*args)
        except DisaggSimError as error:
            self.faults.append(f"{where}: {error}")
            return None

    def names(self, key: str, value: object, loader: Any) -> tuple[str, ...]:
        """A list of spec names, each loaded once and given back in its canonical spelling."""
        given = value if isinstance(value, list) else [value]
        entries = [entry for entry in given if isinstance(entry, str)]
        if not entries or len(entries) < len(given):
            self.faults.append(f"{key}: {value!r} is not a list of names")
            return ()
        for entry in filter(is_path, entries):
            self.faults.append(f"{key}: {entry!r} is a path; give the name, and its directory in {PATH_VARIABLE}")
        specs = [self.attempt(key, loader, entry) for entry in entries if not is_path(entry)]
        return self.distinct(key, tuple(spec.name for spec in specs if spec is not None))

    def distinct(self, key: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        for value, count in Counter(values).items():
            if count > 1:
                said = value if isinstance(value, str) else "/".join(str(part) for part in value)
                self.faults.append(f"{key}: {said} stands there {count} times")
        return values


def _plain_number(value: object) -> object:
    """YAML 1.1 reads 1e-3 as text: a number all the same."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _converted(value: object, unit: str) -> str:
    dimension, scale = {"s": ("s", 1.0), "GB/s": ("B/s", GB)}.get(unit, ("", 1.0))
    if not dimension:
        return ""
    try:
        plain = f"{parse_quantity(value, dimension) / scale:g}"
    except ValueError:
        return f"; the key counts in {unit}"
    return f"; the key counts in {unit}: write {plain}"


def _read(reader: _Reader, document: Mapping[Any, Any], *, source: str) -> SweepSpec:
    reader.keys("", document, KEYS)
    for key in REQUIRED:
        if key not in document:
            reader.faults.append(f"missing key {key!r}")
    name = document.get("name", "")
    if not isinstance(name, str) or not name.strip():
        reader.faults.append(f"name: {name!r} is not a name") if "name" in document else None
    long_context = document.get("allow_long_context", False)
    if not isinstance(long_context, bool):
        reader.faults.append(f"allow_long_context: {long_context!r} is not true or false")
    profile = reader.choice("profile", document.get("profile", "measured"), load.list_specs("profile"))
    engine = document.get("engine", "")
    return SweepSpec(
        source=source,
        name=str(name),
        models=reader.names("models", document["models"], load.load_model) if "models" in document else (),
        systems=_systems(reader, document["systems"]) if "systems" in document else (),
        shapes=_shapes(reader, document["traffic"]) if "traffic" in document else (),
        modes=_modes(reader, document.get("modes", list(MODES))),
        limits=_limits(reader, document.get("limits", {})),
        profile=profile,
        engine=str(engine),
        matching=reader.choice("matching", document.get("matching", "exact"), MATCHINGS),
        block_points=reader.whole("block_points", document.get("block_points", BLOCK_POINTS), low=1, high=10**7),
    )


def _modes(reader: _Reader, value: object) -> tuple[str, ...]:
    entries = value if isinstance(value, list) else [value]
    if not entries:
        reader.faults.append(f"modes: the list is empty; allowed: {', '.join(MODES)}")
    return reader.distinct("modes", tuple(reader.choice("modes", entry, MODES) for entry in entries))


def _systems(reader: _Reader, value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping) or not value:
        reader.faults.append(f"systems: {value!r} is not a mapping of system to precision, such as 'h100_sxm: fp8'")
        return ()
    pairs = []
    for system, recipes in value.items():
        name = reader.names("systems", system, load.load_system)
        for recipe in reader.names(f"systems.{system}", recipes, load.load_precision):
            pairs += [(name[0], recipe)] if name else []
    return reader.distinct("systems", tuple(pairs))


def _shapes(reader: _Reader, value: object) -> tuple[tuple[int, int], ...]:
    entries = value if isinstance(value, list) else [value]
    shapes: list[tuple[int, int]] = []
    if not entries:
        reader.faults.append("traffic: the list is empty")
    for number, entry in enumerate(entries):
        where = f"traffic[{number}]"
        if isinstance(entry, str):
            traffic = reader.attempt(where, load.load_traffic, entry)
            shapes += traffic.shapes if traffic is not None else ()
            if traffic is not None and not traffic.shapes:
                reader.faults.append(f"{where}: {entry!r} has no case of constant lengths, which a sweep needs")
        elif isinstance(entry, Mapping):
            reader.keys(f"{where}.", entry, ("isl", "osl"))
            missing = [key for key in ("isl", "osl") if key not in entry]
            reader.faults.extend(f"{where}: missing key {key!r}" for key in missing)
            if not missing:
                isl = reader.whole(f"{where}.isl", entry["isl"], low=1, high=10**9)
                shapes.append((isl, _osl(reader, f"{where}.osl", entry["osl"])))
        else:
            reader.faults.append(f"{where}: {entry!r} is neither {{isl: ..., osl: ...}} nor the name of a traffic file")
    return reader.distinct("traffic", tuple(shapes))


def _osl(reader: _Reader, key: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value in (0, 1):
        reader.faults.append(f"{key}: {value} leaves nothing to decode; a frontier needs 2 or more (1 is prefill only)")
        return 2
    return reader.whole(key, value, low=2, high=10**9)


def _limits(reader: _Reader, value: object) -> Limits:
    if not isinstance(value, Mapping):
        reader.faults.append(f"limits: {value!r} is not a mapping of keys such as {', '.join(LIMIT_KEYS)}")
        return Limits()
    reader.keys("limits.", value, LIMIT_KEYS)
    given: dict[str, Any] = {}
    for key in ("ftl_s", "ttl_s"):
        if key in value:
            given[key] = reader.number(f"limits.{key}", value[key], low=1e-6, high=1e6, unit="s")
    if "nic_gb_per_s" in value:
        given["nic_limit"] = GB * reader.number(
            "limits.nic_gb_per_s", value["nic_gb_per_s"], low=1e-6, high=1e6, unit="GB/s"
        )
    if "gpu_cap" in value:
        given["gpu_cap"] = reader.whole("limits.gpu_cap", value["gpu_cap"], low=2, high=10**6)
    if "max_gpus" in value:
        given["max_gpus"] = reader.whole("limits.max_gpus", value["max_gpus"], low=1, high=10**4)
    return Limits(**given)


def _cross_check(reader: _Reader, spec: SweepSpec, *, long_context: bool) -> None:
    """Recipes that a GPU lacks, prompts beyond a model's context: what only the combination shows."""
    models = [load.load_model(name) for name in spec.models]
    for model in models:
        for isl, osl in spec.shapes:
            reader.attempt("traffic", partial(model.check_context, isl, osl, allow_long=long_context))
    for name, recipe in spec.systems:
        system = load.load_system(name)
        for model in models:
            reader.attempt(f"systems.{name}", load.resolve_precision, recipe, model, system)
    reader.faults[:] = dict.fromkeys(reader.faults)  # a fault that several models share is said once
    _check_fits(reader, spec)


def _check_fits(reader: _Reader, spec: SweepSpec) -> None:
    """A fitted profile needs fits of each system, and an engine must be one that was measured."""
    if not load.load_profile(spec.profile).fitted:
        return
    engines: set[str] = set()
    for system in dict.fromkeys(name for name, _ in spec.systems):
        efficiency = load.load_efficiency(system)
        if efficiency is None:
            reader.faults.append(f"profile: {spec.profile!r} needs fitted efficiencies, {system} has none; use 'ideal'")
        else:
            engines |= set(efficiency.engine_order)
    if spec.engine and engines:
        reader.choice("engine", spec.engine, sorted(engines))
