"""Whatever a disk refuses, a sweep and its store end in one line that names a file, and go on from where they were."""

import errno
import io
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from disagg_sim.cli.main import EXPECTED, run
from disagg_sim.sweep.store import BlockState, Store, read_index

SWEEP = """{name: tiny, models: llama_3_1_8b, systems: {h100_sxm: fp8}, profile: ideal, block_points: 60,
  traffic: [{isl: 1024, osl: 128}], modes: [colocated], limits: {max_gpus: 2}}"""

#: Steps that a full disk refuses; it still lets files go.
TAKES_ROOM = ("open", "write", "fsync", "replace", "mkdir")


@dataclass(slots=True)
class Disk:
    """Counts the steps on files below a directory, and refuses some."""

    root: Path
    fails_at: int = 0  # number of the first step that fails; 0 = none [1]
    code: int = errno.EIO  # once; ``ENOSPC`` stays
    steps: list[tuple[str, str]] = field(default_factory=list)  # what and which file

    def step(self, kind: str, path: Any) -> None:
        place = Path(os.fsdecode(path)) if not isinstance(path, int) else Path(os.readlink(f"/proc/self/fd/{path}"))
        if not place.absolute().is_relative_to(self.root):
            return
        self.steps.append((kind, place.name))
        full = self.code == errno.ENOSPC and kind in TAKES_ROOM and len(self.steps) >= self.fails_at
        if self.fails_at and (full or len(self.steps) == self.fails_at):
            raise OSError(self.code, os.strerror(self.code), str(place))


@contextmanager
def on(disk: Disk) -> Iterator[Disk]:
    """Put the disk in the place of the real one."""
    opening, opening_descriptor = io.open, os.open

    def opened(file: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
        if "r" in mode or isinstance(file, int) or named.get("opener"):  # which calls ``os.open``
            return opening(file, mode, *more, **named)
        disk.step("open", file)
        handle = opening(file, mode, *more, **named)
        handle.write = stepping("write", handle.write, file)
        return handle

    def opened_descriptor(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            disk.step("open", path)
        return opening_descriptor(path, flags, *more, **named)

    def stepping(kind: str, function: Callable[..., Any], of: Any = None) -> Callable[..., Any]:
        def step(first: Any, *more: Any, **named: Any) -> Any:
            disk.step(kind, first if of is None else of)
            return function(first, *more, **named)

        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", opened)
        patch.setattr(os, "open", opened_descriptor)
        for kind in ("fsync", "replace", "mkdir", "unlink", "rmdir"):
            patch.setattr(os, kind, stepping(kind, getattr(os, kind)))
        yield disk


def computed(out: Path, *options: str) -> int:
    file = out.parent / "tiny.yaml"
    file.write_text(SWEEP)
    return run(["sweep", str(file), "--out", str(out), "--jobs", "1", *options])


def contents(out: Path) -> dict[str, Any]:
    """All that a user finds there; without what a manifest says of the run that wrote it."""
    found: dict[str, Any] = {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    if "manifest.json" in found:
        found["manifest.json"] = {**json.loads(found["manifest.json"]), "run": None}
    return found


@dataclass(slots=True)
class Case:
    """A command, what it leaves on a disk without faults, and its steps there."""

    folder: Path
    command: Callable[[Path], int]
    before: Path | None = None  # what it finds
    steps: list[tuple[str, str]] = field(init=False)
    whole: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        with on(Disk(self.begun("whole"))) as disk:
            assert self.command(disk.root) == 0
        self.steps, self.whole = disk.steps, contents(disk.root)

    def begun(self, name: str) -> Path:
        out = self.folder / name
        shutil.rmtree(out, ignore_errors=True)
        if self.before is not None:
            shutil.copytree(self.before, out)
        return out

    def must_go_on(self, fails_at: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
        """A step that fails is told, unless nothing was lost by it."""
        capsys.readouterr()
        with on(Disk(self.begun("out"), fails_at, code)) as disk:
            ended = self.command(disk.root)
        step = disk.steps[fails_at - 1]
        assert ended == EXPECTED or step[0] in ("open", "mkdir", "unlink", "rmdir"), step
        self.must_complete(disk.root, ended, os.strerror(code), capsys)

    def must_complete(self, out: Path, ended: int, why: str, capsys: pytest.CaptureFixture[str]) -> None:
        """One line says which file and why; the same command keeps what is stored, and adds what is lacking."""
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        if ended == 0:
            assert contents(out) == self.whole
        else:
            assert (ended, len(errors)) == (EXPECTED, 1)
            assert errors[0].startswith(f"error: {out}"), errors
            assert errors[0].endswith(f": {why}"), errors
        if (out / "store.json").exists():
            states = {Store(out).state(key) for key in read_index(out).blocks}
            assert states <= {BlockState.MISSING, BlockState.STORED}
        stored = {path: path.stat().st_mtime_ns for path in out.glob("points/*/*.parquet")}
        assert self.command(out) == 0
        assert contents(out) == self.whole
        assert all(path.stat().st_mtime_ns == time for path, time in stored.items() if path.exists())


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("sweep"), computed)


def last_of_each_kind(case: Case) -> set[int]:
    return {*{kind: number for number, (kind, _) in enumerate(case.steps, 1)}.values()}


def test_a_step_of_each_kind_may_fail(sweep, capsys):
    for number in last_of_each_kind(sweep):
        sweep.must_go_on(number, errno.EIO, capsys)
    assert {kind for kind, _ in sweep.steps} == {*TAKES_ROOM, "unlink"}


def test_a_disk_may_be_full(sweep, capsys):
    writes = [number for number, (kind, _) in enumerate(sweep.steps, 1) if kind == "write"]
    sweep.must_go_on(writes[len(writes) // 2], errno.ENOSPC, capsys)


@pytest.mark.parametrize(
    "every", [pytest.param(3, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.rare)], ids="every {}".format
)
def test_a_step_in_so_many_may_fail(every, sweep, capsys):
    for number in range(1, len(sweep.steps) + 1, every):
        sweep.must_go_on(number, (errno.ENOSPC, errno.EIO)[number % 2], capsys)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Every file that grows past so many bytes is refused, whoever writes it: DuckDB, a worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.long
def test_the_last_byte_of_a_file_may_be_refused(tmp_path, capsys):
    case = Case(tmp_path, lambda out: computed(out, "--jobs", "2"))
    sizes = sorted({path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.stat().st_size})
    for size in sizes[::4]:
        out = case.begun("out")
        capsys.readouterr()
        with files_up_to(size - 1):
            ended = case.command(out)
        case.must_complete(out, ended, os.strerror(errno.EFBIG), capsys)
