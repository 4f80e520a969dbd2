"""Workers that share no directory pass what they store through a bucket; the directory of results ends as any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from disagg_sim.errors import InputError, StoreError
from disagg_sim.scenario.plan import plan_scenario
from disagg_sim.scenario.run import run_scenario
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.sweep import bucket
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.elasticities import sweep_elasticities
from disagg_sim.sweep.fidelity import fidelity_of
from disagg_sim.sweep.plan import SweepPlan, plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.sweep.store import Store

SWEEP = """
name: small
models: [llama_3_1_8b]
systems: {h100_sxm: fp8}
traffic: [{isl: 1024, osl: 128}]
modes: [disaggregated, colocated]
limits: {max_gpus: 2}
block_points: 100
"""
SCENARIO = """
name: small
model: llama_3_1_8b
system: h100_sxm
precision: fp8
trace: {kind: synthetic, name: few, lengths: {isl: 100, osl: 10}, rate_per_s: 1, requests: 20}
slo: {ttft_s: 1.0, tpot_s: 0.1}
deployments: {one: {gpus: 1, colocated: {tp: 1, instances: 1}}}
policies: [vllm]
run: {records: stream}
"""
URL = "memory://results/small"
THROUGH = Workers(bucket=URL)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> SweepPlan:
    path = tmp_path_factory.mktemp("sweep") / "small.yaml"
    path.write_text(SWEEP)
    return plan_sweep(load_sweep(str(path)))


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    """The memory of this process is the bucket."""
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


def blocks(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.glob("*/*/*.parquet")}


def tables(root: Path) -> list[bytes]:
    return [(root / name).read_bytes() for name in ("frontier.csv", "infeasible.csv")]


def test_a_sweep_through_a_bucket_is_the_same_directory(plan: SweepPlan, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    alone = run_sweep(plan, one, jobs=1, listener=Mock(), outside=True)
    result = run_sweep(plan, two, jobs=THROUGH, listener=Mock(), outside=True)
    assert blocks(one) == blocks(two) == {name: MemoryFileSystem().cat_file(f"{URL}/{name}") for name in blocks(one)}
    assert tables(one) == tables(two)
    assert not blocks(bucket.scratch()).keys() & {
        block.key.relative.as_posix() for block in plan.cases[0].modes[0].points
    }
    bars = [fidelity_of(each, root, error_bars=True, jobs=jobs)[0].bands
            for each, root, jobs in ((alone, one, 1), (result, tmp_path / "gone", THROUGH))]  # fmt: skip
    assert bars[0].equals(bars[1])
    assert len(sweep_elasticities(result, tmp_path / "gone", jobs=THROUGH)) == 1


def test_what_workers_left_before_the_driver_died_is_brought(plan: SweepPlan, tmp_path: Path) -> None:
    """All but a block that is damaged there, and one that is not there: these are computed."""
    run_sweep(plan, tmp_path / "first", jobs=THROUGH, listener=Mock())
    files, keys = MemoryFileSystem(), [block.key for block in plan.blocks]
    files.pipe_file(f"{URL}/{keys[0].relative}", b"PAR1")
    files.rm_file(f"{URL}/{keys[-1].relative}")
    told = Mock()
    run_sweep(plan, tmp_path / "second", jobs=THROUGH, listener=told)
    assert told.note.call_args_list[0].args == (f"{len(keys) - 2} blocks brought from {URL}",)
    assert told.advance.call_count == 2
    assert tables(tmp_path / "first") == tables(tmp_path / "second")


def test_blocks_of_other_inputs_are_not_taken(plan: SweepPlan, tmp_path: Path) -> None:
    run_sweep(plan, tmp_path, jobs=THROUGH, listener=Mock())
    key = plan.blocks[0].key
    Store(Path(), URL).read(key)
    other = type(key)(key.table, key.group, key.name, "other inputs")
    with pytest.raises(StoreError, match=r"bucket memory://results/small: .* is not there, or is that of another run"):
        Store(Path(), URL).read(other)


def test_a_simulation_through_a_bucket_is_the_same_directory(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SCENARIO)
    plan = plan_scenario(load_scenario(str(tmp_path / "small.yaml")))
    found = [
        run_scenario(plan, tmp_path / name, jobs=jobs, listener=Mock()) for name, jobs in (("a", 1), ("b", THROUGH))
    ]
    assert blocks(tmp_path / "a") == blocks(tmp_path / "b")
    assert found[1].summary["wall_s"].notna().all()
    assert len((tmp_path / "b" / "timing.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "b" / "store.json").read_text())["holds"] == "scenario"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("results", "bucket 'results': no URL; allowed: s3://NAME/DIR"),
        ("nonsense://results", "bucket 'nonsense://results': Protocol not known: nonsense"),
    ],
)
def test_what_is_no_bucket_is_one_line(plan: SweepPlan, tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        run_sweep(plan, tmp_path, jobs=Workers(bucket=url), listener=Mock())


def test_a_bucket_that_cannot_be_written_is_one_line(plan: SweepPlan, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"bucket file://.*/file: cannot be written: "):
        run_sweep(plan, tmp_path / "out", jobs=Workers(bucket=f"file://{tmp_path}/file"), listener=Mock())
