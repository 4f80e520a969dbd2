"""How a mapping, a case or a rate is written where people read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from disagg_sim.sweep.plan import Case

if TYPE_CHECKING:
    import pandas as pd


def mapping_text(point: Mapping[str, Any], phase: str) -> str:
    """Mapping of one phase of a point: ``TP8``, ``DP32 EP32``, ``TP4 EP4 PP2``.

    One degree stands for both halves of a layer where they agree: ``TP8`` is attention and FFN,
    ``TP8 EP8`` attention over 8 and experts over the same 8. ``attn``/``ffn`` tell apart what differs.
    """
    tp, dp = int(point[f"{phase}_tp_attn"]), int(point[f"{phase}_dp_attn"])
    tp_ffn, ep, pp = (int(point[f"{phase}_{name}"]) for name in ("tp_ffn", "ep", "pp"))
    parts = [f"DP{dp}"] * (dp > 1)
    if tp == tp_ffn:
        parts += [f"TP{tp}"] * (tp > 1)
    else:
        parts += [f"TP{tp}"] * (tp > 1) + [f"FFN-TP{tp_ffn}"] * (tp_ffn > 1)
    parts += [f"EP{ep}"] * (ep > 1) + [f"PP{pp}"] * (pp > 1)
    return " ".join(parts) or "1 GPU"


def case_title(case: Case) -> str:
    """Case as a heading: model, system, recipe, shape."""
    return f"{case.model} on {case.system}, {case.precision}, {case.isl}/{case.osl} tokens ({case.profile})"


def overview_name(case: Case) -> str:
    """File name of the picture that compares the systems of a model and shape."""
    return f"{case.model}-{case.isl}-{case.osl}.png"


def ratio_text(point: Mapping[str, Any]) -> str:
    """Prefill to decode: instances and GPUs, ``3x8 : 2x16``."""
    prefill = f"{int(point['prefill_instances'])}×{int(point['prefill_gpus'])}"
    return f"{prefill} : {int(point['decode_instances'])}×{int(point['decode_gpus'])}"


def records(points: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of a table of points by column name."""
    return [{str(name): value for name, value in row.items()} for row in points.to_dict("records")]
