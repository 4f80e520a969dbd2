"""Rules of the layouts that each engine supports, and the kinds of layouts that served runs have checked.

Rules are in ``hw_specs/layouts/``, one file an engine; checked kinds are in ``hw_specs/evidence/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from disagg_sim.facts.kinds import ATTENTION_KINDS
from disagg_sim.facts.schema import NOT_IN_FILE, Line, NotEmpty, OneOf, Range, Several, spec_of
from disagg_sim.facts.speculation import METHODS
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.notebook import Shown

#: How a degree may divide the GPUs of a stage: into groups of any size, or into one group or single GPUs.
GROUPS = ("any", "one_or_all")
#: What the forecast of a kind is judged by: TPOT or throughput, whichever has more points, else TTFT, else nothing.
JUDGED_BY = ("tpot", "throughput", "ttft", "nothing")

_Kind = Annotated[str, OneOf(lambda: tuple(ATTENTION_KINDS))]
_Method = Annotated[str, OneOf(METHODS)]
_Groups = Annotated[str, OneOf(GROUPS)]
_Count = Annotated[int, Range(1, 10**7)]
_Sequences = Annotated[float, Range(0.0, 1e7)]
_Error = Annotated[float, Range(0.0, 100.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingRules:
    """Where an engine lets GPUs share the tokens of a sequence."""

    kinds: Several[_Kind] = ()  # of attention
    beside: Several[_Kind] = ()  # kinds that may keep all tokens in other layers of the model
    architectures: Several[Line] = ()  # of GPUs, their first words; none = all
    with_dp: bool = False  # together with attention DP


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRules:
    """Methods of speculation that an engine supports in some layouts."""

    over_stages: Several[_Method] = ()  # of a pipeline
    with_dp: Several[_Method] = ()  # together with attention DP


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules(Shown):
    """Rules of an engine's layouts; it cannot start a mapping that breaks one of them."""

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    version: Line
    attention_groups: _Groups  # sizes of the TP groups of data-parallel attention
    expert_groups: _Groups  # EP degrees of a stage, its other GPUs cutting each expert
    redundant_slots: bool  # holds copies of experts
    pipelines: bool  # parts the layers over stages
    dcp: SharingRules  # GPUs of a TP group share cached tokens
    pcp: SharingRules  # attention ranks share prompts
    drafts: DraftRules  # speculative decoding
    weight_block: _Count  # weights under block-scaled fp8 are cut in multiples of so many [1]
    sources: Mapping[str, str]  # key -> where its value comes from


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedKind:
    """Layouts of one kind on one class of systems, and the served runs that the forecast was compared with."""

    family: Line  # of models
    systems: Line  # class of systems
    layout: Line
    most_gpus: _Count  # of the largest instance [1]
    most_sequences: _Sequences | None = None  # in flight on a GPU, of runs below saturation that say [1]
    rows: _Count  # measured runs [1]
    points: _Count  # distinct operating points among them [1]
    judged_by: Annotated[str, OneOf(JUDGED_BY)]  # what the forecast was compared in
    error: _Error | None  # absolute relative error that 3/4 of the points below saturation stay below; null = none [1]
    files: Annotated[Mapping[str, _Count], NotEmpty]  # file of the data -> runs [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceSpec(Shown):
    """Which kinds of layouts the forecast was compared with."""

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    kinds: Several[CheckedKind]
    source: str


def evidence_of(path: Path, data: Mapping[str, Any], name: str) -> EvidenceSpec:
    """Read runs and errors of each checked kind of layouts from their file, which must not name one twice. [1]"""
    spec = spec_of(EvidenceSpec, path, data, name)
    keys = [(kind.family, kind.systems, kind.layout) for kind in spec.kinds]
    if twice := sorted({", ".join(key) for key in keys if keys.count(key) > 1}):
        raise spec_error(path, [f"kinds: {each} stands there twice" for each in twice])
    return spec
