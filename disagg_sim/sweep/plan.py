"""A sweep to frozen cases, and each case to blocks, with a digest of everything that a result depends on.

A case has prefill blocks (slices of its mappings, scored and boiled down to the candidates that can win a
match) and decode blocks (slices of its mappings, scored and matched with the case's candidates).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from disagg_sim.facts import load
from disagg_sim.search.grid import CHUNK_TOKENS, Ints, batch_axis
from disagg_sim.search.mappings import MappingTable, enumerate_mappings
from disagg_sim.sweep.spec import BLOCK_POINTS, Limits, SweepSpec
from disagg_sim.sweep.store import Key

PREFILL, POINTS = "prefill", "points"  # the two tables of a store
_ROOMS = ("facts", "physics", "search", "serving", "sweep")  # whose code decides a result


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination of model, system, precision, profile, shape and limits."""

    name: str
    model: str
    system: str
    precision: str
    profile: str
    engine: str
    mode: str
    matching: str
    isl: int  # [token]
    osl: int  # [token]
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A slice of a case's mappings in one phase: what a worker computes and writes as one file."""

    key: Key
    case: Case
    mappings: MappingTable
    batch: Ints  # (batches,) shared by all blocks of the case and phase [request]
    points: int  # design points [1]
    candidates: tuple[Key, ...]  # decode: the prefill blocks that it is matched with


@dataclass(frozen=True, kw_only=True, eq=False)
class CasePlan:
    """The blocks of one case, and the mappings that were refused before any point was computed."""

    case: Case
    digest: str
    prefill: tuple[Block, ...]
    decode: tuple[Block, ...]
    mappings: int  # accepted [1]
    refused: tuple[tuple[str, int], ...]  # (reason, mappings)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Prefill blocks, then decode blocks."""
        return self.prefill + self.decode

    @property
    def points(self) -> int:
        """Design points of both phases. [1]"""
        return sum(block.points for block in self.blocks)


@dataclass(frozen=True, kw_only=True, eq=False)
class SweepPlan:
    """All cases of a sweep, in the order of its file."""

    spec: SweepSpec
    cases: tuple[CasePlan, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in plan order."""
        return tuple(block for case in self.cases for block in case.blocks)

    @property
    def points(self) -> int:
        """Design points of all cases. [1]"""
        return sum(case.points for case in self.cases)


def plan_sweep(spec: SweepSpec) -> SweepPlan:
    """Every case of the sweep with its mappings enumerated, its batch axes fixed and its blocks cut."""
    cases = (
        _case(spec, model, system, precision, shape, mode)
        for model in spec.models
        for shape in spec.shapes
        for system, precision in spec.systems
        for mode in spec.modes
    )
    return SweepPlan(spec=spec, cases=tuple(_plan_case(case, spec.block_points) for case in cases))


def spec_digests(case: Case) -> dict[str, str]:
    """Digest of each spec that the case depends on, by ``kind/name``."""
    return {name: _digest(spec) for name, spec in _specs(case).items()}


@cache
def code_digest() -> str:
    """Digest of the sources that decide a result."""
    root = files("disagg_sim")
    texts = [(f"{room}/{item.name}", item.read_text()) for room in _ROOMS for item in (root / room).iterdir()
             if item.name.endswith(".py")]  # fmt: skip
    texts += [(name, (root / name).read_text()) for name in ("domain.py", "units.py")]
    return _digest(sorted(texts))


def _case(spec: SweepSpec, model: str, system: str, precision: str, shape: tuple[int, int], mode: str) -> Case:
    isl, osl = shape
    parts = [model, system, precision, spec.profile, spec.engine, str(isl), str(osl)]
    if (spec.limits, spec.matching) != (Limits(), "exact"):
        parts.append(_digest((spec.limits, spec.matching))[:8])
    return Case(
        name="-".join(part for part in parts if part),
        model=model,
        system=system,
        precision=precision,
        profile=spec.profile,
        engine=spec.engine,
        mode=mode,
        matching=spec.matching,
        isl=isl,
        osl=osl,
        limits=spec.limits,
    )


def _plan_case(case: Case, block_points: int) -> CasePlan:
    model, system = load.load_model(case.model), load.load_system(case.system)
    table = enumerate_mappings(model, system, max_gpus=case.limits.max_gpus)
    digest = _digest((case, _specs(case), version("disagg-sim"), code_digest()))
    blocks: dict[str, tuple[Block, ...]] = {}
    for kind in (PREFILL, POINTS):
        phase = "prefill" if kind == PREFILL else "decode"
        batch = batch_axis(
            model, system, table, phase=phase, isl=case.isl, osl=case.osl,
            precision=case.precision, profile=case.profile, engine=case.engine or None,
        )  # fmt: skip
        chunked = sum(size < case.isl for size in CHUNK_TOKENS) if kind == PREFILL else 0
        points = [batch.size * (1 + chunked * (pp > 1)) for pp in table.pp.tolist()]
        cuts = _cut(points, block_points)
        candidates = tuple(block.key for block in blocks.get(PREFILL, ()))
        blocks[kind] = tuple(
            Block(
                key=Key(kind, case.name, index, _digest((digest, kind, index, start, stop))),
                case=case,
                mappings=table[start:stop],
                batch=batch,
                points=sum(points[start:stop]),
                candidates=candidates,
            )
            for index, (start, stop) in enumerate(cuts)
        )
    return CasePlan(
        case=case,
        digest=digest,
        prefill=blocks[PREFILL],
        decode=blocks[POINTS],
        mappings=len(table),
        refused=tuple(table.refused),
    )


def _cut(points: list[int], block_points: int) -> list[tuple[int, int]]:
    """Slices of consecutive rows with at most ``block_points`` each, one row at least."""
    cuts: list[tuple[int, int]] = []
    start, held = 0, 0
    for row, size in enumerate(points):
        if row > start and held + size > block_points:
            cuts.append((start, row))
            start, held = row, 0
        held += size
    return [*cuts, (start, len(points))] if points else []


def _specs(case: Case) -> dict[str, Any]:
    model, system = load.load_model(case.model), load.load_system(case.system)
    return {
        f"model/{model.name}": model,
        f"hardware/{system.name}": system,
        f"efficiency/{system.name}": load.load_efficiency(case.system),
        f"precision/{case.precision}": load.resolve_precision(case.precision, model, system),
        f"profile/{case.profile}": load.load_profile(case.profile),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Nested lists and sorted mappings of plain values, the same in every process."""
    if is_dataclass(value):
        return [type(value).__name__, {f.name: _plain(getattr(value, f.name)) for f in fields(value)}]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(_plain(item) for item in value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


__all__ = ["BLOCK_POINTS", "Block", "Case", "CasePlan", "SweepPlan", "code_digest", "plan_sweep", "spec_digests"]
