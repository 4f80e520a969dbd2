"""Plan the blocks of each case, with a digest of everything that a result depends on.

Disaggregated serving has prefill blocks (slices of the mappings, scored and boiled down to the candidates
that can win a match) and decode blocks (slices of the mappings, scored and matched with the case's
candidates). A co-located mode has blocks of one kind, slices of the mappings, stored beside the decode blocks.
What cases have in common (specs, setups, mappings, batch axes) is made once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from typing import Any, TypeVar

from disagg_sim.arrays import Ints
from disagg_sim.choices import TWO
from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.errors import UnknownNameError, nearest
from disagg_sim.facts import load
from disagg_sim.facts.profile import profile_and_skew
from disagg_sim.facts.yaml_files import list_specs
from disagg_sim.physics.setup import Setup, engine_name
from disagg_sim.search.axes import CHUNK_TOKENS, batch_axis
from disagg_sim.search.layouts import CHECKED, CHECKED_PREFILL
from disagg_sim.serving.costs import JOULE
from disagg_sim.serving.shared_laws import SHARED_LAWS, engine_mode
from disagg_sim.sweep.cases import Case, cases_of, setup_case, why_not_shared
from disagg_sim.sweep.digests import Inputs, SpecFile, code_digest, digest_of, inputs_of
from disagg_sim.sweep.spec import ENGINES_MODE, SweepSpec
from disagg_sim.sweep.store import Key

Made = TypeVar("Made")


class Common:
    """Values of cases that are planned together, each made at its first use; spec files are read as they were then."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def specs(self, case: Case) -> dict[str, Any]:
        """Every spec that the case depends on, by ``kind/name``; None where there is none of the kind."""
        return self.once(("specs", setup_case(case), case.traffic.law, case.per, case.served), lambda: _specs(case))

    def digests(self, case: Case) -> dict[str, str]:
        """Digest of each of these."""
        return {name: self.once(("digest", name), partial(digest_of, spec)) for name, spec in self.specs(case).items()}

    def mappings(self, case: Case, *, prefill: bool = False) -> Sharding:
        """Mappings of an instance within the limits: of prefill, or of what decodes."""
        at = self._setup(case, prefill=prefill)
        same = replace(setup_case(case), profile="")  # which mappings there are does not depend on how fast they are
        key = ("mappings", same, *_space(case, prefill=prefill))
        return self.once(key, lambda: case.limits.mappings(at, prefill=prefill))

    def batch(self, case: Case, *, prefill: bool = False) -> Ints:
        """Batch axis of all these mappings. [request]"""
        at, table = self._setup(case, prefill=prefill), self.mappings(case, prefill=prefill)
        phase = "prefill" if prefill else "decode"
        return self.once(
            ("batch", phase, case.traffic, setup_case(case), *_space(case, prefill=prefill)),
            lambda: batch_axis(at, table, case.lengths, phase=phase),
        )

    def _setup(self, case: Case, *, prefill: bool) -> Setup:
        return self.once(
            ("setup", prefill, setup_case(case)), lambda: case.prefill_setup if prefill else case.decode_setup
        )

    def once(self, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
        """Return what was made under a key; make it the first time."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found


def _space(case: Case, *, prefill: bool) -> tuple[Any, ...]:
    """What decides the mappings of a setup beside it: no latency, no bandwidth and no size of a deployment."""
    limits = replace(case.limits, ftl_s=math.inf, ttl_s=math.inf, nic_limit=math.inf, gpu_cap=1)
    limits = replace(limits, max_dcp=1) if prefill else replace(limits, max_pcp=1)
    return prefill and not case.pools.alike, limits


def _specs(case: Case) -> dict[str, Any]:
    model, pools, engines = load.load_model(case.model), case.pools, list_specs("engine")
    profile, _ = profile_and_skew(case.profile)
    specs: dict[str, Any] = {f"model/{model.name}": model, f"profile/{profile}": load.load_profile(profile)}
    specs |= {f"evidence/{name}": load.load_evidence(name) for name in (CHECKED, CHECKED_PREFILL)}
    specs |= {f"layout/{engine}": load.load_layout_rules(engine) for engine in list_specs("layout")}
    if case.speculation:
        curve = load.load_speculation(case.speculation)
        if curve.model:  # a stated one has no file
            specs[f"speculation/{case.speculation}"] = curve
        if curve.drafter is not None:
            specs[f"model/{curve.draft_model}"] = curve.drafter
    if case.traffic.law:
        specs[f"traffic/{case.traffic.law}"] = load.load_traffic(case.traffic.law)
    specs |= case.served.specs
    for name, recipe in ((pools.prefill_system, pools.prefill_precision), (pools.system, pools.precision)):
        specs[f"hardware/{name}"] = load.load_system(name)
        specs[f"efficiency/{name}"] = load.load_efficiency(name)
        if case.per == JOULE:
            specs[f"power/{name}"] = load.load_power(name)
        if (engine := engine_name(load.load_profile(profile), load.load_system(name), case.engine)) in engines:
            specs[f"engine/{engine}"] = load.load_engine(engine)
        specs[f"precision/{recipe}"] = load.resolve_precision(recipe, model, load.load_system(name))
    return specs


PREFILL, POINTS, POOLS = "prefill", "points", "pools"  # the tables of a store
#: What is stored of the points: all, or those that may come to lie on a frontier, error bars included.
KEEP = (EVERYTHING, FRONTIER) = ("points", "frontier")
#: Rooms whose code decides a result.
ROOMS = ("facts", "physics", "techniques", "workload", "search", "serving", "certainty", "sweep")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A slice of a case's mappings in one mode and phase: what a worker computes and writes as one file."""

    key: Key
    case: Case
    mode: str
    mappings: Sharding
    batch: Ints | None  # (batches,) shared by all blocks of the case and phase; None = the mode's own [request]
    points: int  # design points [1]
    candidates: tuple[Key, ...] = ()  # decode: the prefill blocks that it is matched with
    scored_as: str = ""  # of two pools: digest of what times and bytes depend on beside phase, mappings and batch


@dataclass(frozen=True, kw_only=True, eq=False)
class ModePlan:
    """The blocks of a case in one mode, and the mappings rejected before any point was computed."""

    mode: str
    prefill: tuple[Block, ...]  # empty in the co-located modes
    points: tuple[Block, ...]  # the points that the mode's frontier is taken from
    mappings: int  # accepted, of decode or of co-located instances [1]
    refused: tuple[tuple[str, int], ...]  # (reason, mappings)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Prefill blocks, then the others."""
        return self.prefill + self.points


@dataclass(frozen=True, kw_only=True, eq=False)
class CasePlan:
    """All modes of one case."""

    case: Case
    digest: str
    specs: dict[str, str]  # digest of each spec that it depends on, by ``kind/name``
    modes: tuple[ModePlan, ...]
    left_out: tuple[tuple[str, str], ...]  # (mode, why): asked for, and not to be had in this case
    pools: tuple[Block, ...]  # one, which makes the frontier over further pools where these are asked for

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of all modes, in order, then that of further pools."""
        return (*(block for mode in self.modes for block in mode.blocks), *self.pools)

    @property
    def points(self) -> int:
        """Design points of all modes. [1]"""
        return sum(block.points for block in self.blocks)


@dataclass(frozen=True, kw_only=True, eq=False)
class SweepPlan:
    """All cases of a sweep, in the order of its file."""

    spec: SweepSpec
    cases: tuple[CasePlan, ...]
    inputs: Inputs  # content of every spec file that a case depends on
    sources: tuple[SpecFile, ...]  # these files
    keep: str  # of ``KEEP``

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in plan order."""
        return tuple(block for case in self.cases for block in case.blocks)

    @property
    def points(self) -> int:
        """Design points of all cases. [1]"""
        return sum(case.points for case in self.cases)


def plan_sweep(spec: SweepSpec, *, keep: str = EVERYTHING) -> SweepPlan:
    """Plan every case of a sweep: enumerate its mappings, fix its batch axes, divide both into blocks."""
    (plan,) = plan_sweeps([spec], keep=keep)
    return plan


def plan_sweeps(specs: Sequence[SweepSpec], *, keep: str) -> tuple[SweepPlan, ...]:
    """Plan several sweeps; what their cases have in common is made once."""
    if keep not in KEEP:
        raise UnknownNameError(f"unknown --keep {keep!r}{nearest(keep, KEEP)}; known: {', '.join(KEEP)}")
    cases, named = [cases_of(spec) for spec in specs], Common()
    inputs = [
        inputs_of(dict.fromkeys(name for case in some for name, spec in named.specs(case).items() if spec is not None))
        for some in cases
    ]
    common = Common()  # specs are read again after the stamps of their files, so that a change in between is seen
    return tuple(
        SweepPlan(
            spec=spec,
            cases=tuple(_plan_case(case, spec, keep, common) for case in some),
            inputs=content,
            sources=sources,
            keep=keep,
        )
        for spec, some, (content, sources) in zip(specs, cases, inputs, strict=True)
    )


def _plan_case(case: Case, spec: SweepSpec, keep: str, common: Common) -> CasePlan:
    specs = common.digests(case)
    digest = common.once(("case", case), lambda: digest_of((case, specs, _version(), code_digest(ROOMS))))
    of_points = digest if keep == EVERYTHING else digest_of((digest, keep))
    asked = dict.fromkeys(engine_mode(case.decode_setup) if mode == ENGINES_MODE else mode for mode in spec.modes)
    served = [mode for mode in asked if mode == ServingMode.DISAGGREGATED or not why_not_shared(case)]
    size = spec.block_points

    def planned(mode: str) -> ModePlan:
        if mode == ServingMode.DISAGGREGATED:
            return _plan_pools(case, digest, of_points, size, common)
        return _plan_shared(case, mode, of_points, size, common)

    modes = tuple(common.once(("mode", case, mode, size), partial(planned, mode)) for mode in served)
    left_out = tuple((mode, why_not_shared(case)) for mode in asked if mode not in served)
    pools = () if {*case.pool_names} == {*TWO} else (_plan_many(case, digest, common),)
    return CasePlan(case=case, digest=digest, specs=specs, modes=modes, left_out=left_out, pools=pools)


@cache
def _version() -> str:
    return version("disagg-sim")


def _plan_many(case: Case, digest: str, common: Common) -> Block:
    """The block of the frontier over further pools."""
    table, batches = common.mappings(case), common.batch(case).size
    return Block(
        key=Key(POOLS, case.name, "frontier", digest_of((digest, POOLS))),
        case=case,
        mode=ServingMode.DISAGGREGATED,
        mappings=table,
        batch=None,
        points=batches * len(table),
    )


def _plan_pools(case: Case, digest: str, of_points: str, block_points: int, common: Common) -> ModePlan:
    """Prefill and decode blocks."""
    prefill_table, prefill_batch = common.mappings(case, prefill=True), common.batch(case, prefill=True)
    table, batch = common.mappings(case), common.batch(case)
    scored_as = common.once(
        ("scored", setup_case(case), case.traffic),
        lambda: digest_of((setup_case(case), case.traffic, common.digests(case), _version(), code_digest(ROOMS))),
    )
    chunked = sum(size < case.lengths.longest_timed for size in CHUNK_TOKENS)
    prefill = _blocks(
        case,
        ServingMode.DISAGGREGATED,
        prefill_table,
        prefill_batch,
        block_points,
        digest,
        table=PREFILL,
        points=[prefill_batch.size * (1 + chunked * (pp > 1)) for pp in prefill_table.pp.tolist()],
        scored_as=scored_as,
    )
    decode = _blocks(
        case,
        ServingMode.DISAGGREGATED,
        table,
        batch,
        block_points,
        of_points,
        points=[batch.size] * len(table),
        candidates=tuple(block.key for block in prefill),
        scored_as=scored_as,
    )
    return ModePlan(
        mode=ServingMode.DISAGGREGATED, prefill=prefill, points=decode, mappings=len(table), refused=table.refused
    )


def _plan_shared(case: Case, mode: str, digest: str, block_points: int, common: Common) -> ModePlan:
    """Blocks of a co-located mode: one instance is the whole deployment, so the GPU cap binds it."""
    table = common.mappings(case)
    within = table.gpus <= case.limits.gpu_cap
    refused = table.refused + ((("more GPUs than gpu_cap", int((~within).sum())),) if not within.all() else ())
    table = table[within]
    count = partial(SHARED_LAWS[mode].count, case.shared)
    whole = common.batch(case) if within.all() else batch_axis(case.decode_setup, table, case.lengths, phase="decode")
    batches = whole.size
    blocks = _blocks(case, mode, table, None, block_points, digest, points=[batches] * len(table), count=count)
    return ModePlan(mode=mode, prefill=(), points=blocks, mappings=len(table), refused=refused)


def _blocks(
    case: Case,
    mode: str,
    mappings: Sharding,
    batch: Ints | None,
    block_points: int,
    digest: str,
    *,
    points: list[int],
    table: str = POINTS,
    candidates: tuple[Key, ...] = (),
    scored_as: str = "",
    count: Callable[[Sharding], int] | None = None,
) -> tuple[Block, ...]:
    """Slices of the mappings; ``points`` weighs each row, ``count`` gives a slice's points where they differ."""
    return tuple(
        Block(
            key=Key(table, case.name, f"{mode}-{index:04d}", digest_of((digest, table, mode, index, start, stop))),
            case=case,
            mode=mode,
            mappings=mappings[start:stop],
            batch=batch,
            points=sum(points[start:stop]) if count is None else count(mappings[start:stop]),
            candidates=candidates,
            scored_as=scored_as,
        )
        for index, (start, stop) in enumerate(_cut(points, block_points))
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
