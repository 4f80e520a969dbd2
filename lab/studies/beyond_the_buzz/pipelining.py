"""Chunked pipelined prefill of very long prompts (figure 5 of arXiv 2506.05508): depth against expert ranks.

The GPUs of an instance stay while PP takes over from EP, at one prompt an attention rank. Deeper
pipelines hold fewer prompts at a time, so the first token comes earlier and the request rate stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import AfterValidator

from disagg_sim.domain import Sharding
from disagg_sim.facts import load
from disagg_sim.facts.faults import SeveralFaultsError
from disagg_sim.facts.schema import Axis, OneOf, Range, Title, keys_of, validate
from disagg_sim.facts.yaml_files import read_mapping
from disagg_sim.physics.blocks import MLA_FORMS
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.search.grid import prefill_grid
from disagg_sim.workload.lengths import lengths

#: ``kind`` of such a file; a file without one is a sweep.
KIND = "pipelined_prefill"
#: Prompt [token] and GPUs of an instance, EP x PP, of figure 5.
PROMPT, GPUS = 262_144, 64


def _stages_divide(depths: tuple[int, ...], info: Any) -> tuple[int, ...]:
    gpus = info.data.get("gpus", math.prod(depths))
    if wrong := [depth for depth in depths if gpus % depth]:
        raise SeveralFaultsError(((), f"{depth} does not divide {gpus} GPUs") for depth in wrong)
    return depths


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelining:
    """Parameters that figure 5 varies, and those that it fixes: keys of a file of ``kind: pipelined_prefill``."""

    kind: Annotated[str, OneOf((KIND,))]
    name: Title
    model: Annotated[str, load.spec_name("model")]
    system: Annotated[str, load.spec_name("hardware")]
    precision: Annotated[str, load.spec_name("precision")]
    isl: Annotated[int, Range(1, 10**9)]  # [token]
    gpus: Annotated[int, Range(1, 10**4)]  # of an instance, EP x PP [1]
    pp: Annotated[Axis[Annotated[int, Range(1, 10**4)]], AfterValidator(_stages_divide)]  # stages [1]
    chunk_tokens: Annotated[int, Range(1, 10**9)]  # wherever there is a pipeline [token]
    mla_forms: Axis[Annotated[str, OneOf(MLA_FORMS)]]


def load_pipelining(path: Path) -> Pipelining:
    """Read a file of ``kind: pipelined_prefill``."""
    return Pipelining(**dict(validate(keys_of(Pipelining), read_mapping(path), path)))


def pipelined_prefill(study: Pipelining, *, profile: str) -> pd.DataFrame:
    """FTL and rate of every depth of the pipeline.

    Returns a row per MLA form and depth: ``model``, ``system``, ``precision``, ``profile`` and the columns of
    ``depth_row``.
    """
    at = setup(study.model, study.system, study.precision, profile)
    about = {"model": study.model, "system": study.system, "precision": study.precision, "profile": profile}
    sizes = {"isl": study.isl, "gpus": study.gpus, "chunk_tokens": study.chunk_tokens}
    rows = [about | depth_row(at, pp, mla_form=form, **sizes) for form in study.mla_forms for pp in study.pp]
    return pd.DataFrame(rows)


def depth_row(
    at: Setup, pp: int, *, chunk_tokens: int, mla_form: str = "cached", isl: int = PROMPT, gpus: int = GPUS
) -> dict[str, Any]:
    """Score a depth of the pipeline; one stage is not chunked.

    Returns ``isl`` [token], ``mla_form``, ``pp``, ``ep``, ``chunk_tokens`` [token], ``batch`` [request], ``gpus``,
    ``ftl_s``, ``request_rate_per_s``, ``tokens_per_s_per_gpu`` (prompt tokens, by the rate and not by 1/FTL),
    ``memory_bytes``, ``memory_limit_bytes`` and ``fits``.
    """
    ranks, chunk = gpus // pp, chunk_tokens if pp > 1 else 0
    grid = prefill_grid(
        at,
        Sharding(dp_attn=ranks, ep=ranks, pp=pp),
        lengths(isl, 2),
        batch=ranks,
        chunk_tokens=chunk,
        mla_form=mla_form,
        allow_long_context=True,
    )
    row = int((grid.mappings.chunk_tokens == chunk).argmax())
    rate = float(grid.request_rate[row, 0])
    return {
        "isl": isl,
        "mla_form": mla_form,
        "pp": pp,
        "ep": ranks,
        "chunk_tokens": chunk,
        "batch": ranks,
        "gpus": gpus,
        "ftl_s": float(grid.latency[row, 0]),
        "request_rate_per_s": rate,
        "tokens_per_s_per_gpu": rate * isl / gpus,
        "memory_bytes": float(grid.memory_bytes[row, 0]),
        "memory_limit_bytes": grid.memory_limit,
        "fits": bool(grid.feasible[row, 0]),
    }
