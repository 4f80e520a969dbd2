"""Write runs of a scenario as traces for Perfetto (ui.perfetto.dev), and what their instances drew as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.atomic import write_csv, write_text
from disagg_sim.planning.run_energy import instances_energy, several_models
from disagg_sim.scenario.plan import DECISIONS, REQUESTS, RUNS, SAMPLES, Run
from disagg_sim.scenario.run import NAMES, ScenarioResult
from disagg_sim.simulation.records import EncodeUse, Instances
from disagg_sim.simulation.wishes import Role
from disagg_sim.sweep.store import BlockState, Store
from disagg_sim.units import HOUR, US
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
