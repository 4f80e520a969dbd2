"""The numbers that README and docs state are those that the code computes; the slow ones at least have a function."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from disagg_sim.facts.yaml_files import PATH_VARIABLE

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs" / "page_numbers.py"


@pytest.fixture(scope="module")
def numbers():
    """The module of the numbers."""
    spec = importlib.util.spec_from_file_location("page_numbers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def computed(numbers):
    """The registry of the functions, which the module of the numbers makes findable."""
    return importlib.import_module("docs.computed")


@pytest.fixture
def page(numbers, tmp_path, monkeypatch):
    """A page of its own, whose one number has been 4 all along."""
    path = tmp_path / "page.md"
    path.write_text("It is <!-- number: four -->4<!-- /number --> GB.\n", encoding="utf-8")
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    monkeypatch.setattr(numbers, "PAGES", [path])
    return path


@pytest.mark.long
def test_every_quick_number_of_the_pages_is_what_the_code_computes(numbers):
    texts = numbers.made([name for name, entry in numbers.ENTRIES.items() if not entry.slow])
    assert numbers.stale(texts) == [], "make docs-numbers writes them anew"


def test_every_mark_has_a_function_and_every_function_a_mark(numbers):
    marked = [place.name for place in numbers.places()]
    assert set(marked) == set(numbers.ENTRIES)
    assert len(marked) >= 25


def test_no_mark_is_left_open_or_misspelt(numbers):
    """What looks like a mark is one: a page has as many openings and closings as the pattern finds."""
    for path in numbers.PAGES:
        text = path.read_text(encoding="utf-8")
        found = len(numbers.MARK.findall(text))
        assert len(re.findall(r"<!--\s*(?:number|table)\b", text)) == found, path
        assert len(re.findall(r"<!--\s*/\s*(?:number|table)\b", text)) == found, path


def test_marks_stand_where_a_reader_does_not_see_them(numbers):
    """A comment shows inside code; where it begins a line, Markdown takes the line for HTML and shows its asterisks."""
    for path in numbers.PAGES:
        text = re.sub(
            r"^```.*?^```$",
            lambda found: found[0].replace("\n", "\n    "),
            path.read_text(encoding="utf-8"),
            flags=re.DOTALL | re.MULTILINE,
        )
        for line in text.splitlines():
            if re.search(r"<!-- /?number", line):
                assert not line.startswith(("    ", "<!--")), f"{path}: {line}"
            if re.search(r"<!-- /?table", line):
                assert re.fullmatch(r"<!-- (table: [\w-]+|/table) -->", line), f"{path}: {line}"
        for paragraph in re.split(r"\n\s*\n", text):
            *before, _ = re.split(r"<!-- /?number[^>]*-->", paragraph)
            assert all(piece.count("`") % 2 == 0 for piece in before), f"{path}: a mark inside code: {paragraph}"


def test_a_stale_number_is_named_and_written_anew(numbers, page):
    assert numbers.stale({"four": "4"}) == []
    (line,) = numbers.stale({"four": "5"})
    assert line == "page.md: four: written '4', computed '5'"
    numbers.write({"four": "5"})
    assert page.read_text(encoding="utf-8") == "It is <!-- number: four -->5<!-- /number --> GB.\n"


def test_what_is_not_asked_for_stays(numbers, page):
    before = page.read_text(encoding="utf-8")
    numbers.write({"five": "5"})
    assert page.read_text(encoding="utf-8") == before
    assert numbers.stale({"five": "5"}) == []


def test_check_says_what_differs_and_exits_1(numbers, computed, page, monkeypatch, capsys):
    monkeypatch.setattr(numbers, "ENTRIES", {"four": computed.Entry(lambda: "5", slow=False)})
    monkeypatch.setattr(sys, "argv", ["page_numbers.py", "--check"])
    assert numbers.main() == 1
    assert "page.md: four: written '4', computed '5'" in capsys.readouterr().out
    assert "-->4<!--" in page.read_text(encoding="utf-8")


def test_the_plain_fits_are_found_within_their_context_alone(numbers, computed, monkeypatch):
    """The worked examples are by hand, with plain rooflines: other efficiencies than the shipped ones."""
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    shipped = numbers.examples.w2_row(*numbers.examples.W2[0][:4])
    with computed.plain_fits():
        assert numbers.examples.w2_row(*numbers.examples.W2[0][:4]) != shipped
    assert numbers.examples.w2_row(*numbers.examples.W2[0][:4]) == shipped
