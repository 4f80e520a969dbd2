"""Simulate the missing runs of a scenario, then write its tables.

Past 400 lines: a run, a search for a capacity and the tables of both share what tells runs apart.

Requests of a run may leave it in pieces: files as they go, and one table at the end.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.atomic import no_link, write_csv, write_text, written
from disagg_sim.errors import DisaggSimError, PolicyError, StoreError
from disagg_sim.parquet import write_parquet
from disagg_sim.reading import read_file
from disagg_sim.scenario.options import load_policies
from disagg_sim.scenario.plan import DECISIONS, REQUESTS, RUNS, SAMPLES, TABLES, Run, ScenarioPlan
from disagg_sim.simulation.capacity import attains, p99_inside, serving_capacity
from disagg_sim.simulation.kernel.compiled import COMPILING, code_home, on_compilation
from disagg_sim.simulation.metrics import (
    CLASS_COLUMNS,
    COLUMNS,
    MEASURED,
    MODEL_COLUMNS,
    Summary,
    by_class,
    by_model,
    limits_of,
    summary,
    tier_use,
    with_class,
)
from disagg_sim.simulation.options import FULL, MOST_SAMPLES, NONE, STREAM
from disagg_sim.simulation.pieces import PIECE
from disagg_sim.simulation.records import EncodeUse, Requests, RunResult, frame_of
from disagg_sim.simulation.run import run as simulate
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.backends.workers import ATTEMPTS, Workers
from disagg_sim.sweep.store import PIECES, BlockState, Key, Own, RunListener, Store, missing, opened
from disagg_sim.units import HOUR
from disagg_sim.workload.stream import in_memory

#: Samples of a run whose scenario does not say how often [1], at least so far apart [s].
SAMPLED, LEAST_SAMPLE_S = 200, 0.1
#: What tells the runs of a scenario apart, in every table.
NAMES = ("policy", "deployment", "trace", "rate_scale")
DECISION_COLUMNS = ("tick_s", "kind", "instance", "wish", "reason")
#: Columns of the blocks of runs and searches: those that do not depend on the machine.
STORED = tuple(name for name in COLUMNS if name not in MEASURED)
CAPACITY_COLUMNS = (
    "policy",
    "deployment",
    "trace",
    "criterion",
    "rate_scale",
    "requests_per_s",
    "requests_per_s_per_gpu",
    "above_rate_scale",
    "met_again_rate_scale",
    "runs",
    "note",
)
TIER_COLUMNS = ("tier", "tokens", "share", "bytes", "bytes_per_s")
LOG = "timing.jsonl"

#: Place and digest of a block -> the measured columns of each of its rows.
Timings = Mapping[tuple[str, str], list[dict[str, float]]]
#: Requests that make a serving policy run once through its code. [request]
WARM_UP_REQUESTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class RunTask:
    """A run and the store that takes it."""

    store: Store
    run: Run


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that ended, well or by a fault of its policy."""

    name: str
    requests: int  # [request]
    fault: str = ""  # one line; empty when it went well


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScenarioResult:
    """The tables of a scenario, in plan order."""

    plan: ScenarioPlan
    store: Store
    summary: pd.DataFrame  # a row a run, the columns of ``metrics.Summary``
    decisions: pd.DataFrame  # a row a decision
    classes: pd.DataFrame  # a row a class of a run, where the traces have classes
    models: pd.DataFrame  # a row a model of a run and one of all, where a deployment serves several
    tiers: pd.DataFrame  # a row a tier of a run, where prompts are kept below HBM
    capacity: pd.DataFrame  # a row a search; empty when the scenario asks for none
    searched: pd.DataFrame  # a row a run of the searches, the columns of ``summary``
    faults: tuple[str, ...]  # of runs that their policies stopped

    def requests(self, run: Run) -> pd.DataFrame:
        """Records of a run's requests; columns of ``records.Requests``."""
        return self.store.read(run.key(REQUESTS))

    def samples(self, run: Run) -> pd.DataFrame:
        """State of a run over time; columns of ``records.Samples``."""
        return self.store.read(run.key(SAMPLES))


def compute_run(task: RunTask) -> FinishedRun:
    """Simulate one run, or one search for a capacity, and write it into the store."""
    run = task.run
    try:
        for path in run.scenario.policy_files:
            load_policies(path)
        if run.rate_scale is None:
            _search(task)
        else:
            with piece_folder(task.store, run) as folder:
                result = _simulated(run, run.rate_scale, folder=folder)
                _write_records(task, result, folder)
            row = _summarised(run, result, run.rate_scale)
            _logged(task, run.key(RUNS), [row])
            task.store.write(run.key(RUNS), _frame([row]), _note(result))
    except StoreError:
        raise  # what cannot be written ends all runs
    except DisaggSimError as error:
        kept = ""
        if run.scenario.run.records == FULL and isinstance(error, PolicyError) and isinstance(error.so_far, RunResult):
            _write_records(task, _named(error.so_far, run))
            kept = f"; its rows so far are in {task.store.path(run.key(REQUESTS))}"
        return FinishedRun(run.name, run.requests, f"{run.name}: {error}{kept}")
    return FinishedRun(run.name, run.requests)


def run_scenario(
    plan: ScenarioPlan, root: Path, *, jobs: int | Workers, listener: RunListener, overwrite: bool = False
) -> ScenarioResult:
    """Simulate every run missing in ``root``, then write ``summary.csv`` and the other tables.

    A policy whose wish is impossible stops its own run: ``requests/`` keeps its rows so far, ``faults`` has its line,
    and the same command simulates it again. So does a run whose worker died again and again. Returns ``summary``,
    ``decisions``, ``capacity`` as tables in plan order, times in s.
    """
    planned = {key for run in plan.tasks for key in run.blocks}
    own = Own(TABLES, planned, partial(_require_own, plan, planned))
    with opened(root, listener, overwrite=overwrite, noun="scenario", own=own) as store:
        for note in plan.notes:
            listener.note(note)
        lacking = missing(plan.tasks, lambda run: run.blocks, store, listener, noun="runs")
        warm_up(lacking, listener)
        listener.start(sum(run.requests for run in lacking))
        faults: list[str] = []

        def give_up(task: RunTask, why: str) -> None:
            faults.append(f"{task.run.name}: failed {ATTEMPTS} times: {why}")

        there = Store(root.absolute())
        tasks = [RunTask(there, run.anywhere()) for run in lacking]
        for done in run_tasks(compute_run, tasks, jobs=jobs, given_up=give_up):
            listener.advance(done.requests)
            faults += [done.fault] if done.fault else []
        listener.finish()
        result = _collect(plan, store, tuple(sorted(faults)))
        _write_tables(result, root)
    return result


def require_no_faults(result: ScenarioResult) -> None:
    """Raise when a policy stopped a run."""
    if result.faults:
        raise DisaggSimError("\n".join(result.faults))


def _simulated(run: Run, scale: float, *, folder: Path | None = None) -> RunResult:
    scenario = run.scenario
    replayed = run.source.at_rate(scenario.seed, scale)
    samples = max(SAMPLED, len(replayed) // PIECE)  # requests leave the run at samples
    period = scenario.run.sample_s if scenario.sampled else max(replayed.duration / samples, LEAST_SAMPLE_S)
    least = replayed.last_s / MOST_SAMPLES  # a search may try rates so low that the file's own is too short
    options = replace(
        scenario.run, sample_s=max(period, least), admission=run.choice.admission or scenario.run.admission
    )

    def kept(piece: Requests) -> None:
        """Keep requests in a file of their own; of a search the summaries are all that is looked at."""
        if folder is not None and options.records == STREAM:
            with written(folder / f"{int(piece.request[0]):010d}.parquet") as handle:
                write_parquet(with_class(frame_of(piece), replayed), handle.name, {})

    policy, seed = run.choice.policy, scenario.seed
    result = simulate(
        replayed, run.deployment, policy, at=scenario.setup, slo=scenario.slo, seed=seed, options=options, sink=kept
    )
    if options.records != FULL:
        gc.collect()  # what a run leaves behind refers to itself, and Python frees it late
    return _named(result, run)


def _summarised(run: Run, result: RunResult, scale: float) -> Summary:
    scenario = run.scenario
    classes = scenario.run.classes
    limits = limits_of(run.source.at_rate(scenario.seed, scale), scenario.slo, classes) if classes else None
    return summary(result, scenario.slo, rate_scale=scale, limits=limits)


def _named(result: RunResult, run: Run) -> RunResult:
    return replace(result, policy=run.choice.label, deployment=run.deployment.name, trace=run.source.name)


def _search(task: RunTask) -> None:
    """Search for a capacity, and write its runs."""
    run, aim = task.run, task.run.scenario.capacity
    assert aim is not None, "a search is planned only where the scenario asks for it"
    found = serving_capacity(
        lambda scale: _summarised(run, _simulated(run, scale), scale),
        attains(aim.share) if aim.criterion == "attainment" else p99_inside(run.scenario.slo),
        rate=run.source.load(run.scenario.seed).rate,
    )
    answer = {
        "rate_scale": found.rate_scale,
        "requests_per_s": found.requests_per_s,
        "above": found.above,
        "met_again": found.met_again,
    }
    note = json.dumps({**answer, "message": found.message})
    _logged(task, run.key(run.table), found.runs)
    task.store.write(run.key(run.table), _frame(found.runs), note)


def _write_records(task: RunTask, result: RunResult, folder: Path | None = None) -> None:
    """All that does not depend on the machine."""
    store, run, samples = task.store, task.run, result.samples
    store.write(run.key(SAMPLES), pd.DataFrame({f.name: getattr(samples, f.name) for f in fields(samples)}), "{}")
    store.write(run.key(DECISIONS), pd.DataFrame(list(result.decisions), columns=list(DECISION_COLUMNS)), "{}")
    if run.scenario.run.records == STREAM and folder is not None:
        store.write(run.key(REQUESTS), sorted(folder.glob("*.parquet")), "{}")  # in the order of the trace
    elif run.scenario.run.records == FULL:
        trace = in_memory(run.source.at_rate(run.scenario.seed, run.rate_scale or 1.0))
        store.write(run.key(REQUESTS), with_class(result.frame(), trace), "{}")


def _note(result: RunResult) -> str:
    """Write what traces, tables of energy and of models need beside the row: instances, GPUs by model, encoders."""
    instances = {f.name: getattr(result.instances, f.name).tolist() for f in fields(result.instances)}
    encode = {} if result.encode is None else {"encode": asdict(result.encode)}
    return json.dumps({"instances": instances, "gpus_by_model": result.gpus_by_model(), **encode})


def encode_use(result: ScenarioResult, run: Run) -> EncodeUse | None:
    """Look up what the encode pool of a run held and did; None without such a pool, or a result."""
    if result.store.state(run.key(RUNS)) is not BlockState.STORED:
        return None
    found = json.loads(result.store.note(run.key(RUNS))).get("encode")
    return None if found is None else EncodeUse(**found)


def _frame(rows: Sequence[Summary]) -> pd.DataFrame:
    return pd.DataFrame([asdict(row) for row in rows], columns=list(STORED))


def _require_own(plan: ScenarioPlan, planned: set[Key], store: Store) -> None:
    """Raise ``StoreError`` when the directory holds runs, and none of them by this scenario's names."""
    held = [path.relative_to(store.root) for table in TABLES for path in (store.root / table).glob("*/[!.]*.parquet")]
    if held and not {key.relative for key in planned} & {*held}:
        raise StoreError(
            f"{store.root}: holds {len(held)} blocks of other runs ({held[0]}, ...) and none of "
            f"{plan.scenario.name!r}; give another --out, or --overwrite to remove them"
        )


def _collect(plan: ScenarioPlan, store: Store, faults: tuple[str, ...]) -> ScenarioResult:
    whole = [run for run in plan.runs if store.state(run.key(RUNS)) is BlockState.STORED]
    logged = [run for run in plan.runs if store.state(run.key(DECISIONS)) is BlockState.STORED]
    searches = [run for run in plan.searches if store.state(run.key(run.table)) is BlockState.STORED]
    timings = read_timings(store.root)
    return ScenarioResult(
        plan=plan,
        store=store,
        summary=pd.DataFrame(_timed(store, [run.key(RUNS) for run in whole], timings), columns=list(COLUMNS)),
        decisions=pd.DataFrame(
            [{**_names(run), **row} for run in logged for row in _records(store, run.key(DECISIONS))],
            columns=[*NAMES, *DECISION_COLUMNS],
        ),
        classes=_table(whole, CLASS_COLUMNS, partial(_by_class, store)),
        models=_table(whole, MODEL_COLUMNS, partial(_by_model, store)),
        tiers=_table(whole, TIER_COLUMNS, partial(_by_tier, store)),
        capacity=pd.DataFrame([_capacity_row(run, store) for run in searches], columns=list(CAPACITY_COLUMNS)),
        searched=pd.DataFrame(_timed(store, [run.key(run.table) for run in searches], timings), columns=list(COLUMNS)),
        faults=faults,
    )


def _table(
    runs: Sequence[Run], columns: Sequence[str], rows_of: Callable[[Run, float], pd.DataFrame | None]
) -> pd.DataFrame:
    """Rows of the runs that have some, each with the names of its run."""
    found = [(run, rows_of(run, run.rate_scale)) for run in runs if run.rate_scale is not None]
    tables = [rows.assign(**_names(run)) for run, rows in found if rows is not None]
    whole = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*NAMES, *columns])
    return whole[[*NAMES, *columns]]


def _by_class(store: Store, run: Run, scale: float) -> pd.DataFrame | None:
    """What each class of requests got in a run."""
    scenario = run.scenario
    if run.source.load(scenario.seed).classes is None or scenario.run.records == NONE:
        return None
    trace = in_memory(run.source.at_rate(scenario.seed, scale))
    return by_class(store.read(run.key(REQUESTS)), trace, scenario.slo, scenario.run.classes)


def _by_model(store: Store, run: Run, scale: float) -> pd.DataFrame | None:
    """What the requests of each model got in a run of several."""
    gpus, scenario = json.loads(store.note(run.key(RUNS)))["gpus_by_model"], run.scenario
    if not gpus or scenario.run.records == NONE:
        return None
    limits = limits_of(run.source.at_rate(scenario.seed, scale), scenario.slo, scenario.run.classes)
    return by_model(store.read(run.key(REQUESTS)), limits, gpus)


def _by_tier(store: Store, run: Run, _: float) -> pd.DataFrame | None:
    """Where the prompts of a run were found."""
    tiers = run.scenario.run.tiers
    kept = tiers and run.scenario.run.records != NONE
    return tier_use(store.read(run.key(REQUESTS)), tiers) if kept else None


def _records(store: Store, key: Key) -> list[dict[str, Any]]:
    """Rows of a block."""
    return [{str(name): value for name, value in row.items()} for row in store.read(key).to_dict("records")]


def _timed(store: Store, keys: Sequence[Key], timings: Timings) -> list[dict[str, Any]]:
    """Rows of some blocks, one after another, with their measured columns."""
    return [row for key in keys for row in timed(_records(store, key), key, timings)]


def _names(run: Run) -> dict[str, Any]:
    values = (run.choice.label, run.deployment.name, run.source.name, run.rate_scale)
    return dict(zip(NAMES, values, strict=True))


def _capacity_row(run: Run, store: Store) -> dict[str, Any]:
    key, aim = run.key(run.table), run.scenario.capacity
    assert aim is not None, "a search is planned only where the scenario asks for it"
    found, tried = json.loads(store.note(key)), store.read(key)
    best = tried[tried["rate_scale"] == found["rate_scale"]]  # empty where no rate meets the aim
    gpus = float((best["gpu_hours"] * HOUR / best["duration_s"]).sum())  # held over the run
    criterion = f"{aim.share:g} inside the SLO" if aim.criterion == "attainment" else "p99 inside the SLO"
    return {
        **_names(run),
        "criterion": criterion,
        "rate_scale": found["rate_scale"],
        "requests_per_s": found["requests_per_s"],
        "requests_per_s_per_gpu": found["requests_per_s"] / gpus if gpus else 0.0,
        "above_rate_scale": found["above"],
        "met_again_rate_scale": found["met_again"],
        "runs": len(tried),
        "note": found["message"],
    }


def _write_tables(result: ScenarioResult, root: Path) -> None:
    """``summary.csv``, ``decisions.csv``, ``notes.txt`` and, where it was searched for, ``capacity.csv``."""
    write_text(root / "notes.txt", "".join(f"{note}\n" for note in result.plan.notes))
    write_csv(root / "summary.csv", result.summary, digits=9)
    write_csv(root / "decisions.csv", result.decisions, digits=9)
    some = {"classes": result.classes, "models": result.models, "tiers": result.tiers}
    some |= {"capacity": result.capacity, "capacity_runs": result.searched}
    for name, table in some.items():
        if len(table):
            write_csv(root / f"{name}.csv", table, digits=9)


def warm_up(runs: Sequence[Run], listener: RunListener) -> None:
    """Serve a few requests under every policy of some runs, so that its code is compiled and kept.

    The time of the first run is then its own, and so is the time that is left. What is wrong with a policy is told by
    its own runs.
    """
    if not runs:
        return
    if note := code_home().note:
        listener.note(note)
    first = {run.choice.kind: run for run in reversed(runs)}
    with on_compilation(lambda: listener.note(COMPILING)):
        for run in first.values():
            scenario = run.scenario
            with suppress(Exception):
                simulate(
                    run.source.load(scenario.seed).head(WARM_UP_REQUESTS),
                    run.deployment,
                    run.choice.policy,
                    at=scenario.setup,
                    slo=scenario.slo,
                    seed=scenario.seed,
                    options=replace(scenario.run, records=FULL),
                )


def _logged(task: RunTask, key: Key, rows: Sequence[Summary]) -> None:
    """Add the measured columns of the rows of a block to their log."""
    rows_told = [{name: getattr(row, name) for name in MEASURED} for row in rows]
    line = json.dumps({"block": str(key.relative), "digest": key.digest, "rows": rows_told})
    log_timing(task.store.root, line)


def log_timing(root: Path, line: str) -> None:
    """Add a line to the log of measured columns."""
    path = root / LOG
    try:
        with open(path, "a", encoding="utf-8", opener=no_link) as log:
            log.write(f"{line}\n")
    except OSError as error:
        raise StoreError(f"{path}: cannot write: {error.strerror}") from None


def read_timings(root: Path) -> Timings:
    """The last line of each block; a line that cannot be read is no line."""
    found = {}
    try:
        lines = read_file(root / LOG).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            held = json.loads(line)
            rows = [{name: float(row[name]) for name in MEASURED} for row in held["rows"]]
            found[str(held["block"]), str(held["digest"])] = rows
    return found


def timed(rows: list[dict[str, Any]], key: Key, timings: Timings) -> list[dict[str, Any]]:
    """Rows of a block with their measured columns; NaN where the log has none."""
    told = timings.get((str(key.relative), key.digest), [])
    unknown = dict.fromkeys(MEASURED, math.nan)
    return [row | (told[at] if len(told) == len(rows) else unknown) for at, row in enumerate(rows)]


@contextmanager
def piece_folder(store: Store, run: Run) -> Iterator[Path]:
    """The directory in which a run is kept while it goes on; it is removed at the end."""
    key = run.key(REQUESTS)
    folder = store.root / PIECES / key.group / key.name
    for old in folder.glob("*"):  # of a run that was cut off
        shutil.rmtree(old, ignore_errors=True)
    yield folder / key.digest
    shutil.rmtree(folder, ignore_errors=True)
    for above in (folder.parent, folder.parent.parent):
        if above.is_dir() and not above.is_symlink() and not any(above.iterdir()):
            above.rmdir()
