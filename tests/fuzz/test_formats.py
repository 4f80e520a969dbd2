"""Readers of every file format end in a value or in one ``DisaggSimError``, in bounded time and memory.

``DISAGG_SIM_READS=20000`` takes so many files.
"""

import os
import resource
from collections import Counter
from random import Random

import pytest
from formats import FORMATS, VARIABLE, spoilt_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker import alarms

from disagg_sim import reading
from disagg_sim.errors import DisaggSimError
from disagg_sim.facts.load import check_file
from disagg_sim.facts.yaml_files import PATH_VARIABLE
from disagg_sim.units import GB

READS = int(os.environ.get("DISAGG_SIM_READS", "300"))
MEMORY = 2 * GB
#: Lines of an error: a file may have many faults.
LINES = 200


def test_every_good_file_is_read(tmp_path):
    """Else spoilt ones would be refused for what is wrong with all of them."""
    for number, form in enumerate(FORMATS):
        path = tmp_path / str(number) / form.name
        path.parent.mkdir(parents=True)
        for name, content in (*form.beside, (path.name, form.content)):
            (path.parent / name).write_bytes(content)
        form.read(path)


def test_spoilt_files_of_every_format_are_read_or_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"{MEMORY:.0f}")
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    ended: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(max_examples=READS, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, len(FORMATS) - 1), st.integers(0, 2**64))
    def read(which: int, seed: int) -> None:
        form = FORMATS[which]
        path = tmp_path / str(which) / form.name
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, content in form.beside:
            (path.parent / name).write_bytes(content)
        path.write_bytes(spoilt_file(form, Random(seed)))
        try:
            with alarms():
                form.read(path)
            ended["read"] += 1
        except DisaggSimError as error:
            ended["refused"] += 1
            said = str(error)
            assert said.strip()
            assert len(said.splitlines()) <= LINES
            assert max(map(len, said.splitlines())) < 3000
            assert "pydantic" not in said
            if form.read is check_file:
                first, *others = said.splitlines()
                assert first.startswith(f"{path}:")
                assert all(line.startswith("  - ") for line in others)

    read()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{READS} files: {dict(ended)}, peak {held / 2**20:.2f} GiB")
    assert ended["read"] > READS / 20, "the files are so spoilt that none is read to its end"
    assert ended["refused"] > READS / 3, "the files are hardly spoilt"
    assert held * 1024 < MEMORY or held == before


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_device_without_an_end_in_place_of_a_file_is_refused(form, tmp_path, monkeypatch):
    monkeypatch.setattr("disagg_sim.reading._AT_ONCE", 2**26)  # faster than a megabyte at a time
    if form.name != "frontier.csv":  # which is read up to the real limit
        drained = reading._drained
        monkeypatch.setattr(reading, "_drained", lambda file, most, path: drained(file, min(most, 2**26), path))
    path = tmp_path / form.name
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, content in form.beside:
        (path.parent / name).write_bytes(content)
    path.symlink_to("/dev/zero")
    with alarms(), pytest.raises(DisaggSimError):
        form.read(path)
    path.unlink()
    path.symlink_to("/dev/null")
    with alarms(), pytest.raises(DisaggSimError):
        form.read(path)
