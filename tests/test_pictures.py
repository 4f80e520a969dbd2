"""The pictures of the pages show what the code computes: their words, their numbers, and where their curves run.

Not the bytes of the files: other versions of the libraries may draw the same picture in other ways. Those that take
minutes are compared by ``python docs/figures.py --check``.
"""

import importlib
from typing import Any

import pytest

QUICK = ("breakdown", "architecture")
SLOW = ("explain", "frontier", "scaling", "reuse_frontiers", "reuse_ratios")


@pytest.fixture(scope="module")
def figures():
    """The script that draws them."""
    return importlib.import_module("docs.figures")


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.long) for name in SLOW),
        pytest.param("policies", marks=pytest.mark.rare),
    ],
)
def test_a_picture_says_what_the_code_computes(figures, name):
    assert figures.changed(name) == [], f"python docs/figures.py {name} draws it anew; look at it"


USUAL = {"title": "a step of 5.3 ms", "line": 68, "end": 4.0, "points": 3}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"end": 4.001}, None),  # less than a point of the picture
        ({"title": "a step of 5.4 ms"}, "small.svg: written ['a step of 5.3 ms'], computed ['a step of 5.4 ms']"),
        ({"line": 70}, "small.svg: written ['fit.yaml:68'], computed ['fit.yaml:70']"),
        ({"end": 3.8}, "pt away from the computed one"),
        ({"points": 4}, "small.svg: the curves have other points than computed ones"),
    ],
)
def test_a_changed_word_number_or_curve_is_found(figures, tmp_path, monkeypatch, change, said):
    def small(title: str, line: int, end: float, points: int) -> Any:
        figure = figures.blank_figure((4.0, 3.0))
        axes = figure.add_subplot()
        axes.plot([0.0, 1.0, 5.0, 6.0][:points], [0.0, 5.0, end, 3.0][:points])
        axes.set(title=title, xlim=(0.0, 6.0), ylim=(0.0, 6.0))
        axes.text(1.0, 1.0, f"fit.yaml:{line}")
        return figure

    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setitem(figures.FIGURES, "small", lambda: small(**USUAL))
    figures.draw("small", tmp_path / "small.svg")
    monkeypatch.setitem(figures.FIGURES, "small", lambda: small(**{**USUAL, **change}))
    found = figures.changed("small")
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
