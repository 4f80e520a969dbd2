"""Read the traffic of a sweep: constant lengths, shipped distributions or turns of sessions, and what is cached.

Caches that turns meet are in bytes of a GPU, and are counted in tokens of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Tag

from disagg_sim.choices import EVEN_RANKS
from disagg_sim.facts import load
from disagg_sim.facts.faults import expected
from disagg_sim.facts.hardware import WRITES, KvTier
from disagg_sim.facts.schema import (
    Axis,
    Named,
    OneOf,
    PlainName,
    Quantity,
    Range,
    Strict,
    Unless,
    Written,
    distinct,
    one_of,
    schema_of,
)
from disagg_sim.facts.traffic import HBM, ConstantLength, ConstantShare, Reuse, TierShares, TrafficCase
from disagg_sim.physics.setup import Setup
from disagg_sim.techniques.prefix.search import GpuCaches
from disagg_sim.units import TB
from disagg_sim.workload.lengths import Lengths, lengths, uneven
from disagg_sim.workload.named import RANKS_SUFFIX, reuse_text
from disagg_sim.workload.turns import TurnCaches, turn_lengths, turns_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Turns of sessions, and the caches that they meet."""

    sessions_per_s: float
    tpot_s: float
    cache: GpuCaches | None = None  # None = nothing is remembered

    @property
    def uncached(self) -> TurnCaches:
        """Where nothing is remembered."""
        return TurnCaches(sessions_per_s=self.sessions_per_s, tpot_s=self.tpot_s)

    def met(self, at: Setup, prompt: float) -> TurnCaches:
        """Count the caches in tokens."""
        if self.cache is None:
            return self.uncached
        served = at.cached_layers, at.precision
        return self.cache.met(served, at.system, prompt, sessions_per_s=self.sessions_per_s, tpot_s=self.tpot_s)


class _Cache(Strict):
    """Prefix caches of instances."""

    gpus: Annotated[int, Range(1, 10**5)] = 1
    hbm: Annotated[float, Quantity("B", 0.0, TB)] = 0.0
    tiers: Axis[str] = ()
    caches: Annotated[int, Range(1, 10**5)] = 1
    sticky: bool = True
    writes: Annotated[str, OneOf(WRITES)] = WRITES[0]


def _made(keys: _Cache) -> GpuCaches:
    if HBM in keys.tiers:
        raise ValueError(f"tiers {', '.join(keys.tiers)}: hbm has a key of its own, hbm: 20 GB")
    said = {name: value for name, value in keys if name != "writes"}
    return GpuCaches(**said, back=keys.writes == WRITES[1])


class TurnKeys(Strict):
    """Sessions of a shipped traffic, and the caches that their turns meet."""

    sessions: Annotated[str, load.spec_name("traffic")]
    sessions_per_s: Annotated[float, Range(1e-6, 1e6, "sessions/s")]
    tpot_s: Annotated[float, Range(0.0, 100.0, "s")] = 0.0
    ftl_s: Annotated[float, Range(1e-6, 1e6, "s")] | None = None
    cache: Axis[Annotated[GpuCaches | None, Written(_Cache, _made), Unless("none", None)]] = (None,)


#: ``{dram: {bandwidth: 50 GB/s, latency_s: 2.0e-5, capacity: 250 GB}}``, in place of those of a system's file.
TierKeys: Any = Annotated[
    tuple[tuple[str, KvTier], ...],
    Written(
        Named[PlainName, Annotated[KvTier, Written(schema_of(KvTier), lambda keys: KvTier(**dict(keys)))]],
        lambda tiers: tuple(tiers.items()),
    ),
]


Seconds = Annotated[float, Range(1e-6, 1e6, "s")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Lengths of the requests: constant, or drawn from the distribution of a shipped traffic."""

    isl: int  # constant, or the mean of the distribution [token]
    osl: int  # the same [token]
    law: str = ""  # name of a shipped traffic; "" = constant lengths
    part: int = 0  # number of the case in that traffic's file
    ftl_s: float | None = None  # first-token latency, in place of that of the limits; None = theirs [s]
    cached: Reuse | None = None  # what caches hold of the prompts; None = what the law says, or nothing
    turns: Turns | None = None  # sessions of the law, whose turns are the requests
    met: TurnCaches | None = None  # the caches of ``turns``, counted in tokens of a model
    rank_imbalance: str = EVEN_RANKS  # how requests find their DP rank, of ``choices.RANK_IMBALANCES``

    @property
    def shape(self) -> tuple[int, int]:
        """Constant (ISL, OSL): its own, or the powers of two nearest the medians of its distribution. [token]"""
        if not self.law:
            return self.isl, self.osl
        law = lengths(load.load_traffic(self.law).cases[self.part]) if self.turns is None else self.requests
        typical = law.at_medians()
        return round(typical.mean_isl), round(typical.mean_osl)

    @property
    def requests(self) -> Lengths:
        """Lengths of the requests, with what is cached of them, and how they find their rank."""
        return uneven(self._requests, self.rank_imbalance)

    @property
    def _requests(self) -> Lengths:
        if self.turns is not None:
            return turn_lengths(self.law, self.met or self.turns.uncached)
        if self.law:
            return lengths(load.load_traffic(self.law).cases[self.part], cached=self.cached)
        return lengths(self.isl, self.osl, cached=self.cached)

    def __str__(self) -> str:
        """``16384/2048``, or the name of the distribution; what is cached, and how ranks are found, behind it."""
        return self._name + ("" if self.rank_imbalance == EVEN_RANKS else f"{RANKS_SUFFIX}{self.rank_imbalance}")

    @property
    def _name(self) -> str:
        if self.turns is not None:
            return f"{self.law}{turns_text(self.met or self.turns.uncached)}"
        plain = f"{self.law}{f'_{self.part}' if self.part else ''}" if self.law else f"{self.isl}/{self.osl}"
        return plain if self.cached is None else f"{plain}/{reuse_text(self.cached)}"


def _decodes(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and value in (0, 1):
        raise ValueError(f"{value} leaves nothing to decode; a frontier needs 2 or more (1 is prefill only)")
    return value


class _CachedShare(Strict):
    """What caches hold of prompts."""

    share: Annotated[float, Range(0.0, 1.0)]
    block_tokens: Annotated[int, Range(1, 10**6)] = 16
    in_decode: Annotated[float, Range(0.0, 1.0)] = 0.0
    tiers: TierShares = ()


def _reuse(found: _CachedShare) -> Reuse | None:
    if not found.share:
        return None
    share = ConstantShare(share=found.share)
    return Reuse(share=share, block_tokens=found.block_tokens, in_decode=found.in_decode, tiers=found.tiers)


#: A share of every prompt, or ``{share: 0.9, in_decode: 0.5}``; none where it is 0.
_Cached: Any = Annotated[
    Reuse | None,
    Written(
        Annotated[
            _CachedShare, BeforeValidator(lambda value: value if isinstance(value, Mapping) else {"share": value})
        ],
        _reuse,
    ),
]


class _Shape(Strict):
    """Constant lengths of the requests, and shares of the prompts that are cached."""

    isl: Annotated[int, Range(1, 10**9)]
    osl: Annotated[int, Range(2, 10**9), BeforeValidator(_decodes)]
    ftl_s: Seconds | None = None
    cached: Axis[_Cached] = (None,)


def traffic_of(name: str, part: int, case: TrafficCase) -> Traffic:
    """A case of a shipped traffic: constant lengths, or the distribution with its means."""
    if isinstance(case.isl, ConstantLength) and isinstance(case.osl, ConstantLength):
        return Traffic(isl=case.isl.tokens, osl=case.osl.tokens)
    law = lengths(case)
    return Traffic(isl=round(law.mean_isl), osl=round(law.mean_osl), law=name, part=part)


def _shipped(name: str) -> list[Traffic]:
    return [expected(traffic_of, name, part, case) for part, case in enumerate(load.load_traffic(name).cases)]


class _Named(Strict):
    """A shipped traffic, and shares of its prompts that are cached."""

    name: Annotated[str, load.spec_name("traffic"), AfterValidator(_shipped)]
    cached: Axis[_Cached] = (None,)


def with_constant(entries: Sequence[Sequence[Traffic]]) -> tuple[Traffic, ...]:
    """Traffic of the file; before each distribution the equivalent constant lengths."""
    given = distinct(tuple(traffic for entry in entries for traffic in entry))
    found: dict[Traffic, None] = {}
    for each in given:
        if each.law and each.turns is None:
            isl, osl = each.shape
            found[replace(each, isl=isl, osl=osl, law="", part=0)] = None
        found[each] = None
    return tuple(found)


def _of_shape(shape: _Shape) -> list[Traffic]:
    return [Traffic(isl=shape.isl, osl=shape.osl, ftl_s=shape.ftl_s, cached=reuse) for reuse in shape.cached]


def _of_named(named: Any) -> list[Traffic]:
    return [replace(each, cached=reuse) for each in named.name for reuse in named.cached]


def _of_turns(keys: TurnKeys) -> list[Traffic]:
    usual = Turns(sessions_per_s=keys.sessions_per_s, tpot_s=keys.tpot_s)
    law = expected(turn_lengths, keys.sessions, usual.uncached)
    isl, osl = round(law.mean_isl), round(law.mean_osl)
    return [
        Traffic(isl=isl, osl=osl, law=keys.sessions, ftl_s=keys.ftl_s, turns=replace(usual, cache=cache))
        for cache in keys.cache
    ]


def _entry_form(value: object) -> str | None:
    if isinstance(value, str):
        return "name"
    if not isinstance(value, Mapping):
        return None
    return "named" if "name" in value else "turns" if "sessions" in value else "shape"


#: The name of a shipped traffic, or ``{isl: 1024, osl: 128}``, also with ``ftl_s``; with what is cached
#: ``{name: ..., cached: 0.9}``; or ``{sessions: coding_agent, sessions_per_s: 0.2, cache: {hbm: 20 GB}}``.
Entry: Any = Annotated[
    Annotated[str, load.spec_name("traffic"), AfterValidator(_shipped), Tag("name")]
    | Annotated[_Named, AfterValidator(_of_named), Tag("named")]
    | Annotated[TurnKeys, AfterValidator(_of_turns), Tag("turns")]
    | Annotated[_Shape, AfterValidator(_of_shape), Tag("shape")],
    one_of(_entry_form, "neither {isl: ..., osl: ...} nor {sessions: ...} nor a traffic's name"),
]
