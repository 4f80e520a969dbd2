"""What the passes of designs are made of: every operator, its share of the time, its sizes and the fits behind it.

A pass is a sum of operator times, but for overlaps and for the slowest stage; where these do not change hands it is
linear in the time of each operator. ``uses_of`` takes that derivative by slowing one operator after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_sim.certainty.designs import Designs, Times, times_of
from disagg_sim.facts.efficiency import Fit
from disagg_sim.physics.layer import Operator
from disagg_sim.physics.rates import Rates
from disagg_sim.physics.setup import Setup

Floats = NDArray[np.float64]
Ranges = Mapping[str, tuple[Floats, Floats]]
_Key = tuple[str, str, str]  # name, kind and format

#: By how much an operator is slowed for its derivative: small, since the fastest kernel may change hands. [1]
SLOWED = 1e-4
#: Operator kinds as people read them, and the words under which their fits were taken (``Rates.used``).
LABELS = {
    "gemm": "GEMM",
    "prefill_attention": "prefill attention",
    "decode_attention": "decode attention",
    "experts": "experts",
    "elementwise": "elementwise kernels",
    "copy": "elementwise kernels",
    "all_reduce": "all-reduce",
    "gather": "expert gather",
    "all_to_all": "MoE exchange",
    "hop": "pipeline hop",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Use:
    """One operator of some designs; arrays have shape (rows,)."""

    phase: str  # whose mapping and setting it runs under: "decode" or "prefill"
    name: str
    kind: str  # of ``physics.layer.KINDS``
    format: str  # of a matrix multiply
    seconds: Times  # what it contributes to each pass [s]
    sizes: Ranges  # (least, largest) of each size, by the name that the kernel tables give it
    fits: tuple[Fit, ...]  # behind its time; none = an assumption of the profile
    architecture: str  # of the chip that it runs on

    @property
    def rows(self) -> int:
        """Designs. [1]"""
        return int(np.size(self.seconds.step))

    @property
    def label(self) -> str:
        """Kind as people read it."""
        return LABELS[self.kind]


def uses_of(designs: Designs, times: Times, wanted: Callable[[Use], bool] = lambda _: True) -> list[Use]:
    """Every operator of the designs that takes time in any of them.

    Parameters
    ----------
    times
        Of the designs, as ``times_of`` gives them.
    wanted
        Which operators are timed at all, by all that is known of them but their time.
    """

    def decode(at: Setup) -> Times:
        return times_of(designs.under(decode=at), fill=False)

    def prefill(at: Setup) -> Times:
        return times_of(designs.under(prefill=at), step=False)

    return [
        *uses_in("decode", designs.at, decode, times, wanted),
        *uses_in("prefill", designs.prefill_at, prefill, times, wanted),
    ]


def uses_in(
    phase: str, at: Setup, timed: Callable[[Setup], Times], times: Times, wanted: Callable[[Use], bool] = lambda _: True
) -> list[Use]:
    """Every operator that takes time where ``timed`` times passes of one phase under a setting; others stay zero.

    Parameters
    ----------
    times
        What ``timed`` gives under ``at``, and of the other phase whatever it is; arrays of shape (rows,).
    wanted
        As in ``uses_of``.
    """
    rows, found = int(np.size(times.step)), []
    nothing = Times(*(np.zeros(rows) for _ in times))
    for (name, kind, form), sizes in _recorded(at, timed, rows).items():
        fits = tuple(fits_of(at.rates, name, kind, form))
        use = Use(
            phase=phase,
            name=name,
            kind=kind,
            format=form,
            seconds=nothing,
            sizes=sizes,
            fits=fits,
            architecture=at.system.architecture,
        )
        if not wanted(use):
            continue
        seconds = Times(
            *(
                (after - before) / SLOWED if np.any(after) else np.zeros(rows)
                for after, before in zip(timed(_slowed(at, name, kind)), times, strict=True)
            )
        )
        if any(np.any(part) for part in seconds):
            found.append(replace(use, seconds=seconds))
    return found


def _adjusted(at: Setup, adjust: Callable[[Operator], Any]) -> Setup:
    return replace(at, rates=replace(at.rates, adjust=adjust))


def _slowed(at: Setup, name: str, kind: str) -> Setup:
    return _adjusted(at, lambda op: 1.0 + SLOWED if (op.name, op.kind) == (name, kind) else 1.0)


def _recorded(at: Setup, timed: Callable[[Setup], Times], rows: int) -> dict[_Key, Ranges]:
    """Names, kinds and formats of the operators of a phase, in order of first appearance, with their sizes."""
    seen: dict[_Key, dict[str, tuple[Floats, Floats]]] = defaultdict(dict)

    def record(op: Operator) -> float:
        mine = seen[op.name, op.kind, op.format]
        for size, values in sizes_of(op, latent=at.model.is_mla).items():
            low, high = _over_rows(values, rows)
            before = mine.get(size, (low, high))
            mine[size] = np.minimum(before[0], low), np.maximum(before[1], high)
        return 1.0

    timed(_adjusted(at, record))
    return dict(seen)


def _over_rows(values: Any, rows: int) -> tuple[Floats, Floats]:
    """Least and largest of each row: a value may be a number, one a row, or several a row (chunks)."""
    array = np.asarray(values, dtype=float)
    table = array if array.ndim == 2 else np.broadcast_to(array, rows)[:, None]
    return np.broadcast_to(table.min(axis=1), rows), np.broadcast_to(table.max(axis=1), rows)


def sizes_of(op: Operator, *, latent: bool) -> dict[str, Any]:
    """Sizes of an operator by the names that kernel tables give them (``calibration.kernels.forms``).

    Parameters
    ----------
    latent
        Whether attention is MLA, whose tables count heads alone.
    """
    match op.kind:
        case "gemm":
            return dict(zip(("m", "n", "k"), op.shape, strict=True))
        case "prefill_attention" | "decode_attention":
            shape = op.attention
            length = "seq_len" if op.kind == "prefill_attention" else "kv_len"
            heads = (
                {"heads": shape.q_heads}
                if latent
                else {"q_heads": shape.q_heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
            )
            return {"batch": shape.sequences, length: shape.longest, **heads}
        case "experts":
            rows = op.experts
            return {
                "num_tokens": op.size,
                "hidden": rows.hidden,
                "width": rows.width,
                "ep": op.ranks,
                "num_experts": rows.experts * op.ranks,
            }
        case "all_reduce" | "gather":
            return {"num_gpus": op.ranks, "message_bytes": op.size}
        case "all_to_all":
            return {"ep_size": op.ranks, "node_num": op.domains, "num_tokens": op.size}
    return {}


def fits_of(rates: Rates, name: str, kind: str, form: str) -> Iterator[Fit]:
    """Fits behind an operator, by the words under which ``physics.rates`` took them."""
    for what, fits in rates.used.items():
        words = what.partition(" (")[0]
        fitting = {
            "gemm": words == f"{form} GEMM",
            "experts": words == f"{form} MoE GEMM",
            "prefill_attention": words.endswith("prefill attention"),
            "decode_attention": words.endswith("decode attention"),
            "all_reduce": words == "all-reduce",
            "gather": words == name,
            "all_to_all": words in (name, f"{name} across domains"),
        }
        if fitting.get(kind, False):
            yield from fits
