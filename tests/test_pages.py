"""Whatever a page tells to run, runs: every block of code in README, CONTRIBUTING and docs, in the order of its page.

A page is worked through in a directory of its own. Blocks of YAML begin with a comment that names their file; all of
them are written first, and checked; blocks of Python that name one are written, too. Python blocks share one namespace.
Lines of a console block that begin with ``$`` are run; other lines are what they must print. Commands of ``disagg-sim``
are called in this process, which has imported them and shares its searches between pages; a shell runs the others.
Plans leave out what would change them, which takes longer than they do and has tests of its own.
A block that cannot run here says why, in a comment before it that a reader does not see: ``<!-- not run: REASON -->``.
"""

import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import matplotlib
import pytest
import typer
import yaml

from disagg_sim.cli.main import app, run
from disagg_sim.errors import MissingExtraError
from disagg_sim.extras import extra
from disagg_sim.facts.yaml_files import PATH_VARIABLE
from disagg_sim.laboratory import MISSING
from disagg_sim.simulation.policies.registry import policies

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)$")
MARK = re.compile(r"^<!-- not run:(.*)-->$")
RUN, SHOWN = ("python", "console", "yaml"), ("text", "json")
SHELL = set("$`|&;<>*?~")  # what only a shell understands
LIMIT_S = 300  # of one block [s]
#: A small trace, under the names that the pages use for those of the reader.
TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(
    f"{i / 4},{200 + 37 * i % 500},{5 + 11 * i % 40}\n" for i in range(200)
)
#: A small trace whose prompts begin alike, under the names of Mooncake's.
TURNS = "".join(
    f'{{"timestamp": {250 * i}, "input_length": {600 + 512 * (i % 4)}, "output_length": {5 + 11 * i % 40}, '
    f'"hash_ids": {[*range(i % 4 + 1), 100 + i]}}}\n'
    for i in range(60)
)
COMMAND = f'#!/bin/sh\nexec "{sys.executable}" -c "from disagg_sim.cli.main import main; main()" "$@"\n'


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, its text, and why it does not run, if so."""

    where: str
    language: str
    text: str
    reason: str | None

    @property
    def file(self) -> str:
        """The file that a block names in its first line."""
        found = re.match(r"# ([\w./-]+\.(ya?ml|py))$", self.text, flags=re.MULTILINE)
        return found[1] if found else ""


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    found, inside, mark = [], None, None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if inside is None and fence:
            inside = (f"{page.relative_to(ROOT)}:{number}", fence[1], [])
        elif inside is not None and line == "```":
            found.append(Block(inside[0], inside[1], "\n".join(inside[2]) + "\n", mark))
            inside, mark = None, None
        elif inside is not None:
            inside[2].append(line)
        elif line.strip():
            said = MARK.match(line)
            mark = said[1].strip() if said else None
    assert inside is None, f"{inside}: never closed"
    return found


ALL = {page: blocks(page) for page in PAGES}


def commands(text: str) -> tuple[str, list[str]]:
    """The lines to be run, and those that must be printed."""
    run, printed, goes_on = [], [], False
    for line in text.splitlines():
        if goes_on or line.startswith("$ "):
            run.append(line.removeprefix("$ "))
            goes_on = line.endswith("\\")
        elif line.strip():
            printed.append(line)
    return "\n".join(run), printed


def on_console(block: Block, folder: Path) -> None:
    """Run a console block; it may fail only where it shows an error."""
    script, printed = commands(block.text)
    code, said = 0, ""
    for line in script.replace("\\\n", " ").splitlines():
        code, more = ran(line, folder)
        said += more
        if code:
            break
    expected = any(line.startswith("error: ") for line in printed)
    assert code == (2 if expected else 0), f"{block.where}: exit code {code}\n{said}"
    missing = [line for line in printed if line not in said.splitlines()]
    assert not missing, f"{block.where} shows {missing}, but the command said\n{said}"


def ran(line: str, folder: Path) -> tuple[int, str]:
    """Run a line of a console: its exit code, and what it said."""
    words = shlex.split(line, comments=True)
    if words[0] == "export":
        name, _, value = words[1].partition("=")
        os.environ[name] = os.path.expandvars(value)
        return 0, ""
    into = words.pop() if words[-2] == ">" else ""
    words = words[:-1] if into else words
    if words[0] != "disagg-sim" or set("".join(words)) & SHELL:
        return in_shell(line, folder)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch.dict(policies()):
        code = run(words[1:])
    if into:
        Path(into).write_text(out.getvalue())
        out = io.StringIO()
    return code, out.getvalue() + err.getvalue()


def in_shell(line: str, folder: Path) -> tuple[int, str]:
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    env["MPLCONFIGDIR"] = matplotlib.get_configdir()  # a home of its own would have its fonts listed anew
    done = subprocess.run(["bash", "-c", line], env=env, text=True, capture_output=True, timeout=LIMIT_S, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with the command and traces; policies that a page registers are forgotten afterwards."""
    for name in ("bin", "baselines"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin" / "disagg-sim").write_text(COMMAND)
    (tmp_path / "bin" / "disagg-sim").chmod(0o755)
    (tmp_path / "conv.csv").write_text(TRACE)
    (tmp_path / "log.csv").write_text(TRACE.replace("arrival_s,input_tokens,output_tokens", "ts,prompt_len,gen_len"))
    for name in ("conversation_trace.jsonl", "synthetic_trace.jsonl"):
        (tmp_path / name).write_text(TURNS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    with patch.dict(policies()), patch.dict(os.environ):
        yield tmp_path


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if ALL[page]], ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("in_one_process", "without_changes")
def test_the_blocks_of_a_page_run(page, folder):
    asked = [block for block in ALL[page] if block.language in RUN and block.reason is None]
    for block in asked:
        assert block.file or block.language != "yaml", f"{block.where}: begins with no comment that names its file"
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            if block.language == "yaml" and not block.file.startswith("."):
                check = Block(block.where, "console", f"$ disagg-sim specs check {block.file}", None)
                with pytest.MonkeyPatch.context() as patched:
                    if "/" in block.file:
                        patched.setenv(PATH_VARIABLE, str(folder))
                    on_console(check, folder)
    names = {"__name__": "page"}
    for block in asked:
        if block.language == "python":
            exec(compile(block.text, block.where, "exec", dont_inherit=True), names)
        elif block.language == "console":
            on_console(block, folder)


LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PICTURE_BYTES = 150_000


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_between_pages_lead_somewhere():
    for page, link in ((each, link) for each in PAGES for link in LINK.findall(each.read_text(encoding="utf-8"))):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.relative_to(ROOT)}: no {path}"
        assert not anchor or anchor in anchors(target), f"{page.name}: no heading #{anchor} in {target.name}"


CODE = re.compile(r"`([\w./]+)`")
ROOMS = {"lab"} | {path.stem for path in (ROOT / "disagg_sim").iterdir() if path.suffix == ".py" or path.is_dir()}
PHYSICS = {path.stem for path in (ROOT / "disagg_sim" / "physics").rglob("*.py")}


@cache
def sources() -> list[str]:
    """Every Python file of the checkout."""
    return [f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py") if ".venv" not in path.parts]


def resolves(name: str) -> bool:
    """Whether ``a.b.c`` is a module, or an attribute of something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        with suppress(ImportError):
            found = importlib.import_module(".".join(parts[:end]))
            return reduce(lambda owner, each: getattr(owner, each, None), parts[end:], found) is not None
    return False


def names_of_code(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return set(CODE.findall(text))


def test_files_and_functions_that_a_page_names_exist():
    """A path is complete from some folder on; a function is named from its room, or from ``physics``, on."""
    for page, name in ((each, name) for each in PAGES for name in names_of_code(each)):
        if name.endswith(".py") and not name.startswith("my_"):
            assert any(path.endswith(f"/{name}") for path in sources()), f"{page.name} names {name}"
        elif "." in name and "/" not in name:
            first = name.removeprefix("disagg_sim.").partition(".")[0]
            if (first in PHYSICS | ROOMS or page.name == "physics.md") and not name.endswith(
                (".md", ".yaml", ".csv", ".pyi")
            ):
                whole = [f"disagg_sim.{room}{name.removeprefix('disagg_sim.')}" for room in ("", "physics.")]
                whole += [name] * (first == "lab")
                assert any(map(resolves, whole)), f"{page.name} names {name}"


def test_pictures_are_small_and_each_is_drawn_by_the_script_and_shown_by_a_page():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stored = {path.name: path for path in module.FOLDER.iterdir()}
    shown = {Path(link).name for page in PAGES for link in LINK.findall(page.read_text()) if "img/" in link}
    photographed = set(re.findall(r'FOLDER / "(\w+\.png)"', (ROOT / "docs" / "screenshots.py").read_text()))
    assert set(stored) == {f"{name}.svg" for name in module.FIGURES} | photographed == shown
    assert all(path.stat().st_size < PICTURE_BYTES for path in stored.values())
    assert set(module.ROOMS) == {path.parent.name for path in (ROOT / "disagg_sim").glob("*/__init__.py")}


def test_the_citation_and_the_package_agree():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["title"], cited["version"], cited["license"]) == tuple(
        project[k] for k in ("name", "version", "license")
    )
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] == "software"
    assert cited["message"]
    assert cited["authors"]


def test_a_block_that_does_not_run_says_why():
    for block in (block for page in PAGES for block in ALL[page]):
        assert block.language in (*RUN, *SHOWN), f"{block.where}: {block.language!r} is neither run nor shown"
        assert block.reason is None or len(block.reason.split()) > 1, f"{block.where}: the mark gives no reason"
        if block.language == "json":
            json.loads(block.text)


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Commands of ``disagg-sim`` that pages show and that no test runs, with their places."""
    for block in (block for page in PAGES for block in ALL[page]):
        if block.language == "text" or (block.language == "console" and block.reason is not None):
            script = block.text.replace("\\\n", " ").replace(" ... ", " ")
            for line in re.findall(r"^(?:\$ )?(?:\w+=\S+ )?disagg-sim (.*[^.\n])$", script, flags=re.MULTILINE):
                yield block.where, shlex.split(line, comments=True)


def test_commands_that_are_shown_and_not_run_have_options_that_exist():
    found = list(shown_commands())
    for where, words in found:
        command: Any = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        try:
            _, left, _ = command.make_parser(click.Context(command)).parse_args(words)
        except click.UsageError as error:
            pytest.fail(f"{where}: {error.format_message()}")
        assert not left or not hasattr(command, "commands"), f"{where}: no command {left[0]}"
    assert len(found) >= 30


def test_messages_that_pages_show_are_those_of_the_code():
    lines = re.findall(r"^error: .*$", (ROOT / "docs" / "install.md").read_text(), flags=re.MULTILINE)
    with pytest.raises(MissingExtraError) as missing, extra("simulate"):
        raise ModuleNotFoundError(name="numba")
    assert lines == [f"error: {missing.value}", f"error: {MISSING.format(what='validate')}"]


def test_most_blocks_run():
    known = [block for page in PAGES for block in ALL[page] if block.language in RUN]
    asked = [block for block in known if block.reason is None]
    assert len(known) >= 30
    assert len(asked) >= 0.7 * len(known)
