"""Every file format that is read: a good file of it, made once, and the reader that a command calls first."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import yaml
from inputs import (
    ARGUMENTS,
    CONFIG,
    EXCLUDE,
    GEMM,
    PASSES,
    POWER,
    PREDICTED,
    REQUESTS,
    SCENARIO,
    SERVED,
    SERVERS,
    STUDY,
    SWEEP,
    SYNTHETIC,
    TRACES,
)
from spoiling import spoilt_bytes, spoilt_document, spoilt_table, spoilt_yaml

from disagg_sim.facts.hub.imported import import_model
from disagg_sim.facts.load import check_file, load_engine
from disagg_sim.facts.yaml_files import DIRECTORIES, spec_files
from disagg_sim.memory import VARIABLE
from disagg_sim.parquet import write_parquet
from disagg_sim.report.page.assemble import read_block
from disagg_sim.report.page.write import plan_content
from disagg_sim.scenario.spec import check_scenario
from disagg_sim.sweep.compare import FRONTIER, read_frontier
from disagg_sim.sweep.manifest import read_manifest
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.sweep.store import read_index
from disagg_sim.workload.readers.load import load_trace
from disagg_sim.workload.readers.windows import stream_trace
from lab.calibration.kernels.tables import read_exclusions, read_tables
from lab.calibration.power.fit import read_power_table
from lab.calibration.served.forward_pass import judge_passes
from lab.calibration.served.memory import judge_memory
from lab.calibration.served.ranking import read_predictions
from lab.calibration.served.read import read_rows
from lab.calibration.served.requests import judge_requests

__all__ = ["FORMATS", "VARIABLE", "Format", "spoilt_file"]

#: What somebody may have put into the metadata of a Parquet file, under our names.
METADATA = ("5", '{"a": 5}', '{"input_tokens": []}', '{"none": ["x"]}', "[" * 20_000, "[1]", '{"arrival_s": ["x"]}', "")
_TRACE = pd.DataFrame({"arrival_s": [0.0, 0.5, 2.0], "input_tokens": [10, 20, 30], "output_tokens": [5, 6, 7]})
_LINES = "".join(f"{json.dumps(row)}\n" for row in _TRACE.to_dict("records"))
_POINTS = pd.DataFrame([dict.fromkeys(FRONTIER.required, 1.0) | {"case": "demo", "mode": "colocated"}] * 3)
_MANIFEST = {
    "name": "demo",
    "cases": [{"case": "demo", "verdict": ""}],
    "tables": {"frontier.csv": "0" * 64},
    "inputs": {"a.yaml": {"x": "1"}},
    "options": {"per": "gpu"},
    "versions": {"numpy": "2"},
    "code": "0" * 64,
}
_INDEX = {"schema": 1, "holds": "sweep", "blocks": {"points/demo": {"colocated-000": "0" * 16}}}
_PLAN = {"schema": "disagg-sim/plan/2", "status": "OK", "best": None, "runners_up": [], "question": {"model": "x"}}


@dataclass(frozen=True)
class Format:
    """A format: its good content, how it is spoilt beside as bytes, and its reader."""

    name: str  # of the file
    content: bytes
    spoil: Callable[[bytes, Random], bytes]
    read: Callable[[Path], Any]
    beside: tuple[tuple[str, bytes], ...] = ()  # good files in the same directory


def _yaml(content: bytes, rng: Random) -> bytes:
    return spoilt_yaml(yaml.safe_load(content), rng)


def _json(content: bytes, rng: Random) -> bytes:
    deep = rng.random() < 0.05
    return b'{"a":' * 20_000 if deep else json.dumps(spoilt_document(json.loads(content), rng), default=str).encode()


def _csv(content: bytes, rng: Random) -> bytes:
    """Cells, and at times numbers that nothing can be computed with."""
    data = spoilt_table(content.decode(), rng)
    if rng.random() < 0.2:
        number = rng.choice((b"9" * 400, b"1e-320", b"1e308", b"-0.0", b"1e400"))
        data = data.replace(rng.choice((b"0", b"1", b"2", b"5")), number, rng.choice((1, 3)))
    return data


def _lines(content: bytes, rng: Random) -> bytes:
    rows = content.splitlines()
    at = rng.randrange(len(rows))
    rows[at] = json.dumps(spoilt_document(json.loads(rows[at]), rng), default=str).encode()
    return b"\n".join(rows)


def _parquet(content: bytes, rng: Random) -> bytes:
    """Metadata of another, or a type of another in a column."""
    with TemporaryDirectory() as folder:
        (path := Path(folder, "a.parquet")).write_bytes(content)
        frame = pd.read_parquet(path)
        name = rng.choice(list(frame.columns))
        action = rng.choice(("metadata", "metadata", "column", "drop", "bytes"))
        if action == "column":
            frame[name] = rng.choice((["x"] * len(frame), [None] * len(frame), [float("nan")] * len(frame)))
        if action == "drop":
            frame = frame.drop(columns=name)
        told = {f"disagg_sim.{key}": rng.choice(METADATA) for key in ("categories", "texts")}
        if action == "metadata":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(told), path)
        else:
            write_parquet(frame, path, {})
        return path.read_bytes()


def _words(content: bytes, rng: Random) -> bytes:
    words = content.split(b" ")
    words[rng.randrange(len(words))] = rng.choice((b"(" * 500, b"-" * 5000 + b"1", b"9" * 5000, b"b''", b"class", b""))
    return b" ".join(words)


def _made(frame: pd.DataFrame) -> bytes:
    with TemporaryDirectory() as folder:
        write_parquet(frame, path := Path(folder, "a.parquet"), {})
        return path.read_bytes()


def _windows(path: Path) -> int:
    return sum(len(each) for each in stream_trace(path, window=2).windows())


def _formats() -> list[Format]:
    dump = {name: yaml.safe_dump(each, sort_keys=False).encode() for name, each in _DOCUMENTS.items()}
    trace = ("trace.csv", TRACES["csv"].encode())
    found = [Format("s.yaml", dump[name], _yaml, lambda path: load_sweep(str(path))) for name in ("sweep", "study")]
    found += [
        Format("s.yaml", dump[name], _yaml, lambda path: check_scenario(str(path)), (trace,))
        for name in ("scenario", "synthetic")
    ]
    for kind, place in DIRECTORIES.items():
        if kind not in ("sweep", "scenario") and (files := spec_files(kind)):
            source = files[sorted(files)[0]]
            found.append(Format(f"{place}/{source.name}", source.read_bytes(), _yaml, check_file))
    for kind, text in TRACES.items():
        spoil = _lines if kind == "mooncake" else _csv
        found.append(Format(f"{kind}.csv", text.encode(), spoil, lambda path: load_trace(path, rate=2.0)))
    text, block = {"x.meta.json": json.dumps(ARGUMENTS).encode()}, _made(_TRACE)
    return [
        *found,
        Format("w.csv", _TRACE.to_csv(index=False).encode(), _csv, _windows),
        Format("w.jsonl", _LINES.encode(), _lines, _windows),
        Format("w.parquet", block, _parquet, _windows),
        Format("block.parquet", _made(_POINTS), _parquet, read_block),
        Format("frontier.csv", _POINTS.to_csv(index=False).encode(), _csv, read_frontier),
        Format("manifest.json", json.dumps(_MANIFEST).encode(), _json, lambda path: read_manifest(path.parent)),
        Format("store.json", json.dumps(_INDEX).encode(), _json, lambda path: read_index(path.parent)),
        Format("plan.json", json.dumps(_PLAN).encode(), _json, lambda path: plan_content(path.parent)),
        Format("config.json", json.dumps(CONFIG).encode(), _json, import_model),
        Format("gemm.csv", GEMM.encode(), _csv, read_tables),
        Format("exclude.csv", EXCLUDE.encode(), _csv, read_exclusions),
        Format("power.csv", POWER.encode(), _csv, lambda path: read_power_table(path, "h100_sxm")),
        Format("served.csv", SERVED.encode(), _csv, read_rows),
        Format("tool.csv", PREDICTED.encode(), _csv, read_predictions),
        Format("passes.csv", PASSES.encode(), _csv, judge_passes),
        Format("servers.csv", SERVERS.encode(), _csv, lambda path: judge_memory(path, load_engine("vllm"))),
        Format("x.csv", REQUESTS.encode(), _csv, lambda path: judge_requests(path, "h100_sxm"), (*text.items(),)),
    ]


_DOCUMENTS = {"sweep": SWEEP, "study": STUDY, "scenario": SCENARIO, "synthetic": SYNTHETIC}
FORMATS = _formats()


def spoilt_file(form: Format, rng: Random) -> bytes:
    """A file of a format spoilt in its own way, as bytes, or both."""
    content = form.content
    if rng.random() < 0.75:
        content = form.spoil(content, rng)
    return spoilt_bytes(content, rng) if rng.random() < 0.35 else content
