"""Fitted power of kernels: watts of a GPU board by class of kernel, with the data behind each fit.

One file per system in ``hw_specs/power/``, apart from the vendor's facts. The form is ``physics.power``; shares are of
the power limit, so that a system without measurements takes over those of another at its own TDP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from disagg_sim.facts.efficiency import DataFile, Fit, Heir
from disagg_sim.facts.schema import NOT_IN_FILE, OneOf, Quantity, Range, keys_of, validate
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.notebook import Shown

#: Operator kinds (``physics.work.KINDS``) that have laws of their own.
POWER_KINDS = ("gemm", "prefill_attention", "decode_attention", "attention_part", "experts", "elementwise")
#: Kind whose laws stand for a kind that no table holds.
STAND_IN = "gemm"
#: Form of attention over sliding windows; where a system has none, that of whole contexts stands for it.
WINDOWED = "gqa_window"

_Share = Annotated[float, Range(0.0, 20.0)]
_Exponent = Annotated[float, Range(0.05, 3.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLaw(Fit):
    """Power of one class of kernels; the form is ``physics.power.kernel_power``."""

    kind: Annotated[str, OneOf(POWER_KINDS)]
    form: str = ""  # weight format; kind of attention and its formats; part of attention
    base: _Share  # of a kernel that neither multiplies nor moves much [1]
    compute: _Share = 0.0  # on top at the peak of its arithmetic [1]
    compute_power: _Exponent = 1.0
    memory: _Share = 0.0  # on top at the bandwidth of HBM [1]
    memory_power: _Exponent = 1.0
    gap: Annotated[float, Quantity("s", 0.0, 1.0)] = 0.0  # time of a kernel at which half of that is drawn [s]


@dataclass(frozen=True, kw_only=True)
class PowerSpec(Shown):
    """Power of the kernels of one system."""

    system: str  # the system that uses them
    measured_on: Annotated[str, NOT_IN_FILE]  # the system that was measured
    data: str  # data set
    date: str  # of the data
    limit: Annotated[float, Quantity("W", 10.0, 10_000.0)]  # under which rows were measured [W]
    idle: Annotated[float, Range(0.0, 1.0)]  # of a GPU that waits, share of the limit [1]
    laws: tuple[PowerLaw, ...]
    files: tuple[DataFile, ...] = ()  # tables that the fits were made from, where the file says so

    @property
    def inherited(self) -> bool:
        """Whether these fits were made on another system."""
        return self.system != self.measured_on

    def law_of(self, kind: str, form: str, engine: str = "") -> PowerLaw:
        """Find the law of a kernel: of its kind, then its form, then its engine."""
        mine = [law for law in self.laws if law.kind == kind] or [law for law in self.laws if law.kind == STAND_IN]
        ranks = {form: 0, "bf16": 1, "gqa": 1}
        return min(mine, key=lambda law: (ranks.get(law.form, 2), law.engine != engine))


def power_of(path: Path, data: Mapping[str, Any], load: Callable[[str], PowerSpec]) -> PowerSpec:
    """Read the power of one system's kernels: its own laws, or those of a parent by share of the power limit [W]."""
    if "inherits" in data:
        heir = Heir(**dict(validate(keys_of(Heir), data, path)))
        parent = load(heir.inherits)
        laws = tuple(replace(law, inherited_from=parent.measured_on) for law in parent.laws)
        return replace(parent, system=heir.system, laws=laws)
    fields = dict(validate(keys_of(PowerSpec), data, path))
    if not any(law.kind == STAND_IN for law in fields["laws"]):
        raise spec_error(path, [f"laws: none is of kind {STAND_IN!r}, which stands for kinds without one"])
    return PowerSpec(measured_on=fields["system"], **fields)
