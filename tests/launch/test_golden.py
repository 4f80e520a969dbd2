"""Files as they are written; ``pytest tests/launch/test_golden.py --update-baselines`` records them anew."""

from pathlib import Path

import pytest

import disagg_sim as ds
from tests.launch.deployments import CASES, PAIRS

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(("case", "engine"), PAIRS)
def test_files_are_those_recorded(case, engine, update_baselines):
    made = ds.launch(CASES[case][0](), engine=engine)
    where = GOLDEN / f"{case}-{engine}"
    texts = {**made.files, "notes.txt": "".join(f"{line}\n" for line in made.notes)}
    if update_baselines:
        where.mkdir(parents=True, exist_ok=True)
        for old in set(where.iterdir()) - {where / name for name in texts}:
            old.unlink()
        for name, text in texts.items():
            (where / name).write_text(text)
    assert {path.name: path.read_text() for path in where.iterdir()} == texts
