"""Whole runs of small sweeps: the same tables whoever computes them, and however often they are interrupted."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from disagg_sim.errors import DisaggSimError, InfeasibleError, StoreError
from disagg_sim.parquet import parquet_metadata, read_parquet, write_parquet
from disagg_sim.report.summary import summary
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.sweep.cases import axis_columns, cases_of
from disagg_sim.sweep.compute import BlockTask, StoredBlock, compute_blocks
from disagg_sim.sweep.plan import SweepPlan, plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import PointLimits, SweepSpec, load_sweep, same_system
from disagg_sim.sweep.tally import ABOVE_FTL, ABOVE_NIC, Removal, detail

COLUMNS = """case, model, system, precision, profile, mode, isl, osl, tokens_per_s_per_user, tokens_per_s_per_gpu,
ftl_s, ttl_s, prefill_tp_attn, prefill_dp_attn, prefill_tp_ffn, prefill_ep, prefill_pp, prefill_chunk_tokens,
prefill_batch, prefill_instances, prefill_gpus, decode_tp_attn, decode_dp_attn, decode_tp_ffn, decode_ep, decode_pp,
decode_microbatches, decode_batch, decode_instances, decode_gpus, total_gpus, ctx_gen_gpu_ratio, request_rate_per_s,
kv_egress_bytes_per_s_per_gpu, kv_ingress_bytes_per_s_per_gpu, prefill_memory_bytes, decode_memory_bytes,
decode_bound"""

COMMAND = [sys.executable, "-c", "from disagg_sim.cli.main import main; main()", "sweep"]


class Log:
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.planned = self.done = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def start(self, points: int) -> None:
        self.planned = points

    def advance(self, points: int) -> None:
        self.done += points

    def finish(self) -> None:
        pass


@pytest.fixture(scope="module")
def smoke():
    return plan_sweep(load_sweep("smoke"))


@pytest.fixture(scope="module")
def reference(smoke, tmp_path_factory):
    """Results of one uninterrupted run in one process; not to be changed."""
    root = tmp_path_factory.mktemp("reference")
    run_sweep(smoke, root, jobs=1, listener=Log())
    return root


def small(spec: SweepSpec, **limits: float) -> SweepPlan:
    """The first system of the smoke sweep, in few blocks, under other limits."""
    return plan_sweep(
        replace(spec, pools=spec.pools[:1], block_points=4096, limits=(replace(PointLimits(max_gpus=8), **limits),))
    )


def manifest(root: Path) -> dict:
    return json.loads((root / "manifest.json").read_text())


def test_the_frontier_has_the_promised_columns_in_order(reference):
    promised = [name.strip() for name in COLUMNS.replace("\n", " ").split(",")]
    frontier = pd.read_csv(reference / "frontier.csv")
    assert frontier.columns[: len(promised)].tolist() == promised
    assert not frontier[promised].isna().any().any()


def test_no_cell_of_a_table_reads_back_as_empty(reference):
    frontier, removed = (pd.read_csv(reference / name) for name in ("frontier.csv", "infeasible.csv"))
    for table in (frontier, removed):
        assert not table.isna().any().any()
    assert set(frontier["engine"]) == set(frontier["prefill_engine"]) == {"trtllm", "vllm"}
    assert set(frontier["inherited_fits"]) == {"-"}
    assert (frontier[["ttl_limit_s", "nic_limit_bytes_per_s"]] == float("inf")).all().all()
    refused = removed["phase"] == "mapping"
    assert (removed["closest_shortfall"] == float("inf"))[refused].all()
    assert set(removed[refused]["unit"]) == set(removed[refused]["detail"]) == {"-"}
    memory = removed[removed["reason"] == "out of memory"]
    assert memory["closest_shortfall"].between(0, 1e13).all()
    assert set(memory["unit"]) == {"B"}


@pytest.mark.parametrize(
    ("system", "domain", "max_gpus", "limit"),
    [
        ("h100_sxm", None, None, 128),
        ("h100_sxm", None, 16, 16),
        ("h100_sxm", 576, None, 576),
        ("h100_sxm", 8, 900, 128),
    ],
)
def test_the_limit_of_an_instance_is_the_one_in_force(smoke, system, domain, max_gpus, limit):
    spec = replace(
        smoke.spec,
        models=("deepseek_r1",),
        pools=(same_system(system, "fp8"),),
        nvlink_domains=(domain,),
        limits=(PointLimits(max_gpus=max_gpus),),
    )
    case = cases_of(spec)[0]
    mappings = enumerate_mappings(case.decode_setup, max_gpus=max_gpus)
    assert axis_columns(case)["max_instance_gpus"] == limit
    assert limit / 2 <= mappings.gpus.max() <= limit  # 256 experts do not part over 576 GPUs


def stored_points(folder: Path) -> pd.DataFrame:
    """All blocks below a folder."""
    return pd.concat([read_parquet(path) for path in sorted(folder.rglob("[!.]*.parquet"))], ignore_index=True)


def test_every_frontier_point_is_a_stored_point_and_none_beats_it(reference):
    frontier = pd.read_csv(reference / "frontier.csv")
    points = stored_points(reference / "points")
    assert set(frontier["case"]) == set(points["case"])
    assert set(frontier["mode"]) == {"disaggregated", "colocated", "piggyback"}
    for (case, mode), front in frontier.groupby(["case", "mode"]):
        cloud = points[(points["case"] == case) & (points["mode"] == mode)]
        x, y = front["tokens_per_s_per_user"].to_numpy(), front["tokens_per_s_per_gpu"].to_numpy()
        assert (x[1:] > x[:-1]).all()
        assert (y[1:] < y[:-1]).all()
        for row in cloud.itertuples():
            better = (x >= row.tokens_per_s_per_user * (1 - 1e-9)) & (y >= row.tokens_per_s_per_gpu * (1 - 1e-9))
            assert better.any()


def test_the_dry_count_is_what_is_computed(smoke, reference):
    counts = manifest(reference)["points"]
    assert counts["enumerated"] == counts["computed"] == smoke.points == sum(case.points for case in smoke.cases)
    assert 0 < counts["feasible"] <= counts["computed"]
    assert len(smoke.blocks) >= 20


def test_counts_close(reference):
    """Every design point is out of memory, beyond a limit, unmatched, or usable; every matched one is stored."""
    removed = pd.read_csv(reference / "infeasible.csv")
    for case in manifest(reference)["cases"]:
        mine = removed[removed["case"] == case["case"]]
        memory = mine[mine["reason"] == "out of memory"]["count"].sum()
        assert case["points"]["feasible"] + memory == case["points"]["computed"]
        stored = stored_points(reference / "points" / case["case"])
        assert len(stored) == sum(mode["rows"] for mode in case["modes"].values())


def test_two_jobs_give_the_same_bytes(smoke, reference, tmp_path):
    log = Log()
    run_sweep(smoke, tmp_path, jobs=2, listener=log)
    assert contents(tmp_path) == contents(reference)
    assert len(contents(tmp_path)) > len(smoke.blocks)
    assert log.done == log.planned == smoke.points


def test_damaged_blocks_of_all_kinds_are_computed_again_with_a_line(smoke, reference, tmp_path):
    """A flipped bit in each of some blocks, a doubled column, and blocks of a version without checksums."""
    shutil.copytree(reference, tmp_path, dirs_exist_ok=True)
    dice = random.Random(3)
    flipped, rewritten, old = smoke.blocks[:20], smoke.blocks[30], smoke.blocks[40:43]
    for block in flipped:
        path = tmp_path / block.key.relative
        data = bytearray(path.read_bytes())
        data[dice.randrange(4, len(data) - 4)] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
    path = tmp_path / rewritten.key.relative
    write_parquet(read_parquet(path).head(1), path, parquet_metadata(path))
    for block in old:
        path = tmp_path / block.key.relative
        write_parquet(read_parquet(path), path, {"disagg_sim.digest": block.key.digest})
    log = Log()
    run_sweep(smoke, tmp_path, jobs=1, listener=log)
    assert sum("corrupt block, computing it again" in text for text in log.warnings) == len(flipped) + 1 + len(old)
    assert f"{len(smoke.blocks) - 24} of {len(smoke.blocks)} blocks already stored" in log.notes
    assert contents(tmp_path) == contents(reference)


def contents(root: Path) -> dict[str, bytes]:
    """Every file of a run, the manifest without what it says of the run itself: the same on every machine."""
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    own = manifest(root)
    del own["run"]
    return files | {"manifest.json": json.dumps(own).encode()}


def test_changed_inputs_make_blocks_stale(smoke, tmp_path):
    plan = small(smoke.spec)
    run_sweep(plan, tmp_path, jobs=1, listener=Log())
    log = Log()
    recut = plan_sweep(replace(plan.spec, block_points=200))
    run_sweep(recut, tmp_path, jobs=1, listener=log)
    assert f"{len(plan.blocks)} stored blocks are stale (their inputs changed): computing them again" in log.notes
    assert log.done == recut.points
    other = small(smoke.spec, ftl_s=5.0)  # another case: the blocks of the first leave the table
    log = Log()
    run_sweep(other, tmp_path, jobs=1, listener=log, overwrite=True)
    assert any("not part of this sweep" in text for text in log.notes)
    assert set(stored_points(tmp_path / "points")["case"]) == {other.cases[0].case.name}


def test_a_changed_spec_changes_every_digest(smoke, tmp_path, monkeypatch):
    source = Path(__file__).parents[2] / "hw_specs" / "h100_sxm.yaml"
    text = re.sub(r"(?m)^hbm_bandwidth:.*$", "hbm_bandwidth: 3.0 TB/s", source.read_text())
    assert text != source.read_text()
    (tmp_path / "hw_specs").mkdir()
    (tmp_path / "hw_specs" / source.name).write_text(text)
    before = small(smoke.spec)
    monkeypatch.setenv("DISAGG_SIM_PATH", str(tmp_path))
    after = small(smoke.spec)
    assert before.cases[0].case == after.cases[0].case
    assert not {block.key.digest for block in before.blocks} & {block.key.digest for block in after.blocks}


HASHED = """
name: hashed
models: [deepseek_r1]
systems: {b300_sxm: nvfp4_fp8kv}
traffic: [{isl: 1024, osl: 128}]
modes: [disaggregated, colocated]
limits: {max_gpus: 4, gpu_cap: 16}
"""


@pytest.mark.long
def test_the_order_of_sets_is_in_no_file(tmp_path):
    """Each process orders sets of words in its own way; inherited fits stand in ``frontier.csv``."""
    (tmp_path / "hashed.yaml").write_text(HASHED)
    for seed in ("1", "2"):
        command = [*COMMAND, str(tmp_path / "hashed.yaml"), "--out", str(tmp_path / seed), "--jobs", "1"]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed})
    first, *others = (contents(tmp_path / seed) for seed in ("1", "2"))
    assert "inherited from" in first["frontier.csv"].decode()
    for other in others:
        assert [name for name in first if other[name] != first[name]] == []
        assert other.keys() == first.keys()


def test_a_spec_that_is_written_while_a_sweep_runs_stops_it(smoke, tmp_path, monkeypatch):
    """Its blocks would carry the digest of the old content."""
    source = Path(__file__).parents[2] / "hw_specs" / "h100_sxm.yaml"
    mine = tmp_path / "specs" / "hw_specs" / source.name
    mine.parent.mkdir(parents=True)
    shutil.copy(source, mine)
    monkeypatch.setenv("DISAGG_SIM_PATH", str(tmp_path / "specs"))

    class Writer(Log):
        def advance(self, points: int) -> None:
            super().advance(points)
            mine.write_text(source.read_text().replace("hbm_bandwidth: 3.35", "hbm_bandwidth: 3.0"))

    with pytest.raises(StoreError, match=r"h100_sxm\.yaml: changed while the sweep ran; start the same command again"):
        run_sweep(small(smoke.spec), tmp_path / "out", jobs=1, listener=Writer())
    log = Log()
    run_sweep(small(smoke.spec), tmp_path / "out", jobs=1, listener=log)
    assert "1 stored blocks are stale (their inputs changed): computing them again" in log.notes
    run_sweep(small(smoke.spec), tmp_path / "new", jobs=1, listener=Log())
    assert contents(tmp_path / "out") == contents(tmp_path / "new")


def test_a_block_that_fails_thrice_is_a_row_with_its_reason_and_the_same_command_computes_it(
    smoke, tmp_path, monkeypatch
):
    """The other blocks are done; the mode of this one has no frontier, which would be too low without it."""
    plan, whole = small(smoke.spec), tmp_path / "whole"
    run_sweep(plan, whole, jobs=1, listener=Log())
    lost, tries = next(block.key for block in plan.blocks if block.key.name == "colocated-0000"), []

    def stumbling(task: BlockTask) -> list[StoredBlock]:
        if lost in (block.key for block in task.blocks):
            tries.append(lost)
            raise MemoryError("no room")
        return compute_blocks(task)

    log = Log()
    with monkeypatch.context() as patched:
        patched.setattr("disagg_sim.sweep.run.compute_blocks", stumbling)
        result = run_sweep(plan, tmp_path / "out", jobs=1, listener=log)
    assert len(tries) == 3
    assert log.warnings == [f"{lost.relative}: failed 3 times: MemoryError: no room"]
    rows = pd.read_csv(tmp_path / "out" / "infeasible.csv")
    (row,) = rows[rows["detail"].str.startswith("not computed")].itertuples()
    assert (row.mode, row.reason) == ("colocated", "no result")
    assert row.detail.endswith("blocks failed: MemoryError: no room")
    assert {*pd.read_csv(tmp_path / "out" / "frontier.csv")["mode"]} == {"disaggregated", "piggyback"}
    with pytest.raises(DisaggSimError, match=f"1 of {len(plan.blocks)} blocks failed"):
        result.require()
    log = Log()
    run_sweep(plan, tmp_path / "out", jobs=1, listener=log).require()
    assert f"{len(plan.blocks) - 1} of {len(plan.blocks)} blocks already stored" in log.notes
    assert contents(tmp_path / "out") == contents(whole)


@pytest.mark.long
def test_killed_runs_go_on_where_they_stood(smoke, reference, tmp_path):
    dice = random.Random(20)
    blocks = len(smoke.blocks)
    command = [*COMMAND, "smoke", "--out", str(tmp_path / "out"), "--jobs"]
    stored: dict[Path, int] = {}
    for attempt in range(3):
        log = tmp_path / f"log{attempt}"
        last = attempt == 2
        with log.open("w") as stream:
            jobs = "2" if attempt == 1 else "1"
            run = subprocess.Popen([*command, jobs], stdout=stream, stderr=stream, start_new_session=True)
            wanted = len(stored) + dice.randint(2, blocks // 6)
            while run.poll() is None and (last or len(_files(tmp_path)) < wanted):
                time.sleep(0.001)
            run.send_signal(signal.SIGKILL)
            run.wait()
        assert run.returncode == (0 if last else -signal.SIGKILL), log.read_text()
        if stored or not attempt:
            assert f"{len(stored)} of {blocks} blocks already stored" in log.read_text()
        _await_orphans(run.pid)
        now = _files(tmp_path)
        assert {path: now[path] for path in stored} == stored, "a finished block was written again"
        stored = now
    assert len(stored) == blocks
    assert (tmp_path / "out" / "frontier.csv").read_bytes() == (reference / "frontier.csv").read_bytes()


def _await_orphans(group: int) -> None:
    """Workers of a killed process finish the block that they are at."""
    deadline = time.monotonic() + 10.0
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.01)


def _files(root: Path) -> dict[Path, int]:
    """Stored blocks and the moment each was written. [ns]"""
    return {path: path.stat().st_mtime_ns for path in (root / "out").glob("*/*/[a-z]*.parquet")}


def test_workers_never_see_ctrl_c():
    # In a process of its own: the helpers whose start would let the signal through start once a process.
    program = """
import signal
from disagg_sim.sweep.backends.run import in_processes
from disagg_sim.sweep.backends.workers import TaskOutcome

def held(task):
    return TaskOutcome(value=signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

with in_processes(2) as engine:
    print(all(outcome.value for _, outcome in engine(held, dict.fromkeys(range(4)))))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True", run.stderr


def test_workers_end_with_a_parent_that_was_killed():
    """Those without a task, too: each holds the output open as long as it lives."""
    program = """
import os, signal, time
from disagg_sim.sweep.backends.run import in_processes

def killing(task):
    time.sleep(0.5)  # the other worker waits for a task by then
    os.kill(os.getppid(), signal.SIGKILL)

with in_processes(2) as engine:
    list(engine(killing, {0: None}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr


def test_a_nic_limit_counts_what_it_removes(smoke, tmp_path):
    result = run_sweep(small(smoke.spec, nic_limit=3e9), tmp_path, jobs=1, listener=Log())
    removed = pd.read_csv(tmp_path / "infeasible.csv").query("reason == 'above the NIC limit'")
    assert (removed["count"] > 0).all()
    assert len(removed)
    counts = {phase: int(removed[removed["phase"] == phase]["count"].sum()) for phase in ("prefill", "decode")}
    told = manifest(tmp_path)["cases"][0]["modes"]["disaggregated"]["removed"]
    assert {phase: told[phase].get("above the NIC limit", 0) for phase in counts} == counts
    assert "KV transfer at most 3 GB/s per GPU" in summary(result)
    frontier = result.frontier
    assert frontier["kv_egress_bytes_per_s_per_gpu"].max() <= 3e9
    assert frontier["kv_ingress_bytes_per_s_per_gpu"].max() <= 3e9


@pytest.mark.parametrize(
    ("excess", "said"), [(2e9, "needs 5.3 GB/s, limit 3.3 GB/s"), (1.0, "needs 3.300000001 GB/s, limit 3.3 GB/s")]
)
def test_a_miss_is_told_with_the_digits_that_show_it(excess, said):
    item, late = (
        Removal(phase="decode", reason=ABOVE_NIC, count=1, shortfall=excess, unit="B/s"),
        PointLimits(ftl_s=9.9994),
    )
    assert said in detail(item, PointLimits(nic_limit=3.3e9))
    assert "takes 9.99944 s, limit 9.9994 s" in detail(replace(item, reason=ABOVE_FTL, shortfall=4e-5), late)


def test_a_model_that_fits_nowhere_says_by_how_much(smoke, tmp_path):
    """405e9 parameters of 2 B on 8 GPUs of 80 GB: more than 20 GB too much on each."""
    spec = replace(
        smoke.spec,
        models=("llama_3_1_405b",),
        pools=(same_system("a100_sxm_80gb", "bf16"),),
        modes=("disaggregated",),
        limits=(PointLimits(max_gpus=8),),
    )
    with pytest.raises(InfeasibleError, match=r"fits on no allowed mapping .*lacks \d+\.\d GB") as caught:
        run_sweep(plan_sweep(spec), tmp_path, jobs=1, listener=Log()).require()
    lacking = float(re.search(r"lacks (\d+\.\d) GB", str(caught.value)).group(1))
    assert 405e9 * 2 / 8 / 1e9 - 85 < lacking < 60


def test_one_feasible_case_is_enough(smoke, tmp_path):
    models, pools = ("llama_3_1_405b", "llama_3_1_8b"), (same_system("a100_sxm_80gb", "bf16"),)
    spec = replace(smoke.spec, models=models, pools=pools, block_points=8192)
    result = run_sweep(plan_sweep(spec), tmp_path, jobs=1, listener=Log())
    assert [bool(case.verdict) for case in result.cases] == [True, False]
    table = pd.read_csv(tmp_path / "infeasible.csv")
    assert "fits on no allowed mapping" in table[table["reason"] == "no result"]["detail"].iloc[0]
