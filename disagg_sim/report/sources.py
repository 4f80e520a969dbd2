"""List what the parts of a design rest on: entries of files, equations, errors of the fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from disagg_sim.certainty.breakdown import Breakdown
from disagg_sim.certainty.trust import trust_of_entry
from disagg_sim.report.words import records


def source_rows(found: Breakdown, row: Any) -> Iterator[tuple[str, ...]]:
    """List what the parts of a design rest on, each once: entry, equation, label, rows, errors, place, range.

    >>> import pandas as pd
    >>> from types import SimpleNamespace
    >>> name = "disagg_sim.physics.gemm.gemm_cost"
    >>> parts = pd.DataFrame({"row": [0], "operator": "head", "equation": name, "source": "h100_sxm.yaml:9 peak_flops"})
    >>> list(source_rows(SimpleNamespace(operators=parts, fits=pd.DataFrame({"row": [], "file": [], "entry": []})), 0))
    [('peak_flops', 'physics.gemm.gemm_cost', 'measured', '', '', '', 'h100_sxm.yaml:9', '')]
    """
    parts = found.operators[found.operators["row"] == row]
    equations = parts.assign(equation=parts["equation"].str.removeprefix("disagg_sim."))
    of_operator = dict(zip(equations["operator"], equations["equation"], strict=True))
    mine = found.fits[found.fits["row"] == row].drop_duplicates(["file", "entry"])
    known = set()
    for fit in records(mine):
        place = f"{fit['file']}:{fit['line']}"
        known.add(f"{place} {fit['entry']}")
        origin = f" of {fit['inherited_from']}" if fit["inherited_from"] else ""
        errors = f"{fit['median_error']:.1%}", f"{fit['p90_error']:.1%}"
        equation = of_operator.get(fit["operator"], "")
        engine = f"{fit['trust']}: {fit['engine']} {fit['version']}{origin}"
        yield fit["entry"], equation, engine, f"{fit['points']:,}", *errors, place, fit["range"]
    for sources, equation in dict(zip(equations["source"], equations["equation"], strict=True)).items():
        for source in filter(None, sources.split("; ")):
            place, _, entry = source.partition(" ")
            if source not in known:
                known.add(source)
                label = str(trust_of_entry(place, entry))
                yield entry, _ENGINE_EQUATIONS.get(entry) or equation, label, "", "", "", place, ""


#: Number of an engine profile -> function that takes it.
_ENGINE_EQUATIONS = {
    "step_host": "physics.passes.engine_time.host_time",
    "rank_host": "physics.passes.engine_time.host_time",
    "sequence_host": "physics.passes.engine_time.host_time",
    "kernel_launch": "physics.passes.engine_time.launch_time",
    "prefill_stretch": "physics.passes.engine_time.prefill_stretch",
    "exchange_stretch": "physics.cost.exchange_cost",
    "exchange_wait": "physics.cost.exchange_cost",
}


def entries_of(source: str) -> str:
    """Name the entries behind a part, without their places.

    >>> entries_of("h100_sxm.yaml:29 gemm[4]; trtllm.yaml:7 prefill_stretch")
    'gemm[4], prefill_stretch'
    """
    return ", ".join(each.partition(" ")[2] for each in source.split("; ") if each)
