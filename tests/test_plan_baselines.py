"""Plans of seventy questions against text in git, to ten digits: whatever moves one of them shows in a diff.

``pytest tests/test_plan_baselines.py --update-baselines`` records them anew. What moves a plan is named in the commit.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from disagg_sim.cli.main import app
from disagg_sim.facts.yaml_files import read_mapping

BASELINES = Path(__file__).parent / "planning" / "recorded"
DIGITS = 10
#: Relative difference that processors may make: of the same sums 1e-9, of searches that end at a width
#: (``planning.answer.NARROW``) thirty times that, of latencies near full load.
ALIKE = 3e-6


def questions_of(path: Path) -> dict[str, str]:
    """Name of a question -> what is asked, its words filled in."""
    table = read_mapping(path)
    return {name: asked.format(**table["words"]) for name, asked in table["questions"].items()}


QUESTIONS = questions_of(BASELINES.with_name("questions.yaml"))
#: What every answer has alike.
CONSTANT = ("schema", "labels")
#: Questions whose changes are recorded; of the others they are not asked for.
CHANGED = ("changes", "changes_nic", "split", "tight_ttft", "nic", "prices", "two_systems")
#: Questions that take longest, each beside a shorter one of the same feature.
LONG = {
    *("rate_high", "loose", "confidence_high", "infeasible_prefill", "rate", "short", "one_token_prompts"),
    *("joule_gpus", "users_spares", "simulated_grown", "split", "users_of_few_tokens", "confidence", "nic", "prices"),
    "encode_cached",
}
#: Those that take some seconds, and the quicker question that moves with what they alone would show.
RARE = {
    "gpus_experts": "experts",
    "tight_ttft": "tight_tpot",
    "traffic": "sessions",
    "trace_rate": "trace",
    "simulated_gpus": "simulated",
}


def words(argv: str, trace: Path) -> list[str]:
    quoted = argv.replace("TRACE", str(trace)).split("'")
    return [word for place, part in enumerate(quoted) for word in ([part] if place % 2 else part.split())]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A trace of 3,000 requests, 40 a second, half of which come in every fourth ten seconds."""
    rng = np.random.default_rng(31)
    second = np.arange(75.0)
    rate = np.where(second % 40 < 10, 80.0, 80.0 / 3)
    counts = rng.poisson(rate)
    arrivals = np.sort(np.concatenate([at + rng.uniform(size=n) for at, n in zip(second, counts, strict=True)]))
    lengths = rng.integers(256, 4096, arrivals.size), rng.integers(32, 512, arrivals.size)
    lines = [f"{at:.4f},{isl},{osl}" for at, isl, osl in zip(arrivals, *lengths, strict=True)]
    path = tmp_path_factory.mktemp("traces") / "bursty.csv"
    path.write_text("\n".join(["arrival,isl,osl", *lines]) + "\n")
    return path


def rounded(value: Any) -> Any:
    """Numbers to ten digits; everything else as it is."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def numbers(value: str) -> float | str:
    """A cell of a table."""
    try:
        return float(value)
    except ValueError:
        return value


def record(argv: list[str], out: Path) -> dict[str, Any]:
    """All that a plan says: its JSON, its screen, and the table of its designs."""
    shown = CliRunner().invoke(app, ["plan", *argv, "--json", "--out", str(out)])
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    found = {key: value for key, value in json.loads(shown.stdout).items() if key not in CONSTANT}
    with (out / "designs.csv").open() as file:
        rows = [{key: numbers(value) for key, value in row.items()} for row in csv.DictReader(file)]
    return rounded({"answer": found, "screen": (out / "plan.txt").read_text().splitlines(), "designs": rows})


def moved(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """What differs, a line each."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from moved(old.get(key), new.get(key), f"{where}.{key}".strip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, pair in enumerate(zip(old, new, strict=True)):
            yield from moved(*pair, f"{where}[{place}]")
    elif old != new and not (isinstance(old, float) and new == pytest.approx(old, rel=ALIKE)):
        yield f"{where}: {old} -> {new}"


def as_recorded(path: Path, found: Any, text: str, update: bool) -> None:
    """Compare what was found with its record, or write its text there."""
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.skip(f"recorded {path.name}: read the diff before committing it")
    lines = list(moved(json.loads(path.read_text()), found))
    assert not lines, f"{path.stem} moved: " + "; ".join(lines[:8])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in LONG) + [pytest.mark.rare] * (name in RARE))
        for name in QUESTIONS
    ],
)
def test_plan_is_as_recorded(name, trace, update_baselines, request, tmp_path):
    if name not in CHANGED:
        request.getfixturevalue("without_changes")
    found = record(words(QUESTIONS[name], trace), tmp_path / "out")
    as_recorded(BASELINES / f"{name}.json", found, json.dumps(found, indent=1) + "\n", update_baselines)


def test_every_question_is_recorded_and_nothing_else_is():
    assert {path.stem for path in BASELINES.glob("*")} == set(QUESTIONS)
    assert len(QUESTIONS) >= 40
    assert {*RARE} | {*RARE.values()} <= {*QUESTIONS}
