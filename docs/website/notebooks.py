"""Run a notebook and make a page of it, with its tables and pictures."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor, ExecutePreprocessor

LIMIT_S = 300  # of a cell; the first simulation on a machine is compiled [s]


def notebook_page(path: Path, folder: Path, *, run: bool) -> None:
    """Write ``NAME.md`` and its pictures into ``folder``, after a run in a directory of its own or without one."""
    notebook = nbformat.read(path, as_version=4)
    if run:
        with TemporaryDirectory() as work:
            where = {"metadata": {"path": work}}
            ExecutePreprocessor(timeout=LIMIT_S, kernel_name="python3").preprocess(notebook, where)
    CoalesceStreamsPreprocessor(enabled=True).preprocess(notebook, {})  # lines printed one by one are one text
    text, resources = MarkdownExporter().from_notebook_node(
        notebook, {"output_files_dir": f"{path.stem}_files", "unique_key": path.stem}
    )
    for name, content in resources.get("outputs", {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    text = text.replace(".ipynb)", ".md)").replace("![png]", "![Picture drawn by the code above]")
    (folder / f"{path.stem}.md").write_text(text, encoding="utf-8")
