"""Read the designs of a table of points, or of a grid, from its rows.

A row names its design completely: mappings, batches, chunks, instance counts. ``designs_of`` reads it; timed again
under the settings that the rows were made under (``rescore``) the result is the row's own numbers. A row holds the
means of its lengths; a sweep's column ``traffic`` names their distribution, or ``Origin.lengths`` gives it.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints
from disagg_sim.certainty.designs import MODES, Designs, scores_of, timed_prompts, times_of
from disagg_sim.choices import EVEN_RANKS
from disagg_sim.domain import DEGREES, SHARDING, Sharding
from disagg_sim.errors import InputError, check_word, nearest, quoted, whole_number
from disagg_sim.facts.engine import EngineSpec
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import is_own_file, load_speculation, load_system
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.speculation import Speculation
from disagg_sim.physics.blocks import MLA_FORMS, forms_of
from disagg_sim.physics.setup import Setup, engine_names, setup
from disagg_sim.question import TECHNIQUES
from disagg_sim.search.axes import undrafted
from disagg_sim.search.phase_grid import CHOSEN_FORMS, PhaseGrid
from disagg_sim.serving.points import CASE_COLUMNS, NO_SPECULATION, THROUGHPUT, with_unsaid
from disagg_sim.workload.lengths import Lengths, lengths_at, uneven, with_cached
from disagg_sim.workload.named import constant_named, lengths_named, parted, ranks_parted

#: Relative difference up to which two times are the same: tables are written with ten digits. [1]
SAME = 1e-7
#: Columns of numbers that name a design, those from 1 on first.
_FROM_ONE = tuple(
    f"{side}_{name}" for side in ("prefill", "decode") for name in (*DEGREES, "dcp", "pcp", "batch", "gpus")
)
_NUMBERS = (
    *(f"{side}_redundant_slots" for side in ("prefill", "decode")),
    *("decode_draft_tokens", "hold_steps"),
    *(*_FROM_ONE, "isl", "osl", "prefill_chunk_tokens", "prefill_instances", "decode_instances", "total_gpus"),
    *("ftl_s", "ttl_s", "ttl_mean_s", "mixed_chunk_tokens", "mixed_step_share", THROUGHPUT, "request_rate_per_s"),
    *("prefill_request_rate_per_s", "decode_request_rate_per_s"),
)
#: Columns of a sweep's frontier that say what its rows assume beside their specs; all rows of a case agree.
ASSUMED = ("nvlink_domain", "traffic", TECHNIQUES)
#: Columns beside the system that name the setup of a pool.
_OF_SIDE = ("precision", "profile", "engine")
#: Columns of a row that stay the same in every row of ``Designs``.
_SHARED = (*(name for name in CASE_COLUMNS if name != "matching"), "prefill_mla_form")
#: Columns that ``designs_of`` looks at, and ``case``, which parts what is said of rows.
READ = frozenset((*_SHARED, *_NUMBERS, *ASSUMED, "case"))


@dataclass(frozen=True, eq=False, kw_only=True)
class Origin:
    """What the rows of a table were made with, where its columns do not say.

    Parameters
    ----------
    systems, models, engines : mapping
        Systems, models and engines by name, in place of the shipped ones.
    lengths : Lengths, or mapping of str to Lengths, optional
        Of the requests, where they follow a distribution that the column ``traffic`` does not name; or by what that
        column says.
    ftl_quantile : float, optional
        Share of the prompts whose FTL is at most that of the rows, as in ``prefill_grid``; None = the mean. [1]
    exact : bool
        Whether the rows must be what their specs give.
    """

    systems: abc.Mapping[str, SystemSpec] = field(default_factory=dict)
    models: abc.Mapping[str, ModelSpec] = field(default_factory=dict)
    engines: abc.Mapping[str, EngineSpec] = field(default_factory=dict)
    lengths: Lengths | abc.Mapping[str, Lengths] | None = None
    ftl_quantile: float | None = None
    exact: bool = True


#: Made of shipped specs, at the lengths that the rows name.
SHIPPED = Origin()


def rescore(
    points: pd.DataFrame, change: Callable[[Setup], Setup] | None = None, *, origin: Origin = SHIPPED
) -> pd.DataFrame:
    """Latencies and throughput of the designs of a table, under changed settings.

    Parameters
    ----------
    points : DataFrame
        A table of points or a frontier (``points.COLUMNS``), any modes and cases.
    change : callable, optional
        From the setting of a row (``physics.setup.Setup``: model, system, rates) to the one to time it under; by
        default nothing changes and the result equals the row's own numbers.
    origin : Origin
        What the rows were made with: systems of one's own, a distribution of lengths.

    Returns
    -------
    DataFrame
        Index of ``points``; ``tokens_per_s_per_user``, ``tokens_per_s_per_gpu`` [token/s], ``ftl_s``, ``ttl_s`` [s].

    Raises
    ------
    InputError, UnknownNameError
        A column that the table lacks, an unknown mode or name, rows that their settings do not give.

    Examples
    --------
    A table made in a notebook holds the means of its lengths, so their distribution is given again:

    >>> import disagg_sim as ds
    >>> at, chat = ds.setup("llama_3_1_8b", "h100_sxm", "fp8"), ds.lengths("log_normal_4096_512")
    >>> points = ds.colocated(at, ds.Sharding(), chat, options=ds.Colocation(batch=(8,), prefill_batch=(1,)))
    >>> again = rescore(points, origin=Origin(lengths=chat))
    >>> f"{again['ttl_s'][0] / points['ttl_s'][0]:.9f}"
    '1.000000000'
    """
    result = {name: np.empty(len(points)) for name in ("ftl", "ttl", "throughput")}
    for designs in designs_of(points, origin):
        at, prefill_at = (each if change is None else change(each) for each in (designs.at, designs.prefill_at))
        changed = designs.under(decode=at, prefill=prefill_at)
        found = scores_of(changed, times_of(changed))
        for name, values in result.items():
            values[designs.rows] = getattr(found, name)
    columns = {
        "tokens_per_s_per_user": 1.0 / result["ttl"],
        "tokens_per_s_per_gpu": result["throughput"],
        "ftl_s": result["ftl"],
        "ttl_s": result["ttl"],
    }
    return pd.DataFrame(columns, index=points.index)


def designs_of(points: pd.DataFrame, origin: Origin = SHIPPED) -> Iterator[Designs]:
    """Read the designs of a table, those that are timed in one go together; errors as in ``rescore``."""
    points = with_unsaid(points)
    if "speculation" not in points:
        points = points.assign(speculation=NO_SPECULATION)
    missing = next((name for name in (*_SHARED, *_NUMBERS) if name not in points), None)
    if missing is not None:
        raise InputError(f"the table has no column {missing!r}{nearest(missing, map(str, points))}")
    columns = {name: numbers(points, name) for name in _NUMBERS}
    for name, values in columns.items():
        if not (values >= (1.0 if name in _FROM_ONE else 0.0)).all():
            raise InputError(f"the table's column {name!r} has a value below 1")
    shared = {key: points[key] for key in (*_SHARED, *(name for name in ASSUMED if name in points))}
    groups = rows_alike(list(shared.values()), np.arange(len(points)))
    firsts = {key: column.iloc[[rows[0] for rows in groups]].tolist() for key, column in shared.items()}
    known: dict[tuple[object, ...], Setup] = {}
    for number, rows in enumerate(groups):
        words = {key: of_each[number] for key, of_each in firsts.items()}
        mode = str(words["mode"])
        check_word("mode", mode, MODES)
        _require_names(words, origin)
        sides = []
        for side, system in zip(("", "prefill_"), _systems(words, origin.systems), strict=True):
            own = [str(words[name]) for name in ("model", *(f"{side}{name}" for name in _OF_SIDE), "speculation")]
            own.append(str(words.get(TECHNIQUES, "")))
            place = system.name, system.nvlink_domain, *own
            if place not in known:
                model, precision, profile, engine, _, techniques = own
                drafter = _speculation(words["speculation"])
                own_engine = origin.engines.get(engine) or _engine(engine)
                names = origin.models.get(model, model), system, precision, profile, own_engine
                known[place] = setup(*names, drafter, techniques)
            sides.append(known[place])
        lengths = _lengths(words, origin).at_checkpoints(sides[1])
        chunks, drafts = columns["prefill_chunk_tokens"], columns["decode_draft_tokens"] > 0
        for alike in rows_alike([drafts, chunks > 0 if lengths.constant else chunks], rows):
            drafted = bool(drafts[alike[0]])
            pair = sides if drafted else [undrafted(sides[0]), sides[1] if mode == MODES[0] else undrafted(sides[1])]
            designs = _read(alike, columns, words, pair, lengths)
            designs = designs.of_prompts(*timed_prompts(designs, origin.ftl_quantile))
            if origin.exact:
                _check(designs, points)
            yield designs


def rows_alike(columns: Sequence[Any], rows: Ints) -> list[Ints]:
    """Rows of a table in groups in which every column has one value, in order of first appearance."""
    group = np.zeros(rows.size, dtype=np.int64)
    for column in columns:
        code, values = pd.factorize(column, use_na_sentinel=False)
        if len(values) > 1:
            group = np.unique(group * len(values) + code[rows], return_inverse=True)[1]
    group = pd.factorize(group)[0]
    return np.split(rows[np.argsort(group, kind="stable")], np.cumsum(np.bincount(group))[:-1])


def _require_names(words: abc.Mapping[str, Any], origin: Origin) -> None:
    """``InputError`` where a word that names a spec is none: what a table of others says opens no file."""
    own = {*origin.models, *origin.systems}
    sides = (f"{side}{name}" for side in ("", "prefill_") for name in ("system", *_OF_SIDE))
    for column in ("model", "speculation", *sides):
        text = str(words[column])
        for word in (text, *text.split()):
            if word not in own and is_own_file(word):
                raise InputError(f"the table's column {column!r} has {quoted(word)}, which is no name")


def _lengths(words: abc.Mapping[str, Any], origin: Origin) -> Lengths:
    """Lengths of rows: given, or of the traffic that they name, else their constant ones."""
    isl, osl, name = float(words["isl"]), float(words["osl"]), words.get("traffic")
    plain, rank_imbalance = ranks_parted(name) if isinstance(name, str) else ("0/0", EVEN_RANKS)
    traffic, reuse = parted(plain)
    given = origin.lengths.get(str(name)) if isinstance(origin.lengths, abc.Mapping) else origin.lengths
    if given is None and constant_named(traffic):  # a sweep writes constant lengths as ISL/OSL
        same = lengths_at(isl, osl) if reuse is None else with_cached(lengths_at(isl, osl), reuse)
        return uneven(same, rank_imbalance)
    found = lengths_named(str(name)) if given is None else given
    if (round(found.mean_isl), round(found.mean_osl)) != (round(isl), round(osl)):
        raise InputError(
            f"the table has rows of isl {isl:g} and osl {osl:g}; the means of the lengths "
            f"{f'of traffic {name}' if given is None else 'that were given'} are "
            f"{found.mean_isl:.0f} and {found.mean_osl:.0f}"
        )
    return found


def _systems(words: abc.Mapping[str, Any], given: abc.Mapping[str, SystemSpec]) -> list[SystemSpec]:
    """Systems of decode and prefill, with the NVLink domain of the rows where a table has that of decode."""
    names = str(words["system"]), str(words["prefill_system"])
    specs = [given.get(name) or load_system(name) for name in names]
    domain = whole_number("the table's nvlink_domain", words.get("nvlink_domain", specs[0].nvlink_domain))
    return specs if domain == specs[0].nvlink_domain else [replace(spec, nvlink_domain=domain) for spec in specs]


def _speculation(word: object) -> Speculation | None:
    """Speculation of a table; an empty cell means none, too."""
    return load_speculation(word) if isinstance(word, str) and word != NO_SPECULATION else None


def _engine(word: str) -> str | None:
    """Engine of a table; a word that is none means the system's own."""
    return word if word in engine_names() else None


def _read(
    rows: Ints, columns: abc.Mapping[str, Floats], words: dict[str, Any], sides: list[Setup], lengths: Lengths
) -> Designs:
    def column(name: str) -> Floats:
        return columns[name][rows]

    degrees: dict[str, dict[str, Any]] = {
        side: {name: column(f"{side}_{name}") for name in SHARDING} for side in ("decode", "prefill")
    }
    degrees["decode"]["draft_tokens"] = column("decode_draft_tokens")
    if words["mode"] != MODES[0]:
        degrees["prefill"]["draft_tokens"] = column("decode_draft_tokens")
    rounding = np.ones(rows.size)  # what whole instances leave of the rate P*R/(P+R), P and R being rates per GPU [1]
    if words["mode"] == MODES[0]:
        needed = sum(column(f"{side}_gpus") / column(f"{side}_request_rate_per_s") for side in degrees)
        rounding = np.asarray(column("request_rate_per_s") / column("total_gpus") * needed)
    return Designs(
        mode=str(words["mode"]),
        lengths=lengths,
        at=sides[0],
        prefill_at=sides[1],
        rows=rows,
        mapping=Sharding(**degrees["decode"]),
        prefill_mapping=Sharding(**degrees["prefill"]),
        batch=column("decode_batch"),
        prefill_batch=column("prefill_batch"),
        chunk_tokens=column("prefill_chunk_tokens"),
        instances=column("decode_instances"),
        prefill_instances=column("prefill_instances"),
        total_gpus=column("total_gpus"),
        mixed_chunk=column("mixed_chunk_tokens"),
        mixed_share=column("mixed_step_share"),
        hold_steps=column("hold_steps"),
        rounding=rounding,
        by_gap=column("ttl_s") > column("ttl_mean_s"),
        by_tpot=column("ttl_s") < column("ttl_mean_s"),
        form=_form(str(words["prefill_mla_form"])),
    )


def numbers(table: pd.DataFrame, name: str) -> Floats:
    """A column as finite numbers, none below 0, (rows,); ``InputError`` where it holds anything else."""
    try:
        values = table[name].to_numpy(dtype=float)
    except (KeyError, TypeError, ValueError):
        raise InputError(f"the table's column {name!r} is missing or not all numbers") from None
    if not (np.isfinite(values) & (values >= 0)).all():
        raise InputError(f"the table's column {name!r} has a value that is empty, infinite or below 0")
    return np.asarray(values)


def _form(word: str) -> str:
    """Form of MLA that a row was timed in; the word is not one of ``MLA_FORMS`` where the model has no MLA."""
    return word if word in MLA_FORMS else "auto"


def _check(designs: Designs, points: pd.DataFrame) -> None:
    """``InputError`` unless the rows are what their settings give."""
    found = scores_of(designs, times_of(designs))
    for name, values in (("ftl_s", found.ftl), ("ttl_s", found.ttl), (THROUGHPUT, found.throughput)):
        own = points[name].to_numpy(dtype=float)[designs.rows]
        wrong = np.flatnonzero(~(np.abs(values / own - 1.0) <= SAME))
        if wrong.size:
            row = wrong[0]
            raise InputError(
                f"row {points.index[designs.rows[row]]} of the table: its settings give {name} {values[row]:.6g}, the "
                f"table says {own[row]:.6g}: made under other specs or fits, or under a distribution "
                "of lengths that neither the table nor the caller names"
            )


def design_of(grid: PhaseGrid, row: int, column: int) -> Designs:
    """Read one design point of a grid of one phase."""
    (one,) = designs_at_points(grid, np.array([row]), np.array([column]))
    return one


def designs_at_points(grid: PhaseGrid, rows: Ints, columns: Ints) -> Iterator[Designs]:
    """Read design points of a grid of one phase, those together that share form, drafter and kind of chunks."""
    mapping, chunks = grid.chosen(rows, columns), grid.mappings.chunk_tokens[rows]
    free = len(forms_of(grid.setup.model)) > 1
    forms = grid.mla_form[rows, columns] if free else np.zeros(len(rows), dtype=np.int8)
    drafted = (mapping.draft_tokens > 0) | (grid.phase == "prefill")
    batches = grid.batch[columns].astype(np.float64)
    kinds = [forms, drafted, chunks > 0 if grid.lengths.constant else chunks]
    for some in rows_alike(kinds, np.arange(len(rows))):
        at = grid.setup if drafted[some[0]] else undrafted(grid.setup)
        one, none, own, batch = np.ones(len(some)), np.zeros(len(some)), mapping[some], batches[some]
        designs = Designs(
            mode=grid.phase,
            lengths=grid.lengths,
            at=at,
            prefill_at=at,
            rows=some,
            mapping=own,
            prefill_mapping=own,
            batch=batch,
            prefill_batch=batch,
            chunk_tokens=chunks[some].astype(float),
            instances=one,
            prefill_instances=one,
            total_gpus=own.gpus,
            mixed_chunk=none,
            mixed_share=none,
            hold_steps=none,
            rounding=one,
            by_gap=np.zeros(len(some), dtype=bool),
            by_tpot=np.zeros(len(some), dtype=bool),
            form=CHOSEN_FORMS[forms[some[0]]] if free else "auto",
        )
        yield designs.of_prompts(*timed_prompts(designs, grid.ftl_quantile)) if grid.phase == "prefill" else designs
