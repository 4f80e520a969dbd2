"""``hw_specs/uncertainty/*.yaml``: spreads of calibrated times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg_sim.facts.efficiency import SECTIONS
from disagg_sim.facts.schema import choice, integer, line, mapping_of, number, schema_of, validate, values
from disagg_sim.facts.uncertainty import EngineSpread, KindSpread, UncertaintySpec
from disagg_sim.facts.yaml_files import spec_error

_share, _spread, _count = number(0.0, 1.0), number(0.0, 3.0), integer(0, 10**9)
_Kind = schema_of(KindSpread, {"shared": _share, "transfer": _spread, "transfer_across": _spread, "rows": _count})
_Engine = schema_of(
    EngineSpread,
    dict.fromkeys(("step", "first_token", "first_token_loaded", "throughput"), _spread)
    | {"shared": _share, "rows": _count},
)
_Spec = schema_of(
    UncertaintySpec,
    {
        "title": line(),
        "assumed": _spread,
        "per_doubling": _spread,
        "kinds": mapping_of(choice(SECTIONS), _Kind),
        "composed": mapping_of(str, _spread),
        "engines": mapping_of(str, _Engine),
        "sources": mapping_of(str, str),
    },
    without=("name",),
)


def uncertainty_of(path: Path, data: Mapping[str, Any], name: str) -> UncertaintySpec:
    """Spreads from their file; every operator kind needs one."""
    fields = values(validate(_Spec, data, path))
    faults = [f"kinds: missing key {kind!r}" for kind in SECTIONS if kind not in fields["kinds"]]
    faults += [] if fields["engines"] else ["engines: allowed: one engine or more"]
    if faults:
        raise spec_error(path, faults)
    fields["kinds"] = {key: KindSpread(**values(kind)) for key, kind in fields["kinds"].items()}
    fields["engines"] = {key: EngineSpread(**values(engine)) for key, engine in fields["engines"].items()}
    return UncertaintySpec(name=name, **fields)
