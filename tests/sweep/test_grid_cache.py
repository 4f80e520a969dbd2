"""Points are the same whichever blocks were scored before, what is kept, and beside which side tables."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.certainty.trust import Trust, shares_of_text
from disagg_sim.cli.main import run as command
from disagg_sim.errors import UnknownNameError
from disagg_sim.sweep import compute, grid_cache
from disagg_sim.sweep.fidelity import candidates
from disagg_sim.sweep.plan import PREFILL, Block, plan_sweep
from disagg_sim.sweep.results import GatheredFront, SweepResult
from disagg_sim.sweep.run import POINTS, POOLS, run_sweep
from disagg_sim.sweep.run import PREFILL as PREFILL_TABLE
from disagg_sim.sweep.spec import PointLimits, SweepSpec, load_sweep
from disagg_sim.sweep.store import WRITTEN, Store

SWEEP = """
name: shared
models: [llama_3_1_8b]
systems: {h200_sxm: fp8}
traffic: [{isl: 4096, osl: 512}]
block_points: 400
limits: {max_gpus: 8, gpu_cap: 64, one_gpu_stages: [%s]}
"""


def blocks(folder: Path, stages: str) -> list[list[Block]]:
    """Blocks of the pools of each case, prefill first."""
    (folder / "shared.yaml").write_text(SWEEP % stages)
    return [list(case.modes[0].blocks) for case in plan_sweep(load_sweep(str(folder / "shared.yaml"))).cases]


@pytest.fixture(autouse=True)
def nothing_kept():
    grid_cache._kept.clear()


MANY = """
name: many
models: [llama_3_1_8b]
systems: {h200_sxm: fp8}
traffic:
%s
modes: [disaggregated]
limits: {max_gpus: 2, gpu_cap: 8}
"""
LENGTHS = [(isl, osl) for isl in (1024, 3000) for osl in (128, 256, 512, 1024)]


def many(folder: Path):
    (folder / "many.yaml").write_text(MANY % "\n".join(f"  - {{isl: {isl}, osl: {osl}}}" for isl, osl in LENGTHS))
    return plan_sweep(load_sweep(str(folder / "many.yaml")))


def test_small_grids_of_unlike_lengths_are_scored_together(tmp_path, monkeypatch):
    """Eight cases in groups of three: three evaluations of decode, each to the last digit as by itself."""
    decode = [block for block in many(tmp_path).blocks if block.key.table != PREFILL]
    alone = [grid_cache._new([block])[0] for block in decode]
    groups = grid_cache.groups(decode, 3)
    assert [len(group) for group in groups] == [3, 3, 2]
    asked = Mock(side_effect=grid_cache.decode_grids)
    monkeypatch.setattr(grid_cache, "decode_grids", asked)
    found = []
    for group in groups:
        grid_cache.score_group(group)
        found += [grid_cache.scored(block) for block in group]
    assert asked.call_count == 3
    for grid, expected in zip(found, alone, strict=True):
        assert grid.lengths == expected.lengths
        assert grid.latency.tobytes() == expected.latency.tobytes()
        assert grid.memory_bytes.tobytes() == expected.memory_bytes.tobytes()


def test_large_blocks_and_those_of_other_setups_are_computed_alone(tmp_path, monkeypatch):
    first, second, *_ = [block for block in many(tmp_path).blocks if block.key.table == PREFILL]
    assert grid_cache.groups([first, second], 4) == [[first, second]]
    monkeypatch.setattr(grid_cache, "BLOCK_POINTS", first.points - 1)
    assert grid_cache.groups([first, second], 4) == [[first], [second]]
    wide, narrow = blocks(tmp_path, "true, false")
    assert [len(group) for group in grid_cache.groups([wide[0], narrow[0]], 4)] == [1, 1]


def test_a_block_that_fails_takes_none_of_its_group_along(tmp_path, monkeypatch):
    plan, whole, listener = many(tmp_path), compute._compute, Mock()
    last = plan.cases[-1].modes[0].points[0].key

    def failing(task, block):
        if block.key == last:
            raise RuntimeError("no luck")
        return whole(task, block)

    monkeypatch.setattr(compute, "_compute", failing)
    result = run_sweep(plan, tmp_path / "out", jobs=1, listener=listener)
    (said,) = [call.args[0] for call in listener.warn.call_args_list]
    assert said.startswith(f"{last.relative}: failed 3 times: RuntimeError: no luck")
    assert [len(case.found) for case in result.cases] == [1] * 7 + [0]


X, Y = "tokens_per_s_per_user", "tokens_per_s_per_gpu"

points = st.tuples(st.integers(1, 6), st.integers(1, 6))


@settings(max_examples=30)
@given(st.lists(st.lists(points, max_size=4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_blocks_may_arrive_in_any_order(blocks, dice):
    """By hand: no other point is as good in both and better in one, and of equal ones the first block's stays."""
    held = [(*point, number) for number, block in enumerate(blocks) for point in block]
    best = {
        min(other for other in held if other[:2] == point[:2])
        for point in held
        if not any(o[:2] != point[:2] and o[0] >= point[0] and o[1] >= point[1] for o in held)
    }
    front = GatheredFront(Y)
    order = list(enumerate(blocks))
    dice.shuffle(order)
    for number, block in order:
        front.add(number, pd.DataFrame({X: [p[0] for p in block], Y: [p[1] for p in block], "block": number}))
        front.rows()  # asked for in between, too
    found = front.rows()
    assert {tuple(row) for row in found.itertuples(index=False)} == best
    assert found.empty or found[X].is_monotonic_increasing


@pytest.fixture(scope="module")
def spec():
    smoke = load_sweep("smoke")
    return replace(
        smoke, pools=smoke.pools[:1], modes=("disaggregated",), block_points=4096, limits=(PointLimits(max_gpus=8),)
    )


def run(spec: SweepSpec, root: Path, keep: str) -> SweepResult:
    return run_sweep(plan_sweep(spec, keep=keep), root, jobs=1, listener=Mock())


def test_what_is_kept_changes_no_table(spec, tmp_path):
    """Neither the tables, nor the points that error bars and elasticities start from."""
    everything, near = (run(spec, tmp_path / keep, keep) for keep in ("points", "frontier"))
    for name in ("frontier.csv", "infeasible.csv"):
        assert (tmp_path / "frontier" / name).read_bytes() == (tmp_path / "points" / name).read_bytes()
    of_all, of_near = (
        candidates(result.cases[0], Store(tmp_path / keep), Y)
        for result, keep in ((everything, "points"), (near, "frontier"))
    )
    pd.testing.assert_frame_equal(of_all, of_near)
    sizes = [
        sum(len(Store(tmp_path / keep).read(block.key)) for block in result.plan.cases[0].modes[0].points)
        for result, keep in ((everything, "points"), (near, "frontier"))
    ]
    assert len(near.cases[0].modes[0].frontier) < sizes[1] < 0.7 * sizes[0]
    lost = near.plan.blocks[-1].key.relative  # as after a kill
    (tmp_path / "frontier" / lost).unlink()
    before = (tmp_path / "frontier" / "frontier.csv").read_bytes()
    again = Mock()
    run_sweep(near.plan, tmp_path / "frontier", jobs=1, listener=again)
    again.note.assert_called_with(f"{len(near.plan.blocks) - 1} of {len(near.plan.blocks)} blocks already stored")
    assert (tmp_path / "frontier" / "frontier.csv").read_bytes() == before


def test_an_unknown_word_for_what_to_keep_is_one_line(spec):
    with pytest.raises(UnknownNameError, match="unknown --keep 'frontiers', did you mean 'frontier'"):
        plan_sweep(spec, keep="frontiers")


TINY = """
name: tiny
models: [llama_3_1_8b]
systems: {gh200: fp8}
traffic: [{isl: 1024, osl: 128}]
modes: [disaggregated, colocated]
limits: {ftl_s: 5.0, gpu_cap: 4, max_gpus: 2}
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    root = tmp_path_factory.mktemp("fidelity")
    (root / "tiny.yaml").write_text(TINY)
    assert command(["sweep", str(root / "tiny.yaml"), "--out", str(root / "out"), "--jobs", "1"]) == 0
    plain = {path.name: path.read_bytes() for path in (root / "out").glob("*.csv")}
    asked = ["sweep", str(root / "tiny.yaml"), "--out", str(root / "out"), "--jobs", "1", "--uncertainty"]
    assert command(asked) == 0
    return root, plain


def test_error_bars_leave_the_frontier_as_it_is(swept):
    root, plain = swept
    assert (root / "out" / "frontier.csv").read_bytes() == plain["frontier.csv"]
    assert "uncertainty.csv" not in plain
    assert "outside_calibration.csv" in plain


def test_every_frontier_point_has_its_band(swept):
    root, _ = swept
    front, bands = (pd.read_csv(root / "out" / f"{name}.csv") for name in ("frontier", "uncertainty"))
    assert len(bands) == len(front)
    for name in ("tokens_per_s_per_gpu", "tokens_per_s_per_user"):
        assert (bands[f"{name}_p10"] < bands[name]).all()
        assert (bands[name] < bands[f"{name}_p90"]).all()
    assert (bands["frontier_p10"] <= bands["frontier_p90"]).all()
    assert (bands["ttl_p10_s"] < bands["ttl_p90_s"]).all()


def test_every_point_of_a_frontier_says_what_it_rests_on(swept):
    """All kernels are those of another system: most of the time of any design is inherited."""
    root, _ = swept
    front = pd.read_csv(root / "out" / "frontier.csv")
    shares = front["rests_on"].map(shares_of_text)
    assert (shares.map(lambda each: each[Trust.INHERITED]) > 0.5).all()
    assert shares.map(lambda each: sum(each.values())).between(0.95, 1.02).all()
    summary = (root / "out" / "summary.md").read_text()
    assert any(f"| {words} |" in summary for words in front["rests_on"])


def test_elasticities_of_a_sweep(swept, capsys):
    root, _ = swept
    assert command(["sensitivity", str(root / "tiny.yaml"), "--out", str(root / "out"), "--jobs", "1"]) == 0
    assert "hbm_bandwidth" in capsys.readouterr().out
    table = pd.read_csv(root / "out" / "sensitivity.csv")
    assert set(table["parameter"]) >= {"flops", "hbm_bandwidth", "hbm_capacity"}
    capacity = table[table["parameter"] == "hbm_capacity"]
    assert (capacity["throughput"] == 0).all()
    assert capacity["frontier"].notna().any()
    assert (capacity["frontier"].dropna() > -0.05).all()
    assert np.isfinite(table["ttl"]).all()
    left = {path.name for path in (root / "out").iterdir()}
    assert left <= {*WRITTEN, PREFILL_TABLE, POINTS, POOLS, ".lock"}  # none of these takes the place of somebody else's
