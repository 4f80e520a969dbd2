"""Frontiers of small cases against text in git: whatever moves one of their points shows in a diff.

``pytest tests/test_baselines.py --update-baselines`` is the only way to record them anew.
"""

from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

import disagg_sim as ds
from disagg_sim.facts.efficiency import SECTIONS, Fit
from disagg_sim.facts.kinds import ATTENTION_KINDS, FFN_KINDS
from disagg_sim.facts.layers import NONE
from disagg_sim.facts.load import load_efficiency, load_profile
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.facts.yaml_files import read_mapping
from disagg_sim.physics import setup
from disagg_sim.serving.colocated import colocated
from disagg_sim.serving.piggyback import piggyback
from disagg_sim.serving.points import CASE_COLUMNS
from disagg_sim.sweep.compare import FRONTIER, Comparison, FrontChange, PointChange, compare_fronts, read_frontier

BASELINES = Path(__file__).parent / "baselines"
PROFILES = ds.list_specs("profile")


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    system: str
    precision: str
    isl: int
    osl: int
    max_gpus: int
    _: KW_ONLY
    mode: str = "disaggregated"
    profile: str = "measured"
    engine: str | None = None
    matching: str = "exact"
    ftl_limit: float = 10.0
    gpu_cap: int = 64
    nic_limit: float | None = None
    max_dcp: int = 1
    max_pcp: int = 1


ROWS = read_mapping(Path(__file__).with_name("baselines.yaml"))
CASES = {name: Case(*row["of"], **{key: it for key, it in row.items() if key != "of"}) for name, row in ROWS.items()}


def front_of(name: str):
    """The frontier of a case, without the columns that the case itself states."""
    case = CASES[name]
    at = ds.setup(case.model, case.system, case.precision, case.profile, case.engine)
    lengths, mappings = (
        ds.lengths(case.isl, case.osl),
        ds.enumerate_mappings(at, max_gpus=case.max_gpus, max_dcp=case.max_dcp),
    )
    first = mappings
    if max(case.max_dcp, case.max_pcp) > 1:
        first = ds.enumerate_mappings(at, max_gpus=case.max_gpus, max_pcp=case.max_pcp)
    if case.mode == "disaggregated":
        points = ds.disaggregated(
            ds.prefill_grid(at, first, lengths),
            ds.decode_grid(at, mappings, lengths),
            ftl_limit=case.ftl_limit,
            gpu_cap=case.gpu_cap,
            matching=case.matching,
            nic_limit=case.nic_limit,
        )
    else:
        serve = {"colocated": colocated, "piggyback": piggyback}[case.mode]
        points = serve(at, mappings, lengths, ftl_limit=case.ftl_limit)
    front = ds.pareto_front(points).drop(
        columns=["prefill_mla_form", *(column for column in CASE_COLUMNS if column != "mode")]
    )
    front.insert(0, "case", name)
    return front


def compare_with_baseline(name: str) -> Comparison:
    return compare_fronts(read_frontier(BASELINES / f"{name}.csv").table, front_of(name), roles=FRONTIER)


def told(front: FrontChange) -> str:
    """What a failing test says: every point that was lost, is new, or moved."""

    def point(change: PointChange) -> str:
        return "{" + ", ".join(f"{column} {value}" for column, value in change.key) + "}"

    lines = [f"lost {point(change)}" for change in front.lost] + [f"new {point(change)}" for change in front.new]
    lines += [
        f"{move.column} {move.old} -> {move.new} ({move.relative:+.3%}) at {point(change)}"
        for change in front.moved
        for move in change.moves
        if not isinstance(move.old, str)
    ]
    return "\n".join([f"the frontier of {front.group[0]} moved:", *lines])


@pytest.mark.parametrize("name", CASES)
def test_the_frontier_is_the_recorded_one(name, update_baselines):
    if update_baselines:
        front_of(name).to_csv(BASELINES / f"{name}.csv", index=False, float_format="%.9g", lineterminator="\n")
        pytest.skip(f"recorded {name}.csv: read the diff before committing it")
    (front,) = compare_with_baseline(name).fronts
    if not front.same_points:
        pytest.fail(told(front), pytrace=False)


def test_every_case_has_a_baseline_and_no_baseline_is_orphaned():
    assert {path.name for path in BASELINES.iterdir()} == {f"{name}.csv" for name in CASES}


def scaled(spec: Any, name: str, factor: float) -> Any:
    """A frozen spec with the number ``name``, where it has one, times ``factor``."""
    value = getattr(spec, name)
    if isinstance(value, dict):
        return replace(spec, **{name: {key: number * factor for key, number in value.items()}})
    return replace(spec, **{name: value * factor}) if isinstance(value, float) else spec


def scaled_rows(spec: Any, section: str, name: str, factor: float) -> Any:
    """Fits of a system with the number ``name`` of every row of a section times ``factor``."""
    return replace(spec, **{section: tuple(scaled(row, name, factor) for row in getattr(spec, section))})


def some_baseline_moves() -> bool:
    return any(not front.same_points for name in CASES for front in compare_with_baseline(name).fronts)


#: Latency of an all-reduce that crosses NVLink domains: slow, hence on no frontier.
OFF_THE_FRONTIERS = ("nic_latency",)
#: Numbers of a fit that no pass here depends on: residuals and range; what stands behind the formula of a volume; work
#: of a kernel under test that serving does not give it, picks of other ranks and the quantising of A, which both fitted
#: profiles leave to the operator before; a sending kernel (33 GB/s) that the NICs of these systems never outrun.
WITHOUT_EFFECT = (
    *(field.name for field in fields(Fit)),
    "bytes_per_element",
    "stray",
    "e_quantise",
    "least_row",
    "token_bandwidth",
)
#: Fits that rows of kernels are compared with; passes take elementwise kernels from the profile.
OF_NO_PASS = ("elementwise",)
MEASURED = [name for name in ds.list_specs("efficiency") if not load_efficiency(name).inherited]
FITTED = [
    (section, field.name)
    for section, row in SECTIONS.items()
    for field in fields(row)
    if "float" in str(field.type)
    and section not in OF_NO_PASS
    and field.name not in WITHOUT_EFFECT
    and any(getattr(fit, field.name) for name in MEASURED for fit in getattr(load_efficiency(name), section))
]


@pytest.mark.parametrize(("section", "name"), FITTED)
def test_two_percent_on_a_fitted_number_moves_some_baseline(section, name, monkeypatch):
    monkeypatch.setattr(setup, "load_efficiency", lambda of: scaled_rows(load_efficiency(of), section, name, 1.02))
    assert some_baseline_moves()


@pytest.mark.parametrize(
    "name",
    [
        field.name
        for field in fields(ProfileSpec)
        if "float" in str(field.type)
        and field.name not in OFF_THE_FRONTIERS
        and any(getattr(load_profile(profile), field.name) for profile in PROFILES)
    ],
)
def test_two_percent_on_an_assumption_of_the_profiles_moves_some_baseline(name, monkeypatch):
    monkeypatch.setattr(setup, "load_profile", lambda of: scaled(load_profile(of), name, 1.02))
    assert some_baseline_moves()


@pytest.mark.parametrize("name", ["peak_flops", "hbm_reported", "hbm_bandwidth", "nvlink_bandwidth", "nic_bandwidth"])
def test_two_percent_on_a_vendors_number_moves_some_baseline(name, monkeypatch):
    monkeypatch.setattr(setup, "load_system", lambda of: scaled(ds.load_system(of), name, 1.02))
    assert some_baseline_moves()


def test_every_kind_of_layer_system_and_profile_has_a_baseline():
    models = [ds.load_model(case.model) for case in CASES.values()]
    kinds = [kind for model in models for kind in model.kinds]
    assert {kind.attention.kind for kind in kinds} == {*ATTENTION_KINDS, NONE}
    assert {kind.ffn.kind for kind in kinds} == {*FFN_KINDS, NONE}
    assert any(getattr(kind.attention, "window", None) for kind in kinds)
    grouped = [kind.attention for kind in kinds if kind.attention.kind == "gqa"]
    assert any(spec.q_heads == spec.kv_heads for spec in grouped)
    assert set(MEASURED) <= {case.system for case in CASES.values()}
    assert any(load_efficiency(case.system).inherited for case in CASES.values())
    assert {case.profile for case in CASES.values()} == set(PROFILES)
    assert {case.matching for case in CASES.values()} == {"exact", "paper"}
    assert {case.mode for case in CASES.values()} == {"disaggregated", "colocated", "piggyback"}
    assert {case.precision for case in CASES.values()} == set(ds.list_specs("precision"))


def test_a_failure_names_what_was_lost_is_new_and_moved():
    front = front_of("llama_8b_h100_fp8")
    changed = front.iloc[:-1].copy()
    changed.loc[0, "tokens_per_s_per_gpu"] *= 1.02
    (found,) = compare_fronts(front, changed, roles=FRONTIER).fronts
    text = told(found)
    assert f"lost {{prefill_tp_attn {front['prefill_tp_attn'].iloc[-1]}" in text
    assert "tokens_per_s_per_gpu" in text
    assert "(+2.000%)" in text
