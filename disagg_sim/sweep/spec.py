"""A sweep's YAML to a frozen ``SweepSpec``; all faults of a file at once.

Past 400 lines: every key of a sweep, its range and its messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from disagg_sim.errors import LONGEST_SHOWN, SpecError, nearest, quoted
from disagg_sim.facts import load
from disagg_sim.facts.traffic import ConstantLength, TrafficCase
from disagg_sim.facts.yaml_files import read_mapping, spec_error, spec_files
from disagg_sim.physics.layer import MLA_FORMS
from disagg_sim.physics.mixed import Interference
from disagg_sim.physics.rates import ENGINES
from disagg_sim.serving.colocation import TTL_MEASURES
from disagg_sim.serving.costs import PER
from disagg_sim.serving.disaggregated import MATCHINGS
from disagg_sim.sweep.cross_check import cross_check
from disagg_sim.sweep.reader import Reader
from disagg_sim.units import GB
from disagg_sim.workload.joint import joint_lengths
from disagg_sim.workload.lengths import representative_shape

KEYS = (
    "name",
    "models",
    "systems",
    "traffic",
    "modes",
    "limits",
    "profile",
    "engine",
    "matching",
    "ctx_gen_ratio",
    "nvlink_domain",
    "mla_form",
    "ttl_measure",
    "every_step_mixed",
    "interference",
    "per",
    "prices",
    "block_points",
    "allow_long_context",
)
REQUIRED = ("name", "models", "systems", "traffic")
LIMIT_KEYS = ("ftl_s", "ttl_s", "gpu_cap", "max_gpus", "nic_gb_per_s")
INTERFERENCE_KEYS = ("minority_efficiency", "overlap_loss")
#: The first has two pools; in the others every instance does both phases.
MODES = ("disaggregated", "colocated", "piggyback")
BLOCK_POINTS = 32_768

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a point must respect."""

    ftl_s: float = 10.0  # first-token latency, no queue [s]
    ttl_s: float = math.inf  # token-to-token latency [s]
    gpu_cap: int = 576  # GPUs of a matched pair of pools, or of a co-located instance [1]
    max_gpus: int | None = None  # GPUs of one instance; None = the system's own default [1]
    nic_limit: float = math.inf  # KV egress and ingress per GPU; inf = none [B/s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How prefill and decode share an instance in the co-located modes."""

    ttl_measure: str = "mean"  # what TTL is: the mean, or the largest gap ("p99")
    every_step_mixed: bool = False  # piggyback: chunks of the balance alone, else the best mix
    interference: Interference = field(default_factory=Interference)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The systems that serve, and their precision recipes."""

    system: str  # of decode, and of co-located instances
    precision: str
    prefill_system: str
    prefill_precision: str

    @property
    def alike(self) -> bool:
        """Whether both phases could run on one instance."""
        return (self.system, self.precision) == (self.prefill_system, self.prefill_precision)

    def __str__(self) -> str:
        """``h100_sxm/fp8``, or ``a100_sxm_80gb/bf16 to h100_sxm/fp8_bf16kv``."""
        decode = f"{self.system}/{self.precision}"
        return decode if self.alike else f"{self.prefill_system}/{self.prefill_precision} to {decode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Lengths of the requests: constant, or drawn from the law of a shipped traffic."""

    isl: int  # constant, or the mean of the law [token]
    osl: int  # the same [token]
    law: str = ""  # name of a shipped traffic; "" = constant lengths
    part: int = 0  # number of the case in that traffic's file

    @property
    def shape(self) -> tuple[int, int]:
        """Constant (ISL, OSL): its own, or the powers of two nearest the medians of its law. [token]"""
        if not self.law:
            return self.isl, self.osl
        isl, osl = representative_shape(load.load_traffic(self.law).cases[self.part])
        return isl, max(osl, 2)

    def __str__(self) -> str:
        """``16384/2048``, or the name of the law."""
        return f"{self.law}{f'_{self.part}' if self.part else ''}" if self.law else f"{self.isl}/{self.osl}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """One sweep as written by a person; every combination of its tuples is a case, served in every mode."""

    source: str  # file that it was read from
    name: str
    models: tuple[str, ...]
    pools: tuple[Pools, ...]
    traffic: tuple[Traffic, ...]
    modes: tuple[str, ...] = MODES[:1]
    limits: tuple[Limits, ...] = (Limits(),)
    ctx_gen_ratios: tuple[Fraction | None, ...] = (None,)  # prefill over decode GPUs; None = the best [1]
    nvlink_domains: tuple[int | None, ...] = (None,)  # None = the system's own [1]
    mla_forms: tuple[str, ...] = ("auto",)  # of prefill; decode works in latent space
    sharing: Sharing = field(default_factory=Sharing)
    profile: str = "measured"
    engine: str = ""  # "" = the profile's own choice
    matching: str = "exact"
    per: str = "gpu"  # what throughput is divided by, of ``serving.costs.PER``
    prices: tuple[tuple[str, float], ...] = ()  # (system, price of a GPU) in place of the market's [USD/h]
    block_points: int = BLOCK_POINTS  # design points of one block, about [1]


def same_system(system: str, precision: str) -> Pools:
    """Pools of both phases on one system. [-]"""
    return Pools(system=system, precision=precision, prefill_system=system, prefill_precision=precision)


def load_sweep(
    name: str, *, profile: str = "", engine: str = "", prices: Mapping[str, float] | None = None
) -> SweepSpec:
    """Read a sweep from a file, or a shipped one by its name.

    Parameters
    ----------
    name : str
        Path of a YAML file, or the name of a shipped sweep such as ``demo``.
    profile, engine : str
        Put in place of the file's own when given.
    prices : mapping, optional
        Price of a GPU by system, before those of the file. [USD/h]

    Raises
    ------
    SpecError
        With every fault of the file: key, value, what is allowed, the nearest valid name. A fault of what
        was put in its place names the option of the command line, not the file.
    """
    path = _find(name)
    document = read_mapping(path)
    overrides: dict[str, Any] = {key: value for key, value in (("profile", profile), ("engine", engine)) if value}
    options = {key: f"--{key}" for key in overrides}
    if prices:
        own = document.get("prices", {})
        overrides["prices"] = {**own, **prices} if isinstance(own, Mapping) else own
        options |= {f"prices.{system}": f"--price {system}" for system in prices}
        options |= {} if own else {"prices": "--price"}
    reader = Reader()
    spec = _read(reader, {**document, **overrides}, source=str(path))
    if not reader.faults:
        cross_check(reader, spec, long_context=bool(document.get("allow_long_context", False)))
    if reader.faults:
        raise _error(path, reader.faults, options)
    return spec


def _error(path: Path, faults: list[str], options: Mapping[str, str]) -> SpecError:
    """One error for all faults; those whose key came from an option name it, the others the file."""
    given, own = [], []
    for fault in faults:
        key, _, said = fault.partition(":")
        if key in options:
            given.append(f"{options[key]}:{said}")
        else:
            own.append(fault)
    return SpecError("\n".join([*given, *([str(spec_error(path, own))] if own else [])]))


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


def _read(reader: Reader, document: Mapping[Any, Any], *, source: str) -> SweepSpec:
    reader.keys("", document, KEYS)
    for key in REQUIRED:
        if key not in document:
            reader.faults.append(f"missing key {key!r}")
    reader.flag("allow_long_context", document.get("allow_long_context", False))

    def choice(key: str, default: str, allowed: tuple[str, ...]) -> str:
        return reader.choice(key, document.get(key, default), allowed)

    def axis(key: str, default: Any, read: Callable[[str, object], T]) -> tuple[T, ...]:
        return reader.several(key, document.get(key, default), read)

    domain = _unless(reader, "own", partial(reader.whole, low=2, high=1024))
    return SweepSpec(
        source=source,
        name=reader.title("name", document.get("name", "-")),
        models=reader.names("models", document["models"], load.load_model) if "models" in document else (),
        pools=_pools(reader, document["systems"]) if "systems" in document else (),
        traffic=_traffic(reader, document["traffic"]) if "traffic" in document else (),
        modes=axis("modes", MODES[0], partial(reader.choice, allowed=MODES)),
        limits=_limits(reader, document.get("limits", {})),
        ctx_gen_ratios=axis("ctx_gen_ratio", "optimal", _unless(reader, "optimal", partial(_ratio, reader))),
        nvlink_domains=axis("nvlink_domain", "own", domain),
        mla_forms=axis("mla_form", "auto", partial(reader.choice, allowed=MLA_FORMS)),
        sharing=_sharing(reader, document),
        profile=choice("profile", "measured", tuple(load.list_specs("profile"))),
        engine=reader.choice("engine", document["engine"], ENGINES) if "engine" in document else "",
        matching=choice("matching", "exact", MATCHINGS),
        per=choice("per", "gpu", PER),
        prices=_prices(reader, document.get("prices", {})),
        block_points=reader.whole("block_points", document.get("block_points", BLOCK_POINTS), low=1, high=10**7),
    )


def _unless(reader: Reader, word: str, read: Callable[[str, object], T]) -> Callable[[str, object], T | None]:
    """Reads ``word`` as None and anything else as ``read`` does; a text that is neither is told of the word."""

    def either(key: str, value: object) -> T | None:
        if value == word:
            return None
        known, taken = len(reader.faults), read(key, value)
        if isinstance(value, str) and len(reader.faults) > known:
            reader.faults[-1] += f"; allowed, too: {word}"
        return taken

    return either


def _ratio(reader: Reader, key: str, value: object) -> Fraction:
    """A ratio of whole numbers, such as 0.5, 3.5 or "1/3"."""
    try:
        text = "" if isinstance(value, bool) else str(value)[: LONGEST_SHOWN + 1]
        exact = re.fullmatch(r"\d{1,9}(\.\d{1,9})?|\d{1,9}/\d{1,9}", text.strip())  # else an exponent has no bound
        ratio = Fraction(text if exact else float(text)).limit_denominator(10**6)
    except (ValueError, ZeroDivisionError, OverflowError):
        ratio = None
    if ratio is None:
        reader.faults.append(f"{key}: {quoted(value)} is not a ratio such as 0.5 or '1/3'")
    elif not Fraction(1, 1000) <= ratio <= 1000:
        reader.faults.append(f"{key}: {quoted(value)} is outside [0.001, 1000]")
    else:
        return ratio
    return Fraction(1)


def _sharing(reader: Reader, document: Mapping[Any, Any]) -> Sharing:
    given = reader.mapping("interference", document.get("interference", {}), INTERFERENCE_KEYS)
    lows = {"minority_efficiency": 1e-3, "overlap_loss": 0.0}
    knobs = {
        name: reader.number(f"interference.{name}", value, low=lows[name], high=1.0) for name, value in given.items()
    }
    return Sharing(
        ttl_measure=reader.choice("ttl_measure", document.get("ttl_measure", "mean"), TTL_MEASURES),
        every_step_mixed=reader.flag("every_step_mixed", document.get("every_step_mixed", False)),
        interference=Interference(**{"minority_efficiency": 1.0, "overlap_loss": 0.0, **knobs}),
    )


def _pools(reader: Reader, value: object) -> tuple[Pools, ...]:
    """``{system: precision, ...}``, or a list of these and of ``{prefill: {...}, decode: {...}}``."""
    entries = value if isinstance(value, list) else [value]
    pools: list[Pools] = []
    for number, entry in enumerate(entries):
        where = f"systems[{number}]" if isinstance(value, list) else "systems"
        if isinstance(entry, Mapping) and {"prefill", "decode"} & {*entry}:
            reader.keys(f"{where}.", entry, ("prefill", "decode"))
            sides = []
            for side in ("prefill", "decode"):
                if side in entry:
                    sides.append(_recipes(reader, f"{where}.{side}", entry[side]))
                else:
                    reader.faults.append(f"{where}: missing key {side!r}")
            if len(sides) == 2:
                pools += [
                    Pools(system=system, precision=recipe, prefill_system=first[0], prefill_precision=first[1])
                    for first, (system, recipe) in product(*sides)
                ]
        else:
            pools += [same_system(*pair) for pair in _recipes(reader, where, entry)]
    if not entries:
        reader.faults.append("systems: the list is empty")
    return reader.distinct("systems", tuple(pools))


def _recipes(reader: Reader, where: str, value: object) -> list[tuple[str, str]]:
    """(system, precision) of a mapping of system to one recipe or several."""
    if not isinstance(value, Mapping) or not value:
        wanted = "a mapping of system to precision, such as 'h100_sxm: fp8'"
        reader.faults.append(f"{where}: {quoted(value)} is not {wanted}")
        return []
    pairs = []
    for system, recipes in value.items():
        name = reader.names(where, system, load.load_system)
        for recipe in reader.names(f"{where}.{system}", recipes, load.load_precision):
            pairs += [(name[0], recipe)] if name else []
    return pairs


def _traffic(reader: Reader, value: object) -> tuple[Traffic, ...]:
    entries = value if isinstance(value, list) else [value]
    given: list[Traffic] = []  # what stands in the file
    found: list[Traffic] = []  # and beside each law the constant lengths that stand for it
    if not entries:
        reader.faults.append("traffic: the list is empty")
    for number, entry in enumerate(entries):
        where, known = f"traffic[{number}]", len(given)
        if isinstance(entry, str):
            spec = reader.attempt(where, load.load_traffic, entry)
            for part, case in enumerate(spec.cases if spec is not None else ()):
                traffic = reader.attempt(where, traffic_of, spec.name, part, case)
                given += [traffic] if traffic is not None else []
                if traffic is not None and traffic.law:
                    found.append(Traffic(isl=traffic.shape[0], osl=traffic.shape[1]))
        elif isinstance(entry, Mapping):
            reader.keys(f"{where}.", entry, ("isl", "osl"))
            missing = [key for key in ("isl", "osl") if key not in entry]
            reader.faults.extend(f"{where}: missing key {key!r}" for key in missing)
            if not missing:
                isl = reader.whole(f"{where}.isl", entry["isl"], low=1, high=10**9)
                given.append(Traffic(isl=isl, osl=_osl(reader, f"{where}.osl", entry["osl"])))
        else:
            reader.faults.append(f"{where}: {quoted(entry)} is neither {{isl: ..., osl: ...}} nor a traffic's name")
        found += given[known:]
    reader.distinct("traffic", tuple(given))
    return tuple(dict.fromkeys(found))


def traffic_of(name: str, part: int, case: TrafficCase) -> Traffic:
    """A case of a shipped traffic: constant lengths, or the law with its means."""
    if isinstance(case.isl, ConstantLength) and isinstance(case.osl, ConstantLength):
        return Traffic(isl=case.isl.tokens, osl=case.osl.tokens)
    law = joint_lengths(case)
    return Traffic(isl=round(law.mean_isl), osl=round(law.mean_osl), law=name, part=part)


def _osl(reader: Reader, key: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value in (0, 1):
        reader.faults.append(f"{key}: {value} leaves nothing to decode; a frontier needs 2 or more (1 is prefill only)")
        return 2
    return reader.whole(key, value, low=2, high=10**9)


def _limits(reader: Reader, value: object) -> tuple[Limits, ...]:
    """Every combination of the limits, each of which may be a list."""
    given = reader.mapping("limits", value, LIMIT_KEYS)
    seconds = partial(reader.number, low=1e-6, high=1e6, unit="s")
    readers: dict[str, Callable[[str, object], Any]] = {
        "ftl_s": seconds,
        "ttl_s": _unless(reader, "none", seconds),
        "gpu_cap": partial(reader.whole, low=2, high=10**6),
        "max_gpus": _unless(reader, "own", partial(reader.whole, low=1, high=10**4)),
        "nic_gb_per_s": _unless(reader, "none", partial(reader.number, low=1e-6, high=1e6, unit="GB/s")),
    }
    axes = {key: reader.several(f"limits.{key}", given[key], readers[key]) for key in LIMIT_KEYS if key in given}
    if not reader.crossed("limits", *map(len, axes.values())):
        return (Limits(),)
    return tuple(_limits_of(dict(zip(axes, values, strict=True))) for values in product(*axes.values()))


def _limits_of(values: dict[str, Any]) -> Limits:
    if "ttl_s" in values:
        values["ttl_s"] = math.inf if values["ttl_s"] is None else values["ttl_s"]
    if "nic_gb_per_s" in values:
        limit = values.pop("nic_gb_per_s")
        values["nic_limit"] = math.inf if limit is None else limit * GB
    return Limits(**values)


def _prices(reader: Reader, value: object) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, Mapping):
        reader.faults.append(f"prices: {quoted(value)} is not a mapping of system to USD/h, such as 'b200_sxm: 4.5'")
        return ()
    prices = []
    for system, price in value.items():
        amount = reader.number(f"prices.{system}", price, low=1e-3, high=1e4, unit="USD/h")
        prices += [(name, amount) for name in reader.names(f"prices.{system}", system, load.load_system)]
    return tuple(sorted(prices))
