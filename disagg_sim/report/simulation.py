"""Plot a scenario, write its runs as traces for Perfetto (ui.perfetto.dev), and what its instances drew as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.atomic import remove, write_csv, write_text
from disagg_sim.domain import Slo
from disagg_sim.planning.run_energy import instances_energy, several_models
from disagg_sim.report.drawing import FuncFormatter, LogLocator, NullLocator, mpl, plain
from disagg_sim.report.figures import COLOURS, LINES, MARK, MARKS, STYLE, blank_figure, save_png
from disagg_sim.scenario.plan import DECISIONS, REQUESTS, RUNS, SAMPLES, Run
from disagg_sim.scenario.run import NAMES, ScenarioResult
from disagg_sim.simulation.records import EncodeUse, Instances
from disagg_sim.simulation.wishes import Role
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.store import BlockState, Store
from disagg_sim.units import HOUR, MS, US
from disagg_sim.workload.lengths import lengths
from disagg_sim.workload.stream import in_memory

CLUSTER = 0  # process of counters and decisions; an instance is the one of its number plus 1
COUNTERS = ("queued", "running", "kv_use", "gpus", "transfers")

Event = dict[str, Any]


def write_perfetto(result: ScenarioResult, root: Path) -> int:
    """Write ``perfetto/<deployment>/<run>.json`` of every stored run. [1]"""
    runs = [run for run in result.plan.runs if result.store.state(run.key(RUNS)) is BlockState.STORED]
    for run in runs:
        path = root / "perfetto" / f"{run.name}.json"
        lines = ",\n".join(json.dumps(event) for event in _events(result.store, run))
        write_text(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n')
    return len(runs)


def _events(store: Store, run: Run) -> Iterator[Event]:
    """Events of the Trace Event Format; times in microseconds."""
    instances = json.loads(store.note(run.key(RUNS)))["instances"]
    yield _named(CLUSTER, "cluster")
    for number, (role, gpus) in enumerate(zip(instances["role"], instances["gpus"], strict=True)):
        yield _named(number + 1, f"instance {number}: {Role(role).name.lower()}, {gpus} GPUs")
    yield from _requests(store.read(run.key(REQUESTS)))
    for sample in store.read(run.key(SAMPLES)).to_dict("records"):
        for name in COUNTERS:
            yield {"ph": "C", "pid": CLUSTER, "name": name, "ts": sample["time_s"] / US, "args": {name: sample[name]}}
    for decision in store.read(run.key(DECISIONS)).to_dict("records"):
        said = {"wish": decision["wish"], "reason": decision["reason"]}
        at = {"pid": CLUSTER, "tid": 0, "ts": decision["tick_s"] / US}
        yield {"ph": "i", "s": "g", "name": decision["kind"], "args": said, **at}


def _named(process: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}


def _requests(requests: pd.DataFrame) -> Iterator[Event]:
    """Prefill and decode of each request on its instances; what did not happen has no event."""
    for row in requests.to_dict("records"):
        lengths = {"input_tokens": row["input_tokens"], "output_tokens": row["output_tokens"]}
        spans = (
            ("prefill", row["prefill_instance"], row["prefill_start_s"], row["prefill_end_s"]),
            ("decode", row["decode_instance"], row["decode_start_s"], row["finish_s"]),
        )
        for phase, instance, start, end in spans:
            if instance < 0 or math.isnan(start) or math.isnan(end):
                continue
            name = f"{phase} {row['request']}"
            common = {"cat": phase, "id": int(row["request"]), "pid": int(instance) + 1, "tid": 0, "name": name}
            yield {"ph": "b", "ts": start / US, "args": lengths, **common}
            yield {"ph": "e", "ts": end / US, **common}


ENERGY_FILE = "energy.csv"
#: Columns of the table for people.
ENERGY_HEADER = (*NAMES[:3], "rate", "kWh", "of it waiting", "W a GPU", "J a request", "output tokens/J")
KILO = 1000.0


def write_run_energy(result: ScenarioResult, root: Path) -> list[tuple[str, ...]]:
    """Write ``energy.csv``: a row an instance of a run, what it held and drew."""
    whole = [run for run in result.plan.runs if result.store.state(run.key(RUNS)) is BlockState.STORED]
    tables = [_of_run(run, json.loads(result.store.note(run.key(RUNS)))) for run in whole]
    if not tables:
        return []
    write_csv(root / ENERGY_FILE, pd.concat(tables, ignore_index=True), digits=9)
    sums = result.summary.set_index(list(NAMES))
    return [_line(table, sums.loc[tuple(table[name].iloc[0] for name in NAMES)]) for table in tables]


def _of_run(run: Run, note: dict[str, Any]) -> pd.DataFrame:
    """What the instances of one run drew."""
    if note["gpus_by_model"]:
        raise several_models(run.deployment)
    scenario, scale = run.scenario, 1.0 if run.rate_scale is None else run.rate_scale
    held = Instances(**{name: np.array(values) for name, values in note["instances"].items()})
    law = lengths(in_memory(run.source.at_rate(scenario.seed, scale)))
    use = note.get("encode")
    encode = None if use is None else EncodeUse(**use)
    found = instances_energy(held, run.deployment, scenario.setup, law, encode)
    names: tuple[Any, ...] = (run.choice.label, run.deployment.name, run.source.name, scale)
    return found.assign(**dict(zip(NAMES, names, strict=True)))[[*NAMES, *found.columns]]


def _line(table: pd.DataFrame, summary: pd.Series) -> tuple[str, ...]:
    """A run in words: energy, share of waiting, mean power of a GPU, joules of a request, tokens of a joule."""
    joules, waiting = table["joules"].sum(), table["waiting_joules"].sum()
    completed, tokens = summary["completed"], summary["throughput_tokens_per_s"] * summary["duration_s"]
    return (
        *(str(table[name].iloc[0]) for name in NAMES[:3]),
        f"x{table[NAMES[3]].iloc[0]:g}",
        f"{joules / HOUR / KILO:.3g}",
        f"{waiting / joules:.0%}",
        f"{joules / (table['gpus'] * table['held_s']).sum():.0f}",
        f"{joules / completed:,.3g}" if completed else "",
        f"{tokens / joules:.3g}",
    )


BINS = 90  # of the time axis [1]
MARGIN = 1.2  # of logarithmic axes around what they show [1]
WIDE = 8.0  # span from which an axis of rates is logarithmic [1]
LIMIT = {"color": "#444444", "linewidth": 1.0, "linestyle": (0, (4, 3))}  # line of an SLO
#: Small: several panels share a picture.
PANELS: Any = {**STYLE, "font.size": 10.0, "axes.titlesize": 10.5, "lines.linewidth": 1.5, "lines.markersize": 4.0}


@dataclass(frozen=True, slots=True, eq=False)
class OverTime:
    """One run over time."""

    path: Path
    title: str
    store: Store
    run: Run


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """Latencies of all policies on one deployment, under one trace at one rate."""

    path: Path
    title: str
    store: Store
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OverRate:
    """Attainment and goodput of all policies on one deployment under one trace."""

    path: Path
    title: str
    rows: pd.DataFrame  # of ``summary.csv`` and of the searches
    share: float  # of requests inside the SLO that counts as capacity; 0 = none asked for [1]


def draw_simulation(result: ScenarioResult, root: Path, *, jobs: int) -> int:
    """Draw ``figures/<deployment>/*.png`` of a scenario. [1]"""
    for old in (root / "figures").glob("**/*.png"):
        remove(old, MARK)
    there = root.absolute()  # workers run in directories of their own
    tasks = [*_tasks(result, Store(there), there / "figures")]
    return sum(run_tasks(_draw, tasks, jobs=jobs))


def _tasks(result: ScenarioResult, store: Store, root: Path) -> Iterator[OverTime | Spread | OverRate]:
    scenario = result.plan.scenario
    stored = [run for run in result.plan.runs if store.state(run.key(RUNS)) is BlockState.STORED]
    for run in stored:
        title = f"{run.choice.label} on {run.deployment.name} under {run.source.name} x {run.rate_scale:g}"
        yield OverTime(root / f"{run.name}.png", title, store, run)
    groups: dict[tuple[str, str, float | None], list[Run]] = {}
    for run in stored:
        groups.setdefault((run.deployment.name, run.source.name, run.rate_scale), []).append(run)
    for (deployment, trace, scale), runs in groups.items():
        title = f"{plain(scenario.name)}: {deployment} under {trace} x {scale:g}"
        yield Spread(root / deployment / f"latencies-{trace}-x{scale:g}.png", title, store, tuple(runs))
    rows = pd.concat([result.summary, result.searched]) if len(result.searched) else result.summary
    for (name, source), part in rows.groupby(["deployment", "trace"], sort=False):
        if len(part["rate_scale"].unique()) > 1:
            aim = scenario.capacity
            share = aim.share if aim is not None and aim.criterion == "attainment" else 0.0
            title = f"{plain(scenario.name)}: {name} under {source}, {_slo_text(scenario.slo)}"
            yield OverRate(root / str(name) / f"attainment-{source}.png", title, part, share)


def _draw(task: OverTime | Spread | OverRate) -> int:
    with mpl.rc_context(PANELS):
        if isinstance(task, OverTime):
            figure = _over_time(task)
        elif isinstance(task, Spread):
            figure = _spread(task)
        else:
            figure = _over_rate(task)
        save_png(figure, task.path)
    return 1


def _slo_text(slo: Slo) -> str:
    return f"SLO: TTFT {slo.ttft:g} s, TPOT {slo.tpot / MS:g} ms"


def _over_time(task: OverTime) -> Any:
    samples, requests = task.store.read(task.run.key(SAMPLES)), task.store.read(task.run.key(REQUESTS))
    slo = task.run.scenario.slo
    time = samples["time_s"].to_numpy()
    figure = blank_figure((9.0, 11.0))
    figure.suptitle(f"{task.title}\n{_slo_text(slo)}", x=0.01, ha="left", fontsize=11.0)
    load, gpus, queue, first, gap = figure.subplots(5, 1, sharex=True)
    edges = np.linspace(0.0, max(time[-1], 1e-9), BINS + 1)
    for name, column, number in (("arrive", "arrival_s", 0), ("finish", "finish_s", 1)):
        count, _ = np.histogram(requests[column].dropna(), edges)
        load.stairs(count / np.diff(edges), edges, color=COLOURS[number], label=name, linewidth=1.5)
    load.set_ylabel("requests/s")
    for name, column, number in (("prefill", "prefill_gpus", 0), ("decode, or both", "decode_gpus", 1)):
        gpus.step(time, samples[column], where="post", color=COLOURS[number], linestyle=LINES[number], label=name)
    gpus.step(time, samples["gpus"], where="post", color="#000000", linewidth=1.0, linestyle=":", label="held")
    gpus.set_ylabel("GPUs")
    queue.plot(time, samples["queued"], color=COLOURS[0], label="wait for prefill")
    queue.plot(time, samples["running"], color=COLOURS[1], label="decode")
    queue.set_ylabel("requests")
    memory = queue.twinx()
    memory.plot(time, 100 * samples["kv_use"], color=COLOURS[2], linewidth=1.0, label="KV blocks in use [%]")
    memory.set_ylim(0, 105)
    memory.set_ylabel("KV blocks [%]")
    memory.grid(False)
    _legend(queue, memory)
    done = requests[requests["status"] == "completed"]
    arrival, ttft, tpot = _times(done)
    for panel, values, limit, scale, label in (
        (first, ttft, slo.ttft, 1.0, "TTFT [s]"),
        (gap, tpot, slo.tpot, MS, "TPOT [ms]"),
    ):
        shown = _percentiles(panel, edges, arrival, values / scale)
        _log(panel.yaxis, np.append(shown, limit / scale))
        panel.axhline(limit / scale, **LIMIT, label="SLO")
        panel.set_ylabel(label)
    gap.set_xlabel("time [s]; latencies by arrival")
    for panel in (load, gpus, first, gap):
        _legend(panel)
    for panel in (load, gpus, queue):
        panel.set_ylim(bottom=0)
    gap.set_xlim(0, edges[-1])
    return figure


def _legend(*panels: Any) -> None:
    """One legend right of the panel for what some axes show."""
    found = [panel.get_legend_handles_labels() for panel in panels]
    handles, labels = ([item for each in column for item in each] for column in zip(*found, strict=True))
    away = 1.09 if len(panels) > 1 else 1.01
    panels[0].legend(handles, labels, loc="upper left", bbox_to_anchor=(away, 1.0), fontsize=9.0)


def _times(done: pd.DataFrame) -> tuple[Floats, Floats, Floats]:
    """Arrival, TTFT and TPOT of completed requests. [s]"""
    arrival, first, finish = (done[name].to_numpy() for name in ("arrival_s", "first_token_s", "finish_s"))
    return arrival, first - arrival, (finish - first) / np.maximum(done["output_tokens"].to_numpy() - 1, 1)


def _percentiles(panel: Any, edges: Floats, arrival: Floats, values: Floats) -> Floats:
    """Median and 90th percentile of what arrived in each bin, zeros of single tokens left out; returns all drawn."""
    place = np.clip(np.searchsorted(edges, arrival, side="right") - 1, 0, BINS - 1)
    middle = (edges[1:] + edges[:-1]) / 2
    drawn = []
    for share, number, name in ((0.5, 0, "median"), (0.9, 1, "p90")):
        found = np.full(BINS, np.nan)
        for index in np.unique(place):
            inside = values[(place == index) & (values > 0)]
            found[index] = np.quantile(inside, share) if len(inside) else np.nan
        panel.plot(middle, found, color=COLOURS[number], label=name, marker=".", markersize=3.0)
        drawn.append(found)
    return np.concatenate(drawn)


def _look(number: int) -> dict[str, Any]:
    """Colour and line of a policy, the same in every picture of a scenario."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number // len(COLOURS) % len(LINES)]}


def _spread(task: Spread) -> Any:
    slo = task.runs[0].scenario.slo
    figure = blank_figure((9.6, 4.6))
    figure.suptitle(f"{task.title}, {_slo_text(slo)}", x=0.01, ha="left", fontsize=11.0)
    panels = figure.subplots(1, 2, sharey=True)
    drawn: tuple[list[float], list[float]] = ([slo.ttft], [slo.tpot / MS])  # of each panel, its ends
    for run in task.runs:
        number = [choice.label for choice in run.scenario.policies].index(run.choice.label)
        requests = task.store.read(run.key(REQUESTS))
        _, ttft, tpot = _times(requests[requests["status"] == "completed"])
        for panel, values, ends in zip(panels, (ttft, tpot / MS), drawn, strict=True):
            share = 100 * np.arange(1, len(values) + 1) / len(requests)
            panel.plot(np.sort(values), share, label=run.choice.label, **_look(number))
            ends.extend(np.sort(values[values > 0])[[0, -1]] if np.any(values > 0) else ())
    for panel, ends, label in zip(panels, drawn, ("TTFT [s]", "TPOT [ms]"), strict=True):
        _log(panel.xaxis, np.array(ends))
        panel.axvline(ends[0], **LIMIT)
        panel.set_xlabel(f"{label}, log scale; SLO dashed")
        panel.set_ylim(0, 101)
    panels[0].set_ylabel("share of all requests [%]")
    _outside(figure, panels[0])
    return figure


def _over_rate(task: OverRate) -> Any:
    figure = blank_figure((9.6, 4.6))
    figure.suptitle(task.title, x=0.01, ha="left", fontsize=11.0)
    attainment, goodput = figure.subplots(1, 2)
    policies: Iterable[Any] = task.rows.groupby("policy", sort=False)
    for number, (policy, rows) in enumerate(policies):
        ordered = rows.drop_duplicates("rate_scale").sort_values("rate_scale")
        look = {**_look(number), "marker": MARKS[number % len(MARKS)]}
        attainment.plot(ordered["rate_scale"], 100 * ordered["slo_attainment"], label=policy, **look)
        goodput.plot(ordered["rate_scale"], ordered["goodput_requests_per_s"], **look)
    if task.share:
        attainment.axhline(100 * task.share, **LIMIT)
    attainment.set_ylim(0, 102)
    attainment.set_ylabel("requests inside the SLO [%]")
    goodput.set_ylim(bottom=0)
    goodput.set_ylabel("goodput [requests/s]")
    scales = task.rows["rate_scale"]
    for panel in (attainment, goodput):
        panel.set_xlabel("request rate over that of the trace")
        if scales.max() > WIDE * scales.min():
            _log(panel.xaxis, scales.to_numpy())
    _outside(figure, attainment)
    return figure


def _log(axis: Any, values: Floats) -> None:
    """A logarithmic axis around some values, with ticks at 1, 2 and 5 times powers of ten, as plain numbers."""
    above = values[values > 0]  # no NaN is
    axis._set_axes_scale("log")
    axis.axes.set(**{f"{axis.axis_name}lim": (above.min() / MARGIN, above.max() * MARGIN)})
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _outside(figure: Any, panel: Any) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=9.0)
