"""``hw_specs/engines/*.yaml``: how a serving engine forms its steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg_sim.errors import nearest, quoted
from disagg_sim.facts.engine import EngineSpec
from disagg_sim.facts.schema import choice, integer, line, mapping_of, number, quantity, schema_of, validate, values
from disagg_sim.facts.yaml_files import spec_error

_time = quantity("s", 0.0, 1.0)
_Engine = schema_of(
    EngineSpec,
    dict.fromkeys(("step_host", "sequence_host", "rank_host", "kernel_launch", "request_host"), _time)
    | dict.fromkeys(("chunk_tokens", "max_running"), integer(1, 10**7))
    | {
        "kernels": choice(("vllm", "sglang", "trtllm")),
        "memory_utilisation": number(1e-6, 1.0),
        "prefill_stretch": number(1.0, 10.0),
        "cache_share": number(1e-6, 1.0),
        "cache_of_quantised": choice(("bf16", "fp8")),
        "title": line(),
        "sources": mapping_of(str, str),
    },
    without=("name",),
)


def engine_of(path: Path, data: Mapping[str, Any], name: str) -> EngineSpec:
    """A serving engine from its file; every value needs a source."""
    fields = values(validate(_Engine, data, path))
    told = set(fields) - {"title", "sources"}
    faults = [f"sources: unknown key {quoted(key)}{nearest(key, told)}" for key in fields["sources"] if key not in told]
    faults += [f"sources: missing key {key!r}" for key in sorted(told - set(fields["sources"]))]
    if faults:
        raise spec_error(path, faults)
    return EngineSpec(name=name, **fields)
