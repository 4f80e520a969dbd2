"""Where machine code is kept, also where next to nothing can be written, and who hears that something is compiled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import disagg_sim
from disagg_sim.simulation.kernel import compiled

#: Prints where the code is kept and the note.
SCRIPT = """
import tempfile
tempfile.tempdir = {temporary!r}
from disagg_sim.simulation.kernel.compiled import code_home
{first}
print(code_home().directory)
print(code_home().note)
"""
#: Compiles and calls a function.
CALL = """
from disagg_sim.simulation.policies.loads import least
import numpy as np
some = np.ones(3)
least(np.arange(3), some, some, some, 1)
"""
#: What makes file permissions bind root, too.
UNPRIVILEGED = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []


@pytest.fixture
def sealed(tmp_path):
    """A copy of the package, a home and a place for temporary files, none of which can be written."""
    if UNPRIVILEGED and not shutil.which("setpriv"):
        pytest.skip("permissions do not bind root here")
    shutil.copytree(
        Path(disagg_sim.__file__).parent, tmp_path / "disagg_sim", ignore=shutil.ignore_patterns("*.nb[ci]")
    )
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    folders = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield tmp_path
    for folder in folders:
        folder.chmod(0o755)


def kept(root: Path, first: str = "", **variables: str) -> tuple[str, str]:
    """Directory and note of a process that runs the package below ``root``; nothing else on standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"PYTHONPATH": str(root), "HOME": str(root / "home"), **variables}
    command = [*UNPRIVILEGED, sys.executable, "-c", SCRIPT.format(temporary=str(root / "tmp"), first=first)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=root)
    assert done.stderr == ""
    directory, note = done.stdout.splitlines()
    return directory, note


def test_the_home_takes_the_place_of_a_package_that_cannot_be_written(sealed):
    (sealed / "home").chmod(0o755)
    directory, note = kept(sealed, CALL)
    assert directory.startswith(str(sealed / "home" / ".cache" / "disagg_sim" / "kernel-"))
    assert note == ""
    assert list(Path(directory).rglob("*.nbi")), "the machine code was not kept"


def test_temporary_files_take_the_place_of_a_home(sealed):
    (sealed / "tmp").chmod(0o755)
    directory, note = kept(sealed)
    own = sealed / "tmp" / f"disagg_sim-{os.getuid()}"
    assert directory.startswith(str(own / "kernel-"))
    assert own.stat().st_mode & 0o777 == 0o700
    assert f"machine code is kept in {own}: cannot write {sealed}" in note
    own.chmod(0o777)  # what others can write is not executed
    assert kept(sealed)[0] == "None"


def test_without_any_place_everything_works_and_a_line_says_what_it_costs(sealed):
    (sealed / "home").chmod(0o755)
    shared = sealed / "home" / ".cache" / "disagg_sim"
    home = compiled.code_home().directory
    assert home is not None
    (shared / home.name).mkdir(parents=True)
    (shared / home.name).chmod(0o777)  # what others can write is not executed
    directory, note = kept(sealed, CALL, NUMBA_CACHE_DIR="/proc/none")
    assert directory == "None"
    assert note.startswith("every process compiles the kernel anew, about a minute: cannot write /proc/none, ")
    assert note.endswith(f", {shared} (others can); give a directory that can be written in NUMBA_CACHE_DIR")


def test_a_wish_that_cannot_be_met_is_told(sealed):
    (sealed / "home").chmod(0o755)
    directory, note = kept(sealed, NUMBA_CACHE_DIR=str(sealed / "tmp"))
    assert directory.startswith(str(sealed / "home"))
    assert note.startswith(f"cannot write NUMBA_CACHE_DIR {sealed / 'tmp'}, ")
    (sealed / "tmp").chmod(0o755)
    (sealed / "tmp" / Path(directory).name).mkdir()
    (sealed / "tmp" / Path(directory).name).chmod(0o777)  # what others can write is not executed
    directory, note = kept(sealed, NUMBA_CACHE_DIR=str(sealed / "tmp"))
    assert directory.startswith(str(sealed / "home"))
    assert note.startswith(f"cannot write NUMBA_CACHE_DIR {sealed / 'tmp'} (others can), ")


def test_compiling_is_told_once_and_calling_what_is_compiled_is_not(monkeypatch):
    monkeypatch.setattr(compiled, "code_home", lambda: compiled.CodeHome(None, ""))  # not kept for the next test run

    @compiled.entry
    def twice(values):
        return 2 * values

    told: list[str] = []
    with compiled.on_compilation(lambda: told.append("compiling")):
        assert twice(3) == 6
        assert (twice(np.ones(2)) == 2).all()  # another type, another compilation
    assert told == ["compiling"]
    with compiled.on_compilation(lambda: told.append("again")):
        twice(4)
    assert told == ["compiling"]
