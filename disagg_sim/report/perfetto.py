"""Write runs as traces for Perfetto (ui.perfetto.dev) or chrome://tracing: instances, counters, decisions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.atomic import write_text
from disagg_sim.scenario.plan import DECISIONS, REQUESTS, RUNS, SAMPLES, Run
from disagg_sim.scenario.run import ScenarioResult
from disagg_sim.simulation.wishes import Role
from disagg_sim.sweep.store import BlockState, Store
from disagg_sim.units import US

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
