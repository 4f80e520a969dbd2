"""Real clusters of several processes, Dask's and Ray's: the bytes of one process, whichever workers are killed."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from disagg_sim.errors import InputError, StoreError
from disagg_sim.scenario.plan import plan_scenario
from disagg_sim.scenario.run import require_no_faults, run_scenario
from disagg_sim.scenario.spec import load_scenario
from disagg_sim.sweep.backends import run as clusters
from disagg_sim.sweep.backends.workers import Workers
from disagg_sim.sweep.fidelity import fidelity_of, sweep_elasticities, write_elasticities, write_fidelity
from disagg_sim.sweep.plan import SweepPlan, plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep

pytestmark = pytest.mark.long
SWEEP = """
name: small
models: [llama_3_1_8b]
systems: {h100_sxm: fp8}
traffic: [{isl: 1024, osl: 128}, {isl: 4096, osl: 128}]
limits: {max_gpus: 4}
"""
SCENARIO = """
name: small
model: llama_3_1_8b
system: h100_sxm
precision: fp8
trace: {path: few.csv}
slo: {ttft_s: 1.0, tpot_s: 0.1}
deployments: {one: {gpus: 1, colocated: {tp: 1, instances: 1}}}
policies: [mine_of_clusters]
policy_file: mine.py
capacity: {criterion: attainment, share: 0.9}
"""
POLICY = """
from dataclasses import dataclass

from disagg_sim.simulation.policies.fixed import Vllm
from disagg_sim.simulation.policy import register


@register("mine_of_clusters")
@dataclass(frozen=True, slots=True, kw_only=True)
class Mine(Vllm):
    pass
"""
TABLES = ("frontier.csv", "infeasible.csv")
HERE = Path(sys.executable).parent
#: Started processes import the package that is tested, wherever another one is installed.
SAME = {**os.environ, "PYTHONPATH": str(Path(clusters.__file__).parents[3])}
START_WITHIN = 60.0  # [s]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "small.yaml"
    path.write_text(SWEEP)
    return plan_sweep(load_sweep(str(path)))


@pytest.fixture(scope="module")
def alone(plan, tmp_path_factory):
    """The tables of one process."""
    root = tmp_path_factory.mktemp("alone")
    run_sweep(plan, root, jobs=1, listener=Mock())
    return {name: (root / name).read_bytes() for name in TABLES}


def swept(plan: SweepPlan, root: Path, where: Workers, first: Callable[[], None] = lambda: None) -> dict[str, bytes]:
    """The tables of a sweep elsewhere; ``first`` is called when its first block is stored."""
    listener = Mock()
    listener.advance.side_effect = lambda _: first() if listener.advance.call_count == 1 else None
    run_sweep(plan, root, jobs=where, listener=listener).require()
    assert listener.advance.call_count == len(plan.blocks)
    return {name: (root / name).read_bytes() for name in TABLES}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def dask(tmp_path_factory):
    """A scheduler without disagg-sim and two workers, each started as a command; its address and the workers."""
    folder = tmp_path_factory.mktemp("dask")
    port, quiet = free_port(), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, "env": SAME}
    address = f"tcp://127.0.0.1:{port}"
    bare = "import sys; sys.modules['disagg_sim'] = None; from dask.__main__ import main; main()"
    scheduler = [sys.executable, "-c", bare, "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    worker = [HERE / "dask", "worker", address, "--nthreads", "1", "--no-dashboard", "--no-nanny"]
    started = [subprocess.Popen(command, **quiet) for command in (scheduler, worker, worker)]
    try:
        wait_for(address.removeprefix("tcp://"))
        yield address, started[1:]
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()


@contextmanager
def ray_cluster() -> Iterator[str]:
    """A head with one CPU, started as a command, without what scales it and gathers its logs; its address."""
    address = f"127.0.0.1:{free_port()}"
    options = ["--head", f"--port={address.rpartition(':')[2]}", "--num-cpus=1", "--include-dashboard=false"]
    options += ["--no-monitor", "--include-log-monitor=false"]
    with subprocess.Popen(
        [HERE / "ray", "start", "--block", *options, "--disable-usage-stats"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=SAME,
        start_new_session=True,
    ) as head:
        try:
            assert head.stdout is not None
            assert any("Ray runtime started" in line for line in head.stdout)
            yield address
        finally:
            os.killpg(head.pid, signal.SIGTERM)


def wait_for(address: str) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + START_WITHIN
    while time.monotonic() < deadline:
        try:
            return socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(address)


def kill_a_ray_worker() -> None:
    """Kill one process that runs a task of Ray, or waits for one."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith((b"ray::_called", b"ray::IDLE")):
                return os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            continue
    raise AssertionError("no worker of Ray runs")


def test_a_sweep_goes_on_after_its_driver_was_killed(plan, alone, dask, tmp_path):
    """What the workers stored before is not computed again."""
    (tmp_path / "small.yaml").write_text(SWEEP)
    options = ["--out", "out", "--backend", "dask", "--address", dask[0]]
    command = [HERE / "disagg-sim", "sweep", "small.yaml", *options]
    with subprocess.Popen(
        command, cwd=tmp_path, env=SAME, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as driver:
        deadline = time.monotonic() + START_WITHIN
        while not list(tmp_path.glob("out/*/*/*.parquet")) and time.monotonic() < deadline:
            time.sleep(0.02)
        driver.kill()
    listener = Mock()
    run_sweep(plan, tmp_path / "out", jobs=Workers(backend="dask", address=dask[0]), listener=listener).require()
    assert 0 < listener.advance.call_count < len(plan.blocks)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in TABLES} == alone


def test_dask_gives_the_same_bytes_though_a_worker_is_killed(plan, alone, dask, tmp_path):
    address, workers = dask
    assert swept(plan, tmp_path / "out", Workers(backend="dask", address=address), workers[0].kill) == alone


def test_error_bars_and_elasticities_of_cases_are_tasks_on_any_backend(plan, dask, tmp_path, monkeypatch):
    """The workers run in another directory, in which a relative path means nothing."""
    monkeypatch.chdir(tmp_path)
    out = Path("out")
    result = run_sweep(plan, out, jobs=1, listener=Mock(), outside=True)
    written = {}
    for where in (Workers(), Workers(backend="dask", address=dask[0])):
        write_fidelity(fidelity_of(result, out, error_bars=True, jobs=where), out)
        write_elasticities(sweep_elasticities(result, out, jobs=where), out)
        written[where.backend] = [(out / f"{name}.csv").read_bytes() for name in ("uncertainty", "sensitivity")]
    assert written["serial"] == written["dask"]


def test_runs_and_searches_of_a_scenario_are_tasks_on_any_backend(dask, tmp_path, monkeypatch):
    """Its trace and its policy file lie beside it, wherever the workers run."""
    monkeypatch.chdir(tmp_path)
    Path("few.csv").write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{n},200,20\n" for n in range(20)))
    Path("mine.py").write_text(POLICY)
    Path("small.yaml").write_text(SCENARIO)
    plan = plan_scenario(load_scenario("small.yaml"))
    held = {}
    for where in (Workers(), Workers(backend="dask", address=dask[0])):
        out = Path(where.backend)
        require_no_faults(run_scenario(plan, out, jobs=where, listener=Mock()))
        held[where.backend] = {path.relative_to(out): path.read_bytes() for path in out.glob("*/*/*.parquet")}
    assert len(held["dask"]) == sum(len(run.blocks) for run in plan.tasks)
    assert held["serial"] == held["dask"]


@pytest.mark.rare
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the workers of Ray by /proc")
def test_ray_gives_the_same_bytes_though_a_worker_is_killed(plan, alone, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # of a cluster that only this machine reaches

    with ray_cluster() as address:
        assert swept(plan, tmp_path, Workers(backend="ray", address=address), kill_a_ray_worker) == alone


@pytest.mark.parametrize(("backend", "address"), [("dask", "tcp://127.0.0.1:9"), ("ray", "127.0.0.1:9")])
def test_where_no_cluster_answers_one_line_says_so(plan, tmp_path, backend, address, monkeypatch):
    monkeypatch.setattr(clusters, "ANSWER_WITHIN", 0.5)
    with pytest.raises(InputError, match=f"address '{address}': no .* of {backend.title()} answers"):
        swept(plan, tmp_path, Workers(backend=backend, address=address))


@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_one_line_and_the_sweep_goes_on(plan, alone, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(small)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        with pytest.raises(StoreError, match="No space left"):
            swept(plan, small, Workers(1))
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        run_sweep(plan, small, jobs=1, listener=Mock())
        assert {name: (small / name).read_bytes() for name in TABLES} == alone
    finally:
        subprocess.run(["umount", str(small)], check=True)
