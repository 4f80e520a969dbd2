"""Every file format that is read: a good file of it, made once, and the reader that a command calls first."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from inputs import FILES, TRACES
from spoiling import spoilt_bytes, spoilt_content

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
_PLAN |= {"said": {"why": []}}


@dataclass(frozen=True)
class Format:
    """A format: its good content, its reader, what lies beside, and how it is spoilt, if not by its name."""

    name: str  # of the file
    content: bytes
    read: Callable[[Path], Any]
    beside: tuple[tuple[str, bytes], ...] = ()  # good files in the same directory
    spoil: Callable[[bytes, Random], bytes] | None = None


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


def _made(frame: pd.DataFrame) -> bytes:
    with TemporaryDirectory() as folder:
        write_parquet(frame, path := Path(folder, "a.parquet"), {})
        return path.read_bytes()


def _windows(path: Path) -> int:
    return sum(len(each) for each in stream_trace(path, window=2).windows())


def _formats() -> list[Format]:
    trace = ("trace.csv", FILES["trace.csv"])
    found = [Format("s.yaml", FILES[name], lambda path: load_sweep(str(path))) for name in ("s.yaml", "study.yaml")]
    found += [
        Format("s.yaml", FILES[name], lambda path: check_scenario(str(path)), (trace,))
        for name in ("sc.yaml", "sy.yaml")
    ]
    for kind, place in DIRECTORIES.items():
        if kind not in ("sweep", "scenario") and (files := spec_files(kind)):
            source = files[sorted(files)[0]]
            found.append(Format(f"{place}/{source.name}", source.read_bytes(), check_file))
    for kind in TRACES:
        name = {"csv": "trace.csv", "mooncake": "mooncake.jsonl"}.get(kind, f"{kind}.csv")
        found.append(Format(name, FILES[name], lambda path: load_trace(path, rate=2.0)))
    text = (("run.meta.json", FILES["run.meta.json"]),)
    own = {
        "config.json": import_model,
        "gemm.csv": read_tables,
        "exclude.csv": read_exclusions,
        "power.csv": lambda path: read_power_table(path, "h100_sxm"),
        "served.csv": read_rows,
        "passes.csv": judge_passes,
        "servers.csv": lambda path: judge_memory(path, load_engine("vllm")),
    }
    return [
        *found,
        *(Format(name, FILES[name], read) for name, read in own.items()),
        Format("run.csv", FILES["run.csv"], lambda path: judge_requests(path, "h100_sxm"), text),
        Format("w.csv", _TRACE.to_csv(index=False).encode(), _windows),
        Format("w.jsonl", _LINES.encode(), _windows),
        Format("w.parquet", _made(_TRACE), _windows, spoil=_parquet),
        Format("block.parquet", _made(_POINTS), read_block, spoil=_parquet),
        Format("frontier.csv", _POINTS.to_csv(index=False).encode(), read_frontier),
        Format("manifest.json", json.dumps(_MANIFEST).encode(), lambda path: read_manifest(path.parent)),
        Format("store.json", json.dumps(_INDEX).encode(), lambda path: read_index(path.parent)),
        Format("plan.json", json.dumps(_PLAN).encode(), lambda path: plan_content(path.parent)),
    ]


FORMATS = _formats()


def spoilt_file(form: Format, rng: Random) -> bytes:
    """A file of a format spoilt in its own way, as bytes, or both."""
    content = form.content
    if rng.random() < 0.75:
        content = form.spoil(content, rng) if form.spoil else spoilt_content(form.name, content, rng)
    return spoilt_bytes(content, rng) if rng.random() < 0.35 else content
