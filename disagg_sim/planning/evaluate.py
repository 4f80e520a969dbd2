"""Evaluate a given deployment: latencies of its requests, the rate it could serve, and the plan for the same load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.domain import ServingMode
from disagg_sim.errors import InfeasibleError, InputError, above_zero
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.notebook import Shown
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.assurance import Assurance, assurance
from disagg_sim.planning.candidates import Candidates, with_link_limit
from disagg_sim.planning.choices import Grids, colocated_of, decode_of, prefill_of, prompts_of_ranks
from disagg_sim.planning.counts import SizedPool
from disagg_sim.planning.design import Design, Percentiles, PlannedPool
from disagg_sim.planning.limits import NO_LIMIT, SHARES, TPOT, TTFT, Demand
from disagg_sim.planning.long_prompts import OneByOne
from disagg_sim.planning.mixed_steps import mixed_bytes, mixed_tables
from disagg_sim.planning.plan import USUAL, demand_of, plan, source_of
from disagg_sim.planning.pools import AnyChoice, ColocatedChoice, DecodeChoice
from disagg_sim.planning.question import PlanOptions, Size, setups_of, systems_of
from disagg_sim.planning.sizing import disaggregated_of
from disagg_sim.search.axes import batch_sizes
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.costs import costs_of_gpus
from disagg_sim.simulation.deployment import Replicas
from disagg_sim.units import GB
from disagg_sim.workload.lengths import Lengths
from disagg_sim.workload.trace import Trace

#: Tokens and sequences of a step of an attention rank without an engine: vLLM's defaults, as in its profile.
STEP_TOKENS, STEP_SEQUENCES = 8192, 1024
#: Roles of the pools that a deployment may have.
TOGETHER = (("colocated",), ("prefill", "decode"))


@dataclass(frozen=True, kw_only=True)
class Evaluation(Shown):
    """A deployment under a load, and the deployment that the planner would choose for it."""

    given: Plan  # a plan whose best design is the deployment
    sure: Assurance | None  # None where a pool is overloaded
    plan: Callable[[], Plan] = field(repr=False)
    notes: tuple[str, ...] = ()  # on how its launch was read

    @cached_property
    def planned(self) -> Plan:
        """The plan for the same load; computed at the first use."""
        return self.plan()

    @property
    def design(self) -> Design:
        """The deployment."""
        assert self.given.best is not None
        return self.given.best

    @property
    def overloaded(self) -> tuple[str, ...]:
        """Roles of the pools that get more requests than they can serve: their queues grow without end."""
        return tuple(pool.role for pool in self.design.pools if pool.utilisation >= 1.0)

    @property
    def full(self) -> float:
        """Share of the time in which all seats of decode are taken, so that requests queue for one. [1]"""
        last = self.design.pools[-1]
        assert isinstance(last.choice, DecodeChoice | ColocatedChoice)
        return 1.0 if self.overloaded else float(last.choice.occupied(last.rate, last.instances).full)

    @property
    def uncaptured(self) -> int:
        """Tokens of a rank above which decode steps that run are launched kernel by kernel; 0 if none is. [token]"""
        last = self.design.pools[-1]
        assert isinstance(last.choice, DecodeChoice | ColocatedChoice)
        mapping, engine = last.choice.mapping, last.setup.overheads
        if engine is None or engine.uncaptured_launch is None:  # no longer than that of a captured one, as far as known
            return 0
        seats = last.choice.seats
        running = seats if self.overloaded else last.choice.occupied(last.rate, last.instances).at(SHARES["p99"])
        tokens = running / (mapping.dp_attn * min(mapping.pp, seats)) * (1 + mapping.draft_tokens)
        return 0 if tokens <= engine.captured else engine.captured

    @property
    def ttft(self) -> Percentiles:
        """Arrival to first token by percentile; inf where a queue grows without end. [s]"""
        return dict.fromkeys(SHARES, math.inf) if self.overloaded else self.design.ttft

    @property
    def tpot(self) -> Percentiles:
        """Mean gap of a request's tokens by percentile; of an overloaded pool with all seats taken. [s]"""
        return self.design.tpot

    @property
    def missed(self) -> tuple[str, ...]:
        """Limits that do not hold: ``ttft``, ``tpot``, and ``seats`` where too many requests find all seats taken."""
        work = self.design.work
        late = [
            name
            for name, values, limit in (("ttft", self.ttft, work.ttft), ("tpot", self.tpot, work.tpot))
            if not values[limit.percentile] <= limit.seconds
        ]
        return (*late, *(["seats"] if self.full > 1.0 - work.tpot.share else []))

    @property
    def capacity(self) -> float:
        """Highest rate at which both limits hold; 0 where they hold at none. [request/s]"""
        return self.design.keeping(self.design.work.ttft.seconds, self.design.work.tpot.seconds)


def evaluate(
    model: str | Path | ModelSpec,
    system: str | SystemSpec,
    pools: Mapping[str, Replicas],
    lengths: Lengths | Trace | TrafficCase,
    *,
    rate: float | None = None,
    ttft: Any = TTFT,
    tpot: Any = TPOT,
    options: PlanOptions = USUAL,
) -> Evaluation:
    """Evaluate a deployment: latencies of its requests, the rate that it could serve, and the plan for the same load.

    Parameters
    ----------
    model : ModelSpec, str or Path
        Spec, name, or file.
    system : SystemSpec or str
        GPU system of all pools, or of the others where ``options.prefill_system`` is that of the prefill pool.
    pools : mapping of str to Replicas
        ``colocated``, or ``prefill`` and ``decode``. Without a batch an instance takes as many sequences as its engine
        allows and memory holds; without a token budget it has that of the engine.
    lengths : Lengths, Trace or TrafficCase
        Lengths of the requests, as in ``plan``.
    rate : float, optional
        Request rate; None = that of the trace. [request/s]
    ttft, tpot : float or str
        Limits of requests, as in ``plan``.
    options : PlanOptions
        Recipe, engine, second system, drafts; the options of the search act on the plan for the same load alone.

    Returns
    -------
    Evaluation
        Latencies [s]; an overload or a missed limit is an answer, not an error.

    Raises
    ------
    InputError, UnknownNameError, InfeasibleError
        Pools that do not go together, values out of range; an instance that does not fit in memory.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> mine = {"colocated": ds.Replicas(mapping=ds.Sharding(tp_attn=2, tp_ffn=2), instances=4, batch=64)}
    >>> found = evaluate("llama_3_1_8b", "h100_sxm", mine, ds.lengths(2048, 256), rate=20, tpot="20 ms")
    >>> found.design.gpus, found.missed, found.planned.best.gpus < 8, found.capacity > 20
    (8, (), True, True)
    """
    if tuple(pools) not in TOGETHER and tuple(reversed(list(pools))) not in TOGETHER:
        raise InputError(f"pools {', '.join(pools) or 'none'}; allowed: colocated, or prefill and decode")
    if isinstance(lengths, Trace) and rate is None:
        rate = lengths.rate
    if rate is None:
        raise InputError("evaluate needs a rate of requests, or a trace that has one")
    above_zero("rate", rate, "requests/s")
    systems = systems_of(system)
    if len(systems) > 1:
        raise InputError(f"system {system}: a deployment is on one system, or on two with prefill_system")
    work, options = demand_of(lengths, ttft=ttft, tpot=tpot, rate=rate, options=options)
    at, prefill_at = setups_of(model, systems[0], options)
    if at.speculation is None and any(each.mapping.draft_tokens for each in pools.values()):
        raise InputError("a pool has draft tokens, but there is no drafter; give options.speculation (--speculate)")
    last = pools.get("decode") or pools["colocated"]
    if at.overheads is not None:
        started = replace(at, overheads=at.overheads.as_started(last.captured))
        at, prefill_at = started, started if prefill_at is at else prefill_at
    case, sized = _given(at, prefill_at, pools, work, options)
    if case.colocated:
        own = tuple(
            PlannedPool(role="colocated", choice=each.choice, instances=each.instances, rate=rate) for each in sized
        )
        design = Design(mode=ServingMode.COLOCATED, pools=own, rate=rate, cost=0.0, work=case.work)
    else:
        design = disaggregated_of(case, rate, 0.0, *sized)
    design = replace(design, cost=sum(pool.gpus * case.costs[pool.setup.system.name] for pool in design.pools))
    given = Plan(size=Size(rate=rate), options=options, cases=(case,), best=design, source=source_of(lengths, work))
    beside = partial(plan, model, system, lengths, ttft=ttft, tpot=tpot, rate=rate, options=options)
    found = Evaluation(given=given, sure=None, plan=beside)
    if found.overloaded:
        return found
    sure = assurance(given)  # whose rate within the limits is at least the planned one, which a plan's is
    return replace(found, sure=replace(sure, most=found.capacity / rate))


def _given(
    at: Setup, prefill_at: Setup, pools: Mapping[str, Replicas], work: Demand, options: PlanOptions
) -> tuple[Candidates, list[SizedPool[AnyChoice]]]:
    """Make the case that has the given pools as its only choices; return it and the pools with their counts."""
    last = pools.get("decode") or pools["colocated"]
    first = pools.get("prefill") or last
    share = None if work.lengths.constant else work.ttft.share
    chunk = int(first.mapping.chunk_tokens)
    prefill = prefill_grid(
        prefill_at,
        replace(first.mapping, chunk_tokens=0),
        prompts_of_ranks(work.lengths),
        ftl_quantile=share,
        batch=_prompts(prefill_at, first, work) if "prefill" in pools else [1],
        chunk_tokens=[chunk] if chunk else [],
    )
    decode = decode_grid(at, replace(last.mapping, chunk_tokens=0), work.lengths, batch=_sequences(at, last))
    work = replace(work, lengths=prefill.lengths)
    free = replace(work, ttft=NO_LIMIT, tpot=NO_LIMIT, headroom=0.0, most_load=1.0)
    column = _most(decode, 0, asked=last.batch)
    case = Candidates(
        at=at,
        prefill_at=prefill_at,
        work=work,
        grids=Grids(prefill, decode),
        colocated=(),
        inside=((), ()),
        across=((), ()),
        costs=costs_of_gpus([at.system, prefill_at.system], options.per),
    )
    if "colocated" in pools:
        if prefill_at is not at:
            raise InputError("prefill_system is the system of a prefill pool; the pool colocated has one system")
        both = _colocated(decode, free, last, column)
        return replace(case, colocated=(both,)), [SizedPool(both, last.instances)]
    row = len(prefill.mappings) - 1  # with chunks, where some are asked for
    choices = (
        prefill_of(prefill, free, [(row, _most(prefill, row, asked=first.batch))]),
        [decode_of(decode, free, 0, column)],
    )
    case = with_link_limit(replace(case, inside=choices, across=choices), options.max_nic)
    together = first.gpus + last.gpus <= (at.system.nvlink_domain if prefill_at is at else 0)
    sends, takes = case.inside if together else case.across
    return case, [SizedPool(sends[0], first.instances), SizedPool(takes[0], last.instances)]


def _prompts(at: Setup, given: Replicas, work: Demand) -> Ints:
    """List numbers of prompts of a pass: up to the given batch, and to the prompts that fit in the token budget."""
    fit = max(int(_budget(at, given) / work.lengths.mean_new), int(given.mapping.dp_attn))
    if given.batch is None or given.token_budget is None:
        return _upto(given.batch or fit)
    return _upto(min(given.batch, fit))


def _budget(at: Setup, given: Replicas) -> int:
    """Tokens of a step of an instance: as given, or those of its engine. [token]"""
    of_rank = STEP_TOKENS if at.overheads is None else at.overheads.chunk_tokens
    return given.token_budget or of_rank * int(given.mapping.dp_attn)


def _sequences(at: Setup, given: Replicas) -> Ints:
    """List numbers of sequences of an instance: up to the given batch, or to the most that the engine takes."""
    ranks, engine = int(given.mapping.dp_attn), at.overheads
    if engine is None:
        return _upto(given.batch or STEP_SEQUENCES * ranks)
    sizes = _upto(given.batch or engine.max_running * ranks)
    captured = engine.captured * ranks * int(given.mapping.pp)  # the step jumps above it
    end = captured // (1 + int(given.mapping.draft_tokens))
    return np.unique([*sizes, *(each for each in (end, end + 1) if 0 < end < sizes[-1])])


def _upto(most: int) -> Ints:
    """Batches from 1 to the most, four a doubling. [request]"""
    sizes = batch_sizes(most)
    return np.append(sizes[sizes < most], most)


def _most(grid: PhaseGrid, row: int, *, asked: int | None) -> int:
    """Find the column of the largest batch: the one that was asked for, which must fit, or the largest that fits."""
    fits = np.flatnonzero(grid.feasible[row])
    if asked is None and fits.size:
        return int(fits[-1])
    last = grid.batch.size - 1
    if fits.size and fits[-1] == last:
        return last
    place = 0 if asked is None else last
    most = f"; at most {grid.batch[fits[-1]]:,} fit" if fits.size else ""
    lacking = float(grid.memory_bytes[row, place] - grid.memory_limit) / GB
    said = f"an instance with batch {grid.batch[place]:,} lacks {lacking:.1f} GB of memory a GPU"
    raise InfeasibleError(f"{grid.phase}: {said}{most}")


def _colocated(grid: PhaseGrid, work: Demand, given: Replicas, column: int) -> ColocatedChoice:
    """Make the choice of a given co-located instance."""
    at, ranks = grid.setup, int(given.mapping.dp_attn)
    table = grid.chosen(np.zeros(1, dtype=np.intp), np.array([column]))
    mapping = table[0]
    budget = _budget(at, given)
    memory = mixed_bytes(grid, work, table.for_grid(), column + 1, [budget / ranks])[0, 0]
    fits = np.flatnonzero(
        (memory <= at.memory_limit) & (grid.batch[: column + 1] * (1 + mapping.draft_tokens) < budget)
    )
    if not fits.size or (given.batch is not None and fits[-1] != column):
        most = f"; at most {grid.batch[fits[-1]]:,} do" if fits.size else ""
        raise InfeasibleError(
            f"an instance with batch {given.batch or 1} and steps of {budget:,} tokens does not fit{most}"
        )
    seats = int(fits[-1])
    tables = mixed_tables(grid, work, np.zeros(1, dtype=np.intp), table.for_grid(), seats + 1)[:, 0]
    waits = [given.hold_steps] if given.hold_steps else []
    made = colocated_of(grid, work, (0, seats), mapping, tables, budget, float(memory[seats]), waits)
    made = replace(made, hold_steps=given.hold_steps or 0)
    return OneByOne.of(made) if made.seats == ranks == mapping.pp == 1 else made
