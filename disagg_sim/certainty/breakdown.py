"""Take the latencies of designs apart: which operator takes how long, for what, and where its number comes from.

How a pass is a sum stands in ``certainty.passes``; how derivatives are taken in ``certainty.contributions``.

Past 400 lines: the frames of a breakdown share their private forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints
from disagg_sim.certainty.contributions import SCORES, Contribution, place_of_prompt
from disagg_sim.certainty.designs import Designs, Scores, scores_of, times_of
from disagg_sim.certainty.elasticity import CAPACITY, PARAMETERS, elasticities_of
from disagg_sim.certainty.extrapolation import SIZE_WORDS, breaches
from disagg_sim.certainty.passes import (
    LATENCIES,
    RESOURCES,
    OperatorTotals,
    Pass,
    Summand,
    batched_passes,
    spent_of,
    summands_of,
    weights_of,
)
from disagg_sim.certainty.rows import SHIPPED, Origin, design_of, designs_of
from disagg_sim.certainty.trust import Trust, labels_of, trust_of, trust_of_host
from disagg_sim.domain import SHARDING
from disagg_sim.errors import InputError
from disagg_sim.facts.provenance import place_of_fit, place_of_key
from disagg_sim.notebook import Shown
from disagg_sim.physics import attention, attention_parts, cost, experts, gemm
from disagg_sim.physics.cache_tiers import load_time
from disagg_sim.physics.memory import MemoryParts, instance_parts
from disagg_sim.physics.passes import engine_time
from disagg_sim.physics.residents import (
    colocated_load,
    decode_load,
    prefill_load,
    prefilling_in_passes,
    prefilling_in_pieces,
)
from disagg_sim.physics.setup import Setup
from disagg_sim.search.phase_grid import PhaseGrid

#: Kind of an operator -> function with its equation and the papers behind it.
EQUATIONS: dict[str, Callable[..., Any]] = {
    "gemm": gemm.gemm_cost,
    "prefill_attention": attention.prefill_attention_cost,
    "decode_attention": attention.decode_attention_cost,
    "attention_part": attention_parts.part_cost,
    "experts": experts.moe_cost,
    "elementwise": cost.kernel_cost,
    "copy": cost.kernel_cost,
    "all_reduce": cost.all_reduce_cost,
    "gather": cost.exchange_cost,
    "all_to_all": cost.all_to_all_cost,
    "hop": cost.hop_cost,
    "host": engine_time.step_time,
    "waiting": engine_time.slowest_stage,
}
#: Kinds that no fit covers, and the keys of a profile that they rest on.
_ASSUMED = {
    "elementwise": ("elementwise_efficiency", "elementwise_latency"),
    "copy": ("elementwise_efficiency",),
    "hop": ("p2p_latency_inside", "p2p_latency_across", "p2p_efficiency"),
    "host": ("host",),
    "all_to_all": ("nic_efficiency", "nic_latency"),
}
#: Kinds that the speed of light limits otherwise than by FLOP/s and bytes, and their number of the hardware.
_HARDWARE = {
    "elementwise": "hbm_bandwidth",
    "copy": "hbm_bandwidth",
    "decode_attention": "hbm_bandwidth",
    "all_reduce": "nvlink_bandwidth",
    "gather": "nvlink_bandwidth",
    "all_to_all": "nvlink_bandwidth",
    "hop": "nvlink_bandwidth",
}
#: Sizes from here on are told without decimals. [1]
WHOLE = 1000.0
#: Columns of ``Breakdown.operators`` that grow with the number of passes.
_EXTENSIVE = ["calls", "seconds", *(f"{name}_s" for name in RESOURCES), "ideal_s", "flops", "hbm_bytes"]
#: Columns of ``Breakdown.operators`` that tell parts of a latency apart.
_PARTS = ["row", "latency", "step", "operator", "kind", "form"]
#: Sizes beyond the range of a fit are told where the part takes this share of its time at such lengths. [1]
_OUTSIDE_FROM = 0.01
#: Place of what belongs to no pass, behind all passes. [1]
_LAST = 10**6
#: Columns of ``Breakdown.fits`` after ``row``.
FIT_COLUMNS = ["step", "operator", "trust", "engine", "version", "points", "median_error", "p90_error", "range"]
FIT_COLUMNS += ["inherited_from", "file", "line", "entry"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Breakdown(Shown):
    """Designs taken apart. Every frame has the column ``row``: the index of the design in ``points``."""

    #: The designs, one a row.
    points: pd.DataFrame
    #: Parts of TTL and FTL: ``row``, ``latency`` ("ttl", "ftl"), ``step`` (the kind of pass), ``operator``, ``kind``,
    #: ``calls`` [1], ``seconds``, ``share`` of the latency [1], ``compute_s`` ... ``waiting_s`` (``RESOURCES``, which
    #: add up to ``seconds``), ``ideal_s`` (the same part at the speed of light), ``flops``, ``hbm_bytes`` of one GPU,
    #: ``trust`` (``certainty.trust``: fitted, inherited, assumed; "" of waiting, which is time of the others),
    #: ``outside`` (sizes beyond the range of the fit, in words), ``source`` (file, line and entry of each number behind
    #: it, with semicolons between), ``equation``. Under a distribution of lengths parts are means over it, and
    #: ``outside`` tells the length at which most time is spent beyond the range, where that is a hundredth or more.
    operators: pd.DataFrame
    #: Fits behind the operators: ``row``, ``step``, ``operator``, ``trust``, ``engine``, ``version``, ``points`` [1],
    #: ``median_error``, ``p90_error`` [1], ``range`` in words, ``inherited_from``, ``file``, ``line``, ``entry``.
    fits: pd.DataFrame
    #: What fills the fullest GPU of an instance: ``row``, ``phase`` ("prefill", "decode" or "both"), ``part``,
    #: ``bytes``, ``share`` of ``limit_bytes`` [1], ``limit_bytes`` that an engine may fill; outside of it
    #: ``graphs_bytes`` of CUDA graphs and ``context_bytes`` in use beforehand, 0 where the engine's are not known.
    memory: pd.DataFrame
    #: What one percent more of a number of the hardware brings, in percent: ``row``, ``parameter``, ``ttl``, ``ftl``,
    #: ``throughput`` (with counts of instances that follow).
    elasticities: pd.DataFrame

    def latency(self, row: Any, name: str) -> pd.DataFrame:
        """Parts of one latency, "ttl" or "ftl", of the design of a row, the longest first."""
        mine: pd.DataFrame = self.operators[(self.operators["row"] == row) & (self.operators["latency"] == name)]
        return mine.sort_values("seconds", ascending=False, kind="stable", ignore_index=True)


def breakdown(
    points: pd.DataFrame | pd.Series | PhaseGrid, *, at: tuple[int, int] = (0, 0), origin: Origin = SHIPPED
) -> Breakdown:
    """Take TTL and FTL of designs apart by operator and resource, and name the equation and the fit behind each part.

    Parameters
    ----------
    points : DataFrame, Series or PhaseGrid
        A table of points, a frontier, or one row of it (``points.COLUMNS``), any modes and cases; or the grid of one
        phase.
    at : tuple of int
        Row and column of a grid; without effect on a table.
    origin : Origin
        What the rows were made with: systems of one's own, a distribution of lengths.

    Returns
    -------
    Breakdown
        Tidy frames ``operators``, ``fits``, ``memory``, ``elasticities``. The seconds of a latency add up to its
        column of ``points`` (``ttl_s``, ``ftl_s``) [s], the bytes of a phase to its memory [B].

    Raises
    ------
    InputError, UnknownNameError
        No rows, a column that the table lacks, an unknown mode or name, rows that their specs do not give.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> at, lengths = ds.setup("llama_3_1_70b", "h100_sxm", "fp8"), ds.lengths(4096, 512)
    >>> options = ds.Colocation(batch=(32,), prefill_batch=(1,))
    >>> points = ds.colocated(at, ds.Sharding(tp_attn=4, tp_ffn=4), lengths, options=options)
    >>> parts = ds.breakdown(points).latency(0, "ttl")
    >>> parts["operator"][0], f"{parts['seconds'].sum() / points['ttl_s'][0]:.9f}"
    ('gate, up', '1.000000000')
    """
    if isinstance(points, PhaseGrid):
        table, groups = _point(points, *at), iter([design_of(points, *at)])
    else:
        table = points.to_frame().T.infer_objects() if isinstance(points, pd.Series) else points
        groups = designs_of(table, origin)
    if not len(table):
        raise InputError("no points: a breakdown needs one or more")
    designs = list(groups)
    operators, fits, memory = _parts(table, designs, fits=True)
    elasticities = pd.concat([_elasticities(each) for each in designs], ignore_index=True)
    return Breakdown(
        points=table, operators=operators, fits=fits, memory=memory, elasticities=_labelled(elasticities, table)
    )


def parts_of(points: pd.DataFrame, *, origin: Origin = SHIPPED) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Take designs apart as ``breakdown`` does, without fits and elasticities, in less time."""
    operators, _, memory = _parts(points, list(designs_of(points, origin)), fits=False)
    return operators, memory


def _parts(
    table: pd.DataFrame, designs: Sequence[Designs], *, fits: bool
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Operators, the fits behind them where these are asked for, and memory of the designs of a table."""
    operators, of_fits = _latencies(designs, fits=fits)
    memory = pd.concat([frame for each in designs for frame in _memory(each)], ignore_index=True)
    return _labelled(operators, table), _labelled(of_fits, table), _labelled(memory, table)


def _labelled(frame: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Rows of a design together, places in the table as its labels."""
    whole = frame.sort_values("row", kind="stable", ignore_index=True)
    return whole.assign(row=table.index.take(whole["row"].to_numpy(dtype=np.int64)))


#: Columns of parts, by name: arrays of one length.
_Columns = dict[str, Any]


def _latencies(designs: Sequence[Designs], *, fits: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Parts of the passes in every latency, and the fits behind them; rows are places in the table."""
    times = [times_of(each) for each in designs]
    scores = [scores_of(each, own) for each, own in zip(designs, times, strict=True)]
    found: list[_Columns] = []
    of_fits: list[pd.DataFrame] = []
    known: set[tuple[Any, ...]] = set()
    for unit, one, light in batched_passes(designs):
        members = [(member, designs[member.place], scores[member.place]) for member in unit.members]
        rows = np.concatenate([own.rows for _, own, _ in members])
        orders = [[place_of_prompt(own.prompts, member.prompt)] * own.rows.size for member, own, _ in members]
        common = {"row": rows, "order": np.concatenate(orders)}
        weights = [weights_of(member, own, times[member.place]) for member, own, _ in members]
        counted = {
            name: (
                np.concatenate([weight[name] for weight in weights]),
                np.concatenate([getattr(score, name) + np.zeros(own.rows.size) for _, own, score in members]),
            )
            for name in LATENCIES
        }
        ideal = {each.key: each.seconds for each in summands_of(light)}
        summands = summands_of(one)
        spent = spent_of(summands, one)
        for each in summands:
            bound = ideal.get(each.key, 0.0)
            if each.key[1] == "waiting":  # unlike stages may differ more at the speed of light, where a wait is none
                bound = np.minimum(bound, each.seconds)
            columns = common | _columns(each, one, spent.get(each.key)) | {"ideal_s": bound}
            for latency, (weight, whole) in counted.items():  # the part, as often as a latency holds such passes
                if np.any(weight):
                    part = columns | {"latency": latency} | {name: columns[name] * weight for name in _EXTENSIVE}
                    found.append(part | {"share": part["seconds"] / whole})
            if fits:
                timed = rows[np.flatnonzero(each.seconds)].tolist()
                new = [row for row in dict.fromkeys(timed) if (one.name, *each.key, row) not in known]
                known |= {(one.name, *each.key, row) for row in new}
                of_fits.append(_fit_rows(each, one, np.array(new, dtype=np.int64)))
    for mine, taken, score in zip(designs, times, scores, strict=True):
        if np.any(taken.load):
            found.append(_loads(mine, taken.load + np.zeros(mine.rows.size), score))
    mixes = [row for mine in designs if len(mine.prompts) > 1 for row in mine.rows.tolist()]
    nothing = pd.DataFrame(columns=["row", *FIT_COLUMNS])
    return _framed(found, mixes), pd.concat(of_fits, ignore_index=True) if of_fits else nothing


def _framed(found: Sequence[_Columns], mixes: Sequence[int]) -> pd.DataFrame:
    """Columns below one another; parts of ``mixes``, rows with prompts of several lengths, added up over them."""
    columns: dict[str, list[Any]] = {name: [] for name in found[0]}
    for each in found:
        for name, values in each.items():
            whole = np.asarray(values, dtype=object) if isinstance(values, str) else values
            columns[name].append(np.broadcast_to(whole, len(each["row"])))
    table = pd.DataFrame({name: np.concatenate(parts) for name, parts in columns.items()})
    table = table[table["seconds"] != 0.0].sort_values(["row", "order"], kind="stable", ignore_index=True)
    table = table.drop(columns="order")
    several = table["row"].isin(mixes)
    if several.any():
        table = pd.concat([table[~several], _over_prompts(table[several])], ignore_index=True)
    return table.drop(columns="form")


def _loads(designs: Designs, seconds: Floats, scores: Scores) -> _Columns:
    """What FTL waits for cached pasts from below HBM, as columns of ``Breakdown.operators``."""
    columns: _Columns = {"row": designs.rows, "order": _LAST, "latency": "ftl", "step": "prefill pass"}
    columns |= {"operator": "load of the past", "kind": "waiting", "form": "", "calls": 1.0}
    columns |= {"seconds": seconds, "share": seconds / scores.ftl}
    columns |= {f"{resource}_s": seconds * (resource == "waiting") for resource in RESOURCES}
    columns |= {"ideal_s": seconds, "flops": 0.0, "hbm_bytes": 0.0, "trust": str(Trust.ASSUMED), "outside": ""}
    columns["source"] = str(place_of_key("hardware", designs.prefill_at.system.name, "kv_tiers"))
    return columns | {"equation": f"{load_time.__module__}.{load_time.__name__}"}


def _over_prompts(parts: pd.DataFrame) -> pd.DataFrame:
    """Add up the parts over prompts of all lengths."""
    grouped = parts.groupby(_PARTS, sort=False, observed=True)
    added = grouped[[*_EXTENSIVE, "share"]].sum()
    beyond = parts[parts["outside"] != ""]
    most = parts.loc[beyond.groupby(_PARTS, sort=False)["seconds"].idxmax()].set_index(_PARTS)["outside"]
    enough = beyond.groupby(_PARTS, sort=False)["seconds"].sum() >= _OUTSIDE_FROM * added["seconds"].reindex(most.index)
    words = grouped[["trust", "source", "equation"]].first().assign(outside=most[enough.reindex(most.index)])
    whole = added.join(words.fillna({"outside": ""})).reset_index()
    return whole[list(parts.columns)]


def _point(grid: PhaseGrid, row: int, column: int) -> pd.DataFrame:
    """A design point of a grid as a row of a table."""
    rows, columns = grid.latency.shape
    if not (0 <= row < rows and 0 <= column < columns):
        raise InputError(f"at {(row, column)}: the grid has {rows} rows and {columns} columns")
    setup, mapping, phase = grid.setup, grid.mappings[row], grid.phase
    values: dict[str, Any] = {"model": setup.model.name, "system": setup.system.name, "mode": phase}
    values |= {"precision": setup.precision.name, "profile": setup.profile.name, "engine": setup.engine}
    values |= {"isl": grid.lengths.mean_isl, "osl": grid.lengths.mean_osl}
    values["ftl_s" if phase == "prefill" else "ttl_s"] = grid.latency[row, column]
    values |= {f"{phase}_{name}": getattr(mapping, name) for name in SHARDING}
    if grid.drafts[row, column]:
        values["decode_draft_tokens"] = grid.drafts[row, column]
    values |= {f"{phase}_batch": grid.batch[column], f"{phase}_memory_bytes": grid.memory_bytes[row, column]}
    return pd.DataFrame([values | {"prefill_chunk_tokens": mapping.chunk_tokens}])


def _columns(each: Summand, one: Pass, spent: OperatorTotals | None) -> _Columns:
    """A part of a pass of every design, as columns of ``Breakdown.operators`` but for the latency that it serves."""
    name, kind, form = each.key
    nothing = np.zeros(one.rows)
    if spent is None:
        spent = OperatorTotals({"host" if kind == "host" else "waiting": each.seconds}, nothing + 1.0, nothing, nothing)
    by = dict.fromkeys(RESOURCES, nothing) | spent.by
    equation = EQUATIONS[kind]
    columns: _Columns = {"latency": "", "step": one.name, "operator": name, "kind": kind, "form": form}
    columns |= {"calls": spent.calls, "seconds": each.seconds, "share": nothing}
    columns |= {f"{resource}_s": by[resource] for resource in RESOURCES}
    columns |= {"ideal_s": nothing, "flops": spent.flops, "hbm_bytes": spent.hbm_bytes}
    columns |= {"trust": _trust(each, one), "outside": _outside(each.operator[0]) if each.operator else ""}
    return columns | {"source": _source(each, one), "equation": f"{equation.__module__}.{equation.__name__}"}


def _outside(operator: Contribution) -> Any:
    """Ends of ranges that an operator passes, in words, row by row."""
    told: list[list[str]] = [[] for _ in range(operator.rows)]
    for breach in breaches(operator):
        size, side = SIZE_WORDS.get(breach.size, breach.size), "above" if breach.above else "below"
        for row in np.flatnonzero(breach.where):
            told[row].append(f"{size} {_counted(breach.value[row])} {side} {_counted(breach.end)}")
    return np.array(["; ".join(each) for each in told], dtype=object)


def _counted(value: float) -> str:
    return f"{value:,.0f}" if value >= WHOLE else f"{value:.4g}"


def _source(each: Summand, one: Pass) -> str:
    """File, line and entry of the numbers that a part rests on, the engine's last, with semicolons between."""
    profile, kind = one.at.profile, each.key[1]
    if each.operator and each.operator[0].fits:
        engine = [str(place_of_key("engine", one.at.engine, key)) for key in _engine_keys(each, one)]
        return "; ".join([str(place_of_fit(each.operator[0].fits[0], one.at.system.name)), *engine])
    if each.operator and not profile.fitted:
        return str(place_of_key("hardware", one.at.system.name, _HARDWARE.get(kind, "peak_flops")))
    if kind == "host" and one.at.overheads is not None:
        return "; ".join(str(place_of_key("engine", one.at.engine, key)) for key in _engine_keys(each, one))
    keys = _ASSUMED.get(kind, ())
    return str(place_of_key("profile", profile.name, keys[0])) if keys else ""


def _trust(each: Summand, one: Pass) -> Any:
    """Label of a part, or labels, (rows,)."""
    if each.operator:
        return labels_of(each.operator[0])
    if each.key[1] == "host":
        return str(trust_of_host(one.designs.at if one.phase == "decode" else one.designs.prefill_at))
    return ""


def _engine_keys(each: Summand, one: Pass) -> list[str]:
    """Numbers of the engine profile that a part takes beside its kernels."""
    engine = (one.designs.at if one.phase == "decode" else one.designs.prefill_at).overheads
    kind = each.key[1]
    if engine is None:
        return []
    prefills = one.phase == "prefill"  # mixed steps are
    if kind == "host":
        used = ["step_host", "rank_host", "sequence_host"] if one.phase == "decode" else ["step_host", "rank_host"]
        return [key for key in used if getattr(engine, key)] + (["kernel_launch"] if prefills else [])
    stretches = kind == "all_to_all" and one.phase == "decode"
    waits = each.key[:2] == ("all-gather", "gather") and one.phase == "decode"  # for expert TP
    keys = ["exchange_stretch"] if stretches and engine.exchange_stretch != 1.0 else []
    keys += ["exchange_wait"] if waits and engine.exchange_wait else []
    scores = kind in SCORES
    return keys + (["prefill_stretch"] if prefills and not scores and engine.prefill_stretch != 1.0 else [])


def _fit_rows(each: Summand, one: Pass, places: Ints) -> pd.DataFrame:
    """Fits behind an operator of some designs, as rows of ``Breakdown.fits``."""
    rows: list[dict[str, Any]] = []
    for fit in each.operator[0].fits if each.operator else ():
        place = place_of_fit(fit, one.at.system.name)
        told = {"step": one.name, "operator": each.key[0], "trust": str(trust_of([fit]))}
        told["range"] = ", ".join(f"{size} {low:g} to {high:g}" for size, low, high in fit.valid)
        rows.append({name: getattr(fit, name, getattr(place, name, None)) for name in FIT_COLUMNS} | told)
    found = pd.DataFrame(rows * len(places), columns=FIT_COLUMNS)
    found.insert(0, "row", places.repeat(len(rows)))
    return found


def _memory(designs: Designs) -> Iterator[pd.DataFrame]:
    """What fills the fullest GPU of every instance, as rows of ``Breakdown.memory``."""
    cached, prompt = designs.lengths.resident, designs.lengths.prompt
    at, prefill_at, chunk = designs.at, designs.prefill_at, designs.chunk_tokens
    kept = designs.form if chunk[0] or designs.mode == "piggyback" else "auto"  # whole prompts leave nothing to keep
    mapping, prefill_mapping = designs.mapping, designs.prefill_mapping
    if not designs.shared and "prefill" in designs.phases:
        residents = prefill_load(
            prefill_at, prefill_mapping, designs.prefill_batch, prompt=prompt, chunk_tokens=chunk, mla_form=kept
        )
        filled = instance_parts(prefill_at, prefill_mapping, residents, prefill_at.profile.prefill_imbalance)
        yield _memory_rows("prefill", filled, prefill_at, designs.rows)
    if not designs.shared and "decode" in designs.phases:
        residents = decode_load(at, mapping, designs.batch, cached=cached)
        filled = instance_parts(at, mapping, residents, at.profile.decode_imbalance)
        yield _memory_rows("decode", filled, at, designs.rows)
    if not designs.shared:
        return
    beside = designs.mapping, designs.prefill_batch, prompt
    if designs.mode == "piggyback":
        prefilling = prefilling_in_pieces(*beside, designs.mixed_chunk, designs.batch)
    else:
        prefilling = prefilling_in_passes(*beside, chunk, at.profile.resident_deviations)
    residents = colocated_load(at, designs.mapping, designs.batch, cached=cached, prefilling=prefilling, mla_form=kept)
    filled = instance_parts(at, designs.mapping, residents, at.profile.prefill_imbalance)
    yield _memory_rows("both", filled, at, designs.rows)


def _memory_rows(phase: str, filled: MemoryParts, at: Setup, places: Ints) -> pd.DataFrame:
    frames = [
        pd.DataFrame({"row": places, "phase": phase, "part": name, "bytes": held + np.zeros(places.size)})
        for name, held in filled._asdict().items()
    ]
    whole = pd.concat(frames, ignore_index=True)
    share, server = whole["bytes"] / at.memory_limit, at.server_memory
    graphs, context = (server.graphs, server.context) if server else (0.0, 0.0)
    return whole.assign(share=share, limit_bytes=at.memory_limit, graphs_bytes=graphs, context_bytes=context)


def _elasticities(designs: Designs) -> pd.DataFrame:
    """Elasticities to every number of the hardware, as rows of ``Breakdown.elasticities``."""
    frames = [
        pd.DataFrame({"row": designs.rows, "parameter": parameter, **elasticities_of(designs, parameter)._asdict()})
        for parameter in PARAMETERS
        if parameter != CAPACITY
    ]
    return pd.concat(frames, ignore_index=True)
