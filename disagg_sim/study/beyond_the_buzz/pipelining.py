"""Chunked pipelined prefill of very long prompts (figure 5 of arXiv 2506.05508): pipeline depth against expert ranks.

The GPUs of an instance stay while PP takes over from EP, at one prompt an attention rank. Deeper
pipelines hold fewer prompts at a time, so the first token comes earlier and the request rate stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.domain import Mapping as Degrees
from disagg_sim.facts import load
from disagg_sim.facts.yaml_files import read_mapping, spec_error
from disagg_sim.physics.layer import MLA_FORMS
from disagg_sim.search.grid import PhaseGrid, prefill_grid
from disagg_sim.sweep.reader import Reader

#: ``kind`` of such a file; a file without one is a sweep.
KIND = "pipelined_prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelining:
    """What figure 5 varies and what it holds."""

    name: str
    model: str
    system: str
    precision: str
    isl: int  # [token]
    gpus: int  # of an instance, EP x PP [1]
    pp: tuple[int, ...]  # pipeline stages; each divides ``gpus`` [1]
    chunk_tokens: int  # wherever there is a pipeline [token]
    mla_forms: tuple[str, ...]


def load_pipelining(path: Path) -> Pipelining:
    """Read a file of ``kind: pipelined_prefill``.

    Raises
    ------
    SpecError
        With every fault of the file.
    """
    document, reader = read_mapping(path), Reader()
    keys = ("kind", *Pipelining.__slots__)
    reader.keys("", document, keys)
    reader.faults += [f"missing key {key!r}" for key in keys if key not in document]
    study = None if reader.faults else _read(reader, document)
    if study is None or reader.faults:
        raise spec_error(path, reader.faults)
    return study


def _read(reader: Reader, document: Mapping[str, Any]) -> Pipelining:
    def whole(key: str, most: int) -> int:
        return reader.whole(key, document[key], low=1, high=most)

    def name(key: str, loader: Callable[[str], Any]) -> str:
        return "".join(reader.names(key, document[key], loader)[:1])

    gpus = whole("gpus", 10**4)
    depths = reader.several("pp", document["pp"], partial(reader.whole, low=1, high=gpus))
    reader.faults += [f"pp: {depth} does not divide {gpus} GPUs" for depth in depths if gpus % depth]
    return Pipelining(
        name=str(document["name"]),
        model=name("model", load.load_model),
        system=name("system", load.load_system),
        precision=name("precision", load.load_precision),
        isl=whole("isl", 10**9),
        gpus=gpus,
        pp=depths,
        chunk_tokens=whole("chunk_tokens", 10**9),
        mla_forms=reader.several("mla_forms", document["mla_forms"], partial(reader.choice, allowed=MLA_FORMS)),
    )


def pipelined_prefill(study: Pipelining, *, profile: str) -> pd.DataFrame:
    """FTL and rate of every depth of the pipeline.

    Returns
    -------
    DataFrame
        A row per MLA form and depth: ``model``, ``system``, ``precision``, ``profile``, ``isl`` [token],
        ``mla_form``, ``pp``, ``ep``, ``chunk_tokens`` [token], ``batch`` [request], ``gpus``, ``ftl_s``,
        ``request_rate_per_s``, ``tokens_per_s_per_gpu`` (prompt tokens, by the rate and not by 1/FTL),
        ``memory_bytes``, ``memory_limit_bytes`` and ``fits``. A depth of 1 is not chunked. ``attrs`` counts
        ``design_points``.
    """
    rows = [_row(study, profile, form, pp) for form in study.mla_forms for pp in study.pp]
    table = pd.DataFrame(rows)
    table.attrs = {"design_points": len(rows)}
    return table


def _row(study: Pipelining, profile: str, form: str, pp: int) -> dict[str, Any]:
    ranks = study.gpus // pp
    chunk = study.chunk_tokens if pp > 1 else 0
    grid = prefill_grid(
        study.model,
        study.system,
        Degrees(dp_attn=ranks, ep=ranks, pp=pp),
        isl=study.isl,
        precision=study.precision,
        profile=profile,
        batch=ranks,
        chunk_tokens=chunk,
        mla_form=form,
        allow_long_context=True,
    )
    at = int((grid.chunk_tokens == chunk).argmax())
    return {
        "model": study.model,
        "system": study.system,
        "precision": study.precision,
        "profile": profile,
        "isl": study.isl,
        "mla_form": form,
        "pp": pp,
        "ep": ranks,
        "chunk_tokens": chunk,
        "batch": ranks,
        "gpus": study.gpus,
        **_scored(grid, at, study),
    }


def _scored(grid: PhaseGrid, row: int, study: Pipelining) -> dict[str, Any]:
    rate = float(grid.request_rate[row, 0])
    return {
        "ftl_s": float(grid.latency[row, 0]),
        "request_rate_per_s": rate,
        "tokens_per_s_per_gpu": rate * study.isl / study.gpus,
        "memory_bytes": float(grid.memory_bytes[row, 0]),
        "memory_limit_bytes": grid.memory_limit,
        "fits": bool(grid.feasible[row, 0]),
    }
