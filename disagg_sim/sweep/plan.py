"""Plan the blocks of each case, with a digest of everything that a result depends on.

Disaggregated serving has prefill blocks (slices of the mappings, scored and boiled down to the candidates
that can win a match) and decode blocks (slices of the mappings, scored and matched with the case's
candidates). A co-located mode has blocks of one kind, slices of the mappings, stored beside the decode blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from disagg_sim.arrays import Ints
from disagg_sim.certainty.energy import JOULE
from disagg_sim.domain import Mapping, Mode
from disagg_sim.errors import UnknownNameError, nearest
from disagg_sim.facts import load
from disagg_sim.physics.setup import engine_name
from disagg_sim.search.grid import CHUNK_TOKENS, batch_axis
from disagg_sim.search.layouts import CHECKED
from disagg_sim.serving.colocated import count_colocated
from disagg_sim.serving.piggyback import count_piggyback
from disagg_sim.sweep.cases import Case, cases_of, modes_of, why_not_shared
from disagg_sim.sweep.digests import code_digest, digest_of
from disagg_sim.sweep.inputs import Inputs, Source, inputs_of
from disagg_sim.sweep.keys import Key
from disagg_sim.sweep.pool_spec import TWO
from disagg_sim.sweep.spec import SweepSpec

PREFILL, POINTS, POOLS = "prefill", "points", "pools"  # the tables of a store
#: What is stored of the points: all, or those that may come to lie on a frontier, error bars included.
KEEP = (EVERYTHING, FRONTIER) = ("points", "frontier")
ROOMS = ("facts", "physics", "workload", "search", "serving", "certainty", "sweep")  # whose code decides a result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A slice of a case's mappings in one mode and phase: what a worker computes and writes as one file."""

    key: Key
    case: Case
    mode: str
    mappings: Mapping
    batch: Ints | None  # (batches,) shared by all blocks of the case and phase; None = the mode's own [request]
    points: int  # design points [1]
    candidates: tuple[Key, ...] = ()  # decode: the prefill blocks that it is matched with


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
    modes: tuple[ModePlan, ...]
    left_out: tuple[tuple[str, str], ...] = ()  # (mode, why): asked for, and not to be had in this case
    pools: tuple[Block, ...] = ()  # one, which makes the frontier over further pools where these are asked for

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
    sources: tuple[Source, ...]  # these files
    keep: str = EVERYTHING  # of ``KEEP``

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in plan order."""
        return tuple(block for case in self.cases for block in case.blocks)

    @property
    def points(self) -> int:
        """Design points of all cases. [1]"""
        return sum(case.points for case in self.cases)


def plan_sweep(spec: SweepSpec, *, keep: str = EVERYTHING) -> SweepPlan:
    """Plan every case of a sweep: enumerate its mappings, fix its batch axes, divide both into blocks.

    Parameters
    ----------
    spec : SweepSpec
        Such as ``load_sweep`` reads.
    keep : str
        Of ``KEEP``: what is stored of the points. The tables are the same bytes.

    Returns
    -------
    SweepPlan
        Cases in the order of the file; ``run_sweep`` computes them.

    Raises
    ------
    UnknownNameError
        No such ``keep``.

    Examples
    --------
    >>> from disagg_sim.sweep.spec import load_sweep
    >>> plan_sweep(load_sweep("smoke")).cases[0].case.model
    'llama_3_1_8b'
    """
    if keep not in KEEP:
        raise UnknownNameError(f"unknown --keep {keep!r}{nearest(keep, KEEP)}; known: {', '.join(KEEP)}")
    cases = cases_of(spec)
    specs = dict.fromkeys(name for case in cases for name, value in _specs(case).items() if value is not None)
    inputs, sources = inputs_of(specs)  # before the digests, so that a change in between is seen
    planned = tuple(_plan_case(case, spec, keep) for case in cases)
    return SweepPlan(spec=spec, cases=planned, inputs=inputs, sources=sources, keep=keep)


def spec_digests(case: Case) -> dict[str, str]:
    """Digest of each spec that the case depends on, by ``kind/name``."""
    return {name: digest_of(spec) for name, spec in _specs(case).items()}


def _plan_case(case: Case, spec: SweepSpec, keep: str) -> CasePlan:
    digest = digest_of((case, _specs(case), version("disagg-sim"), code_digest(ROOMS)))
    of_points = digest if keep == EVERYTHING else digest_of((digest, keep))
    served = modes_of(case, spec.modes)
    modes = (
        _plan_pools(case, digest, of_points, spec.block_points)
        if mode == Mode.DISAGGREGATED
        else _plan_shared(case, mode, of_points, spec.block_points)
        for mode in served
    )
    left_out = tuple((mode, why_not_shared(case)) for mode in spec.modes if mode not in served)
    pools = () if {*case.pool_names} == {*TWO} else (_plan_many(case, digest),)
    return CasePlan(case=case, digest=digest, modes=tuple(modes), left_out=left_out, pools=pools)


def _plan_many(case: Case, digest: str) -> Block:
    """The block of the frontier over further pools."""
    table = case.limits.mappings(case.decode_setup)
    batches = batch_axis(case.decode_setup, table, case.lengths, phase="decode").size
    return Block(
        key=Key(POOLS, case.name, "frontier", digest_of((digest, POOLS))),
        case=case,
        mode=Mode.DISAGGREGATED,
        mappings=table,
        batch=None,
        points=batches * len(table),
    )


def _plan_pools(case: Case, digest: str, of_points: str, block_points: int) -> ModePlan:
    """Prefill and decode blocks."""
    prefill_at, at = case.prefill_setup, case.decode_setup
    prefill_table, table = case.limits.mappings(prefill_at, prefill=True), case.limits.mappings(at)
    prefill_batch = batch_axis(prefill_at, prefill_table, case.lengths, phase="prefill")
    chunked = sum(size < case.lengths.longest_timed for size in CHUNK_TOKENS)
    prefill = _blocks(
        case,
        Mode.DISAGGREGATED,
        prefill_table,
        prefill_batch,
        block_points,
        digest,
        table=PREFILL,
        points=[prefill_batch.size * (1 + chunked * (pp > 1)) for pp in prefill_table.pp.tolist()],
    )
    batch = batch_axis(at, table, case.lengths, phase="decode")
    decode = _blocks(
        case,
        Mode.DISAGGREGATED,
        table,
        batch,
        block_points,
        of_points,
        points=[batch.size] * len(table),
        candidates=tuple(block.key for block in prefill),
    )
    return ModePlan(mode=Mode.DISAGGREGATED, prefill=prefill, points=decode, mappings=len(table), refused=table.refused)


def _plan_shared(case: Case, mode: str, digest: str, block_points: int) -> ModePlan:
    """Blocks of a co-located mode: one instance is the whole deployment, so the GPU cap binds it."""
    at = case.decode_setup
    table = case.limits.mappings(at)
    within = table.gpus <= case.limits.gpu_cap
    refused = table.refused + ((("more GPUs than gpu_cap", int((~within).sum())),) if not within.all() else ())
    table = table[within]
    count = partial(count_colocated if mode == Mode.COLOCATED else count_piggyback, case.shared)
    batches = batch_axis(at, table, case.lengths, phase="decode").size
    blocks = _blocks(case, mode, table, None, block_points, digest, points=[batches] * len(table), count=count)
    return ModePlan(mode=mode, prefill=(), points=blocks, mappings=len(table), refused=refused)


def _blocks(
    case: Case,
    mode: str,
    mappings: Mapping,
    batch: Ints | None,
    block_points: int,
    digest: str,
    *,
    points: list[int],
    table: str = POINTS,
    candidates: tuple[Key, ...] = (),
    count: Callable[[Mapping], int] | None = None,
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


def _specs(case: Case) -> dict[str, Any]:
    model, pools, engines = load.load_model(case.model), case.pools, load.list_specs("engine")
    specs: dict[str, Any] = {f"model/{model.name}": model, f"profile/{case.profile}": load.load_profile(case.profile)}
    specs[f"evidence/{CHECKED}"] = load.load_evidence(CHECKED)
    specs |= {f"layout/{engine}": load.load_layout_rules(engine) for engine in load.list_specs("layout")}
    if case.speculation and (curve := load.load_speculation(case.speculation)).model:  # a stated one has no file
        specs[f"speculation/{case.speculation}"] = curve
    if case.traffic.law:
        specs[f"traffic/{case.traffic.law}"] = load.load_traffic(case.traffic.law)
    for name, recipe in ((pools.prefill_system, pools.prefill_precision), (pools.system, pools.precision)):
        specs[f"hardware/{name}"] = load.load_system(name)
        specs[f"efficiency/{name}"] = load.load_efficiency(name)
        if case.per == JOULE:
            specs[f"power/{name}"] = load.load_power(name)
        if (engine := engine_name(load.load_profile(case.profile), load.load_system(name), case.engine)) in engines:
            specs[f"engine/{engine}"] = load.load_engine(engine)
        specs[f"precision/{recipe}"] = load.resolve_precision(recipe, model, load.load_system(name))
    return specs
