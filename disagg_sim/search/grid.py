"""The only owner of the axes: rows are mappings (and CPP chunk sizes), columns are batch sizes.

Grids are scored in blocks of rows that stay in cache; an infeasible point keeps its place, with its
status and the bytes that it lacks.

Past 400 lines: the axes, the blocks and both phases share their private forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.domain import Conditions, Instance, Mapping, Status
from disagg_sim.errors import InputError, nearest, whole_number
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.notebook import Shown
from disagg_sim.physics.chunked import chunked_prefill_pass
from disagg_sim.physics.kv_transfer import kv_bytes_per_request, unique_gpus
from disagg_sim.physics.layer import check_form
from disagg_sim.physics.memory import CachedTokens, decode_bytes, decode_residents, prefill_bytes, prompt_residents
from disagg_sim.physics.phases import Degrees, PrefillPass, decode_step, prefill_pass
from disagg_sim.physics.roofline import Sums
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.physics.work import Numeric
from disagg_sim.search.mappings import MappingTable, mappings_for

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Design points scored at once: small enough for the cache, large enough to hide numpy's overhead.
BLOCK_POINTS = 32_768
#: Chunk sizes that CPP tries. [token]
CHUNK_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
#: Batch sizes per doubling.
BATCHES_PER_DOUBLING = 4
#: No instance serves more sequences than this.
MAX_BATCH = 2**20

PHASES = ("prefill", "decode")
MAPPING_COLUMNS = ("tp_attn", "dp_attn", "tp_ffn", "ep", "pp", "chunk_tokens")


@dataclass(frozen=True, eq=False, kw_only=True)
class PhaseGrid(Shown):
    """Every design point of one phase: rows x batch sizes, feasible or not.

    One-dimensional arrays have one entry per row (a mapping and its chunk size); two-dimensional
    ones have shape (rows, batches).
    """

    phase: str  # "prefill" or "decode"
    model: ModelSpec
    system: SystemSpec
    precision: str
    profile: str
    engine: str  # "" = the profile's own choice
    isl: float  # whole where lengths are constant, else the mean [token]
    osl: float  # the same; output tokens of a request count as this many [token]
    tp_attn: Ints
    dp_attn: Ints
    tp_ffn: Ints
    ep: Ints
    pp: Ints
    chunk_tokens: Ints  # 0 = unchunked [token]
    batch: Ints  # (batches,) requests of an instance [request]
    latency: Floats  # FTL (prefill) or TTL (decode) [s]
    request_rate: Floats  # of one instance at full rate [request/s]
    memory_bytes: Floats  # on the fullest GPU [B]
    memory_limit: float  # what a GPU may hold [B]
    microbatches: Ints  # (rows, batches) [1]
    status: NDArray[np.int8]  # (rows, batches) of ``Status``
    bound: NDArray[np.int8]  # (rows, batches) index into ``BOUNDS``
    kv_bytes_per_request: float  # cache of one prompt of ``isl`` tokens, each element once [B]
    unique_gpus: Ints  # (rows,) GPUs of an instance that hold distinct cache [1]
    inherited: bool = False  # whether any fit was made on another system
    cache_format: str = ""  # in which the KV cache is stored: "bf16", "fp8"

    @property
    def gpus(self) -> Ints:
        """GPUs of one instance of each row. [1]"""
        return self.tp_attn * self.dp_attn * self.pp

    @property
    def feasible(self) -> NDArray[np.bool_]:
        """(rows, batches): which points may be used."""
        return np.asarray(self.status == Status.OK)

    def mapping(self, row: int) -> Mapping:
        """The mapping of a row as a value object."""
        return Mapping(**{name: int(getattr(self, name)[row]) for name in MAPPING_COLUMNS})

    def instance(self, row: int, column: int) -> Instance:
        """The configuration at (row, column) as a value object."""
        return Instance(
            phase=self.phase,
            mapping=self.mapping(row),
            batch=int(self.batch[column]),
            latency_s=float(self.latency[row, column]),
            request_rate_per_s=float(self.request_rate[row, column]),
            memory_bytes=float(self.memory_bytes[row, column]),
            system=self.system.name,
            conditions=Conditions(
                model=self.model.name,
                precision=self.precision,
                profile=self.profile,
                engine=self.engine,
                isl=self.isl,
                osl=self.osl,
            ),
        )


def batch_sizes(largest: int) -> Ints:
    """Batches from 1 to at least ``largest``, four a doubling where integers allow. [request]

    Examples
    --------
    >>> batch_sizes(20).tolist()
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    """
    steps = np.arange(BATCHES_PER_DOUBLING) + BATCHES_PER_DOUBLING
    sizes = np.unique(np.concatenate([steps * 2**k // BATCHES_PER_DOUBLING for k in range(MAX_BATCH.bit_length())]))
    return sizes[: int(np.searchsorted(sizes, largest)) + 1].astype(np.int64)


def degree_columns(table: MappingTable) -> Degrees:
    """Degrees of every row as columns of shape (rows, 1), for grids. [1]"""
    columns = (table.tp_attn, table.dp_attn, table.tp_ffn, table.ep, table.pp)
    tp_attn, dp_attn, tp_ffn, ep, pp = (column[:, None].astype(float) for column in columns)
    return Degrees(tp_attn=tp_attn, dp_attn=dp_attn, tp_ffn=tp_ffn, ep=ep, pp=pp)


def batch_axis(
    model: ModelSpec | str,
    system: SystemSpec | str,
    mappings: MappingTable | Mapping | list[Mapping],
    *,
    phase: str,
    isl: int,
    osl: int = 2,
    precision: str,
    profile: str = "measured",
    engine: str | None = None,
) -> Ints:
    """Batch sizes from 1 to the memory limit of the most spacious mapping (physics page, section 4).

    Parameters
    ----------
    phase : {"prefill", "decode"}
        Whose memory counts.
    model, system, mappings, isl, osl, precision, profile, engine
        As in ``decode_grid``; ``osl`` without effect in prefill.

    Returns
    -------
    ndarray, shape (batches,)
        Rising, four a doubling. At least one batch, even when nothing fits, so that the shortfall can be
        told. [request]

    Raises
    ------
    InputError, UnknownNameError
        Values out of range, unknown names.
    """
    at = setup(model, system, precision, profile, engine)
    if phase not in PHASES:
        raise InputError(f"phase {phase!r} is not one of {', '.join(PHASES)}{nearest(phase, PHASES)}")
    check_lengths(at.model, isl, osl, allow_long_context=True)
    return batch_axis_at(at, mappings_for(at.model, at.system, mappings), phase=phase, isl=isl, osl=osl)


def batch_axis_at(at: Setup, mappings: MappingTable, *, phase: str, isl: int, osl: int) -> Ints:
    """As ``batch_axis``, for a setting and a table. [request]"""
    law = decode_residents(isl, osl) if phase == "decode" else prompt_residents(isl)
    return batch_axis_of(at, mappings, law, phase=phase)


def batch_axis_of(at: Setup, mappings: MappingTable, law: CachedTokens, *, phase: str) -> Ints:
    """As ``batch_axis``, where a request holds ``law`` tokens of cache. [request]"""
    doublings = 2.0 ** np.arange(MAX_BATCH.bit_length())[None, :]
    degrees = degree_columns(mappings)

    def fits(batch: Numeric) -> Any:
        if phase == "decode":
            memory = decode_bytes(at, degrees, batch, cached=law)
        else:
            chunk = np.where(degrees.pp > 1, min(CHUNK_TOKENS), 0)
            memory = prefill_bytes(at, degrees, batch, prompt=law, chunk_tokens=chunk)
        return np.any(memory <= at.memory_limit, axis=0)

    if not len(mappings):
        return batch_sizes(1)
    upper = doublings[0][fits(doublings)]
    if not upper.size:
        return batch_sizes(1)
    sizes = batch_sizes(int(upper[-1]) * 2)
    good = np.flatnonzero(fits(sizes[None, :].astype(float)))
    return sizes[: int(good[-1]) + 1]


def check_lengths(model: ModelSpec, isl: int, osl: int, *, allow_long_context: bool) -> None:
    """``InputError`` unless both lengths are whole, large enough and within the model's context."""
    whole_number("isl", isl)
    whole_number("osl", osl, 2, ": one output token is prefill only")
    model.check_context(isl, osl, allow_long=allow_long_context)


def decode_grid(
    model: ModelSpec | str,
    system: SystemSpec | str,
    mappings: MappingTable | Mapping | list[Mapping],
    *,
    isl: int,
    osl: int,
    precision: str,
    profile: str = "measured",
    engine: str | None = None,
    batch: Any = None,
    mla_form: str = "auto",
    allow_long_context: bool = False,
) -> PhaseGrid:
    """Score every decode configuration of ``mappings`` at every batch size (physics page, sections 2-8).

    Parameters
    ----------
    model, system
        A model and a system, their names, or the paths of their files.
    mappings
        From ``enumerate_mappings``, or made by hand.
    isl, osl
        Input and output length, from 1 and from 2. [token]
    precision, profile, engine
        Names of a recipe, a profile and, optionally, the engine whose fits come first.
    batch
        Batch sizes of an instance; by default four a doubling up to the memory limit. [request]
    mla_form
        "auto" (absorbed in decode) or a forced form.
    allow_long_context
        Score requests beyond the model's context limit instead of refusing them.

    Returns
    -------
    PhaseGrid
        Latency is the TTL [s]; arrays of shape (mappings, batches).

    Raises
    ------
    InputError, UnknownNameError
        Values out of range, mappings that the model cannot take, unknown names.
    """
    at = setup(model, system, precision, profile, engine)
    table = mappings_for(at.model, at.system, mappings)
    check_lengths(at.model, isl, osl, allow_long_context=allow_long_context)
    check_form(mla_form)
    sizes = batch_axis_at(at, table, phase="decode", isl=isl, osl=osl) if batch is None else given_sizes("batch", batch)
    axis = sizes[None, :].astype(float)
    shape = (len(table), sizes.size)
    ttl, memory = np.empty(shape), np.empty(shape)
    micro, bound = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int8)
    for rows in row_blocks(*shape):
        degrees = degree_columns(table[rows])
        step = decode_step(at, degrees, batch=axis, context=isl + osl / 2, mla_form=mla_form)
        ttl[rows] = step.ttl
        micro[rows] = step.microbatches
        bound[rows] = bound_codes(step.sums)
        memory[rows] = decode_bytes(at, degrees, axis, cached=decode_residents(isl, osl), mla_form=mla_form)
    rate = axis / (ttl * (osl - 1))
    return phase_grid(at, "decode", table, int(isl), int(osl), sizes, ttl, rate, memory, micro, bound)


def prefill_grid(
    model: ModelSpec | str,
    system: SystemSpec | str,
    mappings: MappingTable | Mapping | list[Mapping],
    *,
    isl: int,
    osl: int = 2,
    precision: str,
    profile: str = "measured",
    engine: str | None = None,
    batch: Any = None,
    chunk_tokens: Any = None,
    mla_form: str = "auto",
    allow_long_context: bool = False,
) -> PhaseGrid:
    """Score every prefill configuration: each mapping unchunked and, with a pipeline, at every CPP chunk size.

    Where MLA's form is free, chunked rows keep up-projected keys and values (``cached``) wherever that
    is faster and fits. Source: physics page, sections 2-8.

    Parameters
    ----------
    isl, osl
        Input and output length; ``osl`` counts towards the context limit only. [token]
    batch
        Prompts of a pass of an instance; by default four a doubling up to the memory limit. [request]
    chunk_tokens
        Chunk sizes of CPP to try beside 0 (unchunked), where pp > 1 and below ``isl``; by default
        ``CHUNK_TOKENS``. [token]
    model, system, mappings, precision, profile, engine, mla_form, allow_long_context
        As in ``decode_grid``; "auto" takes the fastest form of MLA that fits.

    Returns
    -------
    PhaseGrid
        Latency is the FTL [s]; arrays of shape (rows, batches), first all mappings unchunked.

    Raises
    ------
    InputError, UnknownNameError
        Values out of range, mappings that the model cannot take, unknown names.
    """
    at = setup(model, system, precision, profile, engine)
    table = mappings_for(at.model, at.system, mappings)
    check_lengths(at.model, isl, osl, allow_long_context=allow_long_context)
    check_form(mla_form)
    law = prompt_residents(isl)
    sizes = batch_axis_of(at, table, law, phase="prefill") if batch is None else given_sizes("batch", batch)
    table, chunks = with_chunks(table, isl, CHUNK_TOKENS if chunk_tokens is None else chunk_tokens)
    axis = sizes[None, :].astype(float)
    shape = (len(table), sizes.size)
    ftl, busy, memory = np.empty(shape), np.empty(shape), np.empty(shape)
    micro, bound = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int8)
    for rows in row_blocks(*shape, split=int(np.sum(chunks == 0))):
        degrees, chunk = degree_columns(table[rows]), chunks[rows, None].astype(float)
        prompts = np.ceil(axis / degrees.dp_attn)
        if chunk[0, 0]:
            scored = _score_chunked(at, degrees, axis, isl, chunk, mla_form)
            micro[rows] = np.ceil(isl / np.minimum(chunk, isl))
        else:
            scored = (
                prefill_pass(at, degrees, batch=axis, isl=isl, mla_form=mla_form),
                prefill_bytes(at, degrees, axis, prompt=prompt_residents(isl), chunk_tokens=chunk),
            )
            micro[rows] = np.minimum(degrees.pp, prompts)
        (ftl[rows], busy[rows], sums), memory[rows] = scored
        bound[rows] = bound_codes(sums)
    return phase_grid(at, "prefill", table, int(isl), int(osl), sizes, ftl, axis / busy, memory, micro, bound, chunks)


def _score_chunked(at: Setup, degrees: Degrees, axis: Any, isl: int, chunk: Any, form: str) -> tuple[PrefillPass, Any]:
    """CPP rows."""

    def score(each: str) -> tuple[PrefillPass, Any]:
        scored = chunked_prefill_pass(at, degrees, batch=axis, isl=isl, chunk_tokens=chunk, mla_form=each)
        held = prefill_bytes(at, degrees, axis, prompt=prompt_residents(isl), chunk_tokens=chunk, mla_form=each)
        return scored, held

    return best_form(at, form, score)


def best_form(at: Setup, form: str, score: Callable[[str], tuple[PrefillPass, Any]]) -> tuple[PrefillPass, Any]:
    """Passes and bytes of CPP as ``score`` gives them; a free MLA form becomes ``cached`` where faster and it fits."""
    best, memory = score(form)
    if form != "auto" or not at.model.is_mla:
        return best, memory
    scored, held = score("cached")
    take = (held <= at.memory_limit) & (scored.busy < best.busy)
    sums = Sums(*(np.where(take, new, old) for new, old in zip(scored.sums, best.sums, strict=True)))
    best = PrefillPass(np.where(take, scored.ftl, best.ftl), np.where(take, scored.busy, best.busy), sums)
    return best, np.where(take, held, memory)


def with_chunks(table: MappingTable, isl: float, chunk_tokens: Any) -> tuple[MappingTable, Ints]:
    """Rows of every (mapping, chunk size): all unchunked rows first, then the chunks of pipelines."""
    sizes = given_sizes("chunk_tokens", chunk_tokens, least=0) if np.size(chunk_tokens) else np.empty(0, dtype=np.int64)
    deep = np.flatnonzero(table.pp > 1)
    index, chunks = [np.arange(len(table))], [np.zeros(len(table), dtype=np.int64)]
    for size in sizes:
        if 0 < size < isl:
            index.append(deep)
            chunks.append(np.full(deep.size, size, dtype=np.int64))
    return table[np.concatenate(index)], np.concatenate(chunks)


def row_blocks(rows: int, columns: int, split: int | None = None) -> list[slice]:
    """Slices of rows of about ``BLOCK_POINTS`` points; none crosses ``split``."""
    step = max(1, BLOCK_POINTS // max(columns, 1))
    edges = [0, rows] if split is None else [0, split, rows]
    return [slice(i, min(i + step, end)) for start, end in pairwise(edges) for i in range(start, end, step)]


def bound_codes(sums: Sums) -> Any:
    """Index of the largest of the four sums (order of ``BOUNDS``)."""
    parts = np.broadcast_arrays(*sums)
    best, value = np.zeros(parts[0].shape, dtype=np.int8), parts[0]
    for code, part in enumerate(parts[1:], start=1):
        best = np.where(part > value, np.int8(code), best)
        value = np.maximum(value, part)
    return best


def given_sizes(name: str, values: Any, least: int = 1) -> Ints:
    """Distinct numbers of the argument ``name``, rising; ``InputError`` unless all are whole and from ``least`` up."""
    given = np.asarray(values, dtype=object).ravel().tolist()
    if not given:
        raise InputError(f"{name} is empty; allowed: one whole number or more")
    return np.array(sorted({whole_number(name, value, least) for value in given}), dtype=np.int64)


def phase_grid(
    at: Setup,
    phase: str,
    table: MappingTable,
    isl: float,
    osl: float,
    batch: Ints,
    latency: Floats,
    rate: Floats,
    memory: Floats,
    micro: Ints,
    bound: Any,
    chunks: Ints | None = None,
) -> PhaseGrid:
    """A grid of scored points: adds status, KV bytes and distinct GPUs; arguments as the fields of ``PhaseGrid``."""
    status = np.where(memory > at.memory_limit, Status.OUT_OF_MEMORY, Status.OK).astype(np.int8)
    shards = np.broadcast_to(unique_gpus(at.model, degree_columns(table)), (len(table), 1))[:, 0]
    return PhaseGrid(
        phase=phase,
        model=at.model,
        system=at.system,
        precision=at.precision.name,
        profile=at.profile.name,
        engine=at.engine,
        isl=isl,
        osl=osl,
        tp_attn=table.tp_attn,
        dp_attn=table.dp_attn,
        tp_ffn=table.tp_ffn,
        ep=table.ep,
        pp=table.pp,
        chunk_tokens=np.zeros(len(table), dtype=np.int64) if chunks is None else chunks,
        batch=batch,
        latency=latency,
        request_rate=rate,
        memory_bytes=memory,
        memory_limit=at.memory_limit,
        microbatches=micro,
        status=status,
        bound=bound,
        kv_bytes_per_request=kv_bytes_per_request(at.model, at.precision, isl),
        unique_gpus=shards.astype(np.int64),
        inherited=at.rates.inherited,
        cache_format=at.precision.cache.name,
    )
