"""The laboratory is imported from the folder beside the package alone; without it its commands end with one line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from disagg_sim.errors import MissingExtraError
from disagg_sim.laboratory import LAB, MISSING, import_lab, lab_folder

ROOT = Path(__file__).parents[2]
COMMANDS = ("reproduce", "measure", "calibrate", "validate")
#: Like the console script, and what of the laboratory is imported then.
RUN = """import sys; sys.path.remove('')
from disagg_sim.cli.main import run
code = run(sys.argv[1:])
print(*sorted(module.__file__ for name, module in sys.modules.items() if name.partition('.')[0] == 'lab'), sep='\\n')
sys.exit(code)"""
#: The same of several commands, the codes on standard output.
EACH = """import sys; sys.path.remove('')
from disagg_sim.cli.main import run
for word in sys.argv[1:]:
    print(run([word]))
print([name for name in sys.modules if name.partition('.')[0] == 'lab'])"""
#: Two tasks that worker processes find in the laboratory, as those of studies are.
WORKERS = """import sys; sys.path.remove('')
from functools import partial
from disagg_sim.laboratory import import_lab, in_workers
from disagg_sim.sweep.backends.run import run_tasks
named, call = import_lab('calibration.kernels.tables').spec_name, import_lab('studies.beyond_the_buzz.reproduce')._call
tasks = [partial(named, 'gb200'), partial(named, 'h100_sxm')]
print(*sorted(run_tasks(in_workers(call), tasks, jobs=2)))"""


def plant(folder: Path) -> None:
    """Packages under names of the laboratory that tell when they are run."""
    for package in (folder / LAB, folder / LAB / "cli", folder / LAB / "calibration"):
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")


def started(code: str, *words: str, at: Path, path: str) -> subprocess.CompletedProcess[str]:
    """A process in a folder that looks for modules in ``path``."""
    variables = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=at, env=variables, capture_output=True, text=True, check=False
    )


def test_a_planted_laboratory_does_not_run(tmp_path):
    """Neither one of the working directory nor one that stands first among the places of modules."""
    plant(tmp_path)
    done = started(RUN, "validate", "memory", "none.csv", at=tmp_path, path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr) == (2, "error: none.csv: no such file\n")
    found = done.stdout.split()
    assert str(lab_folder() / "cli" / "validate.py") in found
    assert all(Path(each).is_relative_to(lab_folder()) for each in found)
    assert not (tmp_path / "ran").exists()


def test_worker_processes_find_the_same_one(tmp_path):
    plant(tmp_path)
    done = started(WORKERS, at=tmp_path, path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.stdout, done.stderr) == ("gb200_nvl72 h100_sxm\n", "")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [True, False], ids=["a wheel", "no data of its own"])
def test_without_a_laboratory_its_commands_end_with_one_line(tmp_path, data):
    """Whatever another package of the name puts beside that of a wheel."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "disagg_sim", site / "disagg_sim", ignore=shutil.ignore_patterns("__pycache__"))
    if data:
        (site / "disagg_sim" / "_data" / "models").mkdir(parents=True)
        plant(site)
    done = started(EACH, *COMMANDS, "--help", at=tmp_path, path=str(site))
    assert done.stderr == "".join(f"error: {MISSING.format(what=command)}\n" for command in COMMANDS)
    assert done.stdout.startswith("2\n" * len(COMMANDS))
    assert "(in a clone)" in done.stdout
    assert done.stdout.endswith("\n[]\n")
    assert not (site / "ran").exists()


def test_another_module_of_the_name_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, LAB, ModuleType(LAB))
    with pytest.raises(MissingExtraError, match=r"validate needs .*: another module 'lab' is imported in this process"):
        import_lab("cli.commands", "validate")
