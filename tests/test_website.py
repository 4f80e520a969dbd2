"""The site of the documentation has every page, and shows the pages as the repository has them."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import disagg_sim

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the scripts of docs/

from docs.website import commands, pages, python_api  # noqa: E402

MADE = {"reference/commands.md", "reference/python.md"}


class Loader(yaml.SafeLoader):
    """Reads the configuration of the site, whatever its plugins are built from."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def in_nav(part: Any) -> Iterator[str]:
    """The pages of a part of the navigation, in its order."""
    if isinstance(part, str):
        yield part
    else:
        for each in part.values() if isinstance(part, dict) else part:
            yield from in_nav(each)


def test_every_page_is_once_in_the_navigation():
    shown = list(in_nav(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))
    assert len(shown) == len(set(shown))
    lost = set(pages.sources()) | MADE
    assert set(shown) == lost, f"nav of mkdocs.yml: missing {lost - set(shown)}, no such page {set(shown) - lost}"


LIST = "Two:\n1. one\n   * a\n     goes on\n2. two\n\nThen\n* x\n\nso\n\n    F = 2*m*n*k\n"
APART = "Two:\n\n1. one\n    * a\n        goes on\n2. two\n\nThen\n\n* x\n\nso\n\n    F = 2*m*n*k\n"
CODE = "```yaml\na:\n- [x](y.md)\n```\n"
MARKED = "It is <!-- number: four -->4<!-- /number --> GB.\n<!-- not run: slow -->\n"


@pytest.mark.parametrize(("text", "shown"), [(LIST, APART), (CODE, CODE), (MARKED, "It is 4 GB.\n")])
def test_nested_lists_stand_apart_code_stays_and_marks_do_not_show(text, shown):
    assert pages.page("plan.md", text, pages.sources(), {}) == shown


def test_links_lead_to_the_same_page_on_the_site():
    found, copies = pages.sources(), {}
    text = "[a](docs/plan.md#what-else-there-is) ![b](docs/img/frontier.svg) [c](LICENSE) [d](https://x.y/z.md) [e](#f)"
    said = pages.page("index.md", text, found, copies)
    assert said.split() == [
        "[a](plan.md#what-else-there-is)",
        "![b](img/frontier.svg)",
        "[c](LICENSE)",
        "[d](https://x.y/z.md)",
        "[e](#f)",
    ]
    assert copies == {"img/frontier.svg": ROOT / "docs" / "img" / "frontier.svg", "LICENSE": ROOT / "LICENSE"}
    assert pages.page("studies/arrow.md", "[a](../../README.md#b)", found, {}) == "[a](../index.md#b)\n"


def test_tables_of_the_site_stand_where_a_page_asks_for_them():
    asked = [name for path in pages.sources().values() for name in pages.ON_THE_SITE.findall(path.read_text())]
    assert sorted(asked) == sorted(pages.ON_SITE)
    shown = pages.page("studies/dopd.md", "<!-- site: dopd-details -->\n", pages.sources(), {})
    assert "| D16 | V-D, algorithm 2: equations |" in shown


def test_the_reference_of_commands_has_each_command_with_its_options():
    text = commands.command_reference()
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL))
    assert {"disagg-sim plan", "disagg-sim specs show", "disagg-sim calibrate kernels"} <= set(sections)
    run = [sys.executable, "-c", "from disagg_sim.cli.main import main; main()", "plan", "--help"]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    options = set(re.findall(r"^  (--[\w-]+)", said, flags=re.MULTILINE))
    assert len(options) > 15
    assert all(f"`{option}" in sections["disagg-sim plan"] for option in options)


def test_the_reference_of_python_names_has_every_public_name():
    text = python_api.python_reference()
    named = re.findall(r"^::: disagg_sim\.[\w.]+\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(named) == sorted(disagg_sim.__all__), f"give a group to the rooms of {python_api.ungrouped()}"


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "img").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_load_nothing_from_the_net(picture):
    assert not re.search(r'(?:xlink:)?href="https?:', picture.read_text())
