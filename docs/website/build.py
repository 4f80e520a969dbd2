"""Build the site: ``python docs/website/build.py`` writes it to ``build/site/html``; a link that leads nowhere fails.

Pages are put together in ``build/site/pages``: those of the repository, the notebooks after a run, and a reference of
commands and of Python names made from the code. ``--quick`` runs the first notebook alone and shows the others without
outputs; ``--serve`` shows the site on this machine until it is interrupted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # the package of this tree

from docs.website.commands import command_reference  # noqa: E402
from docs.website.notebooks import notebook_page  # noqa: E402
from docs.website.pages import page, sources  # noqa: E402
from docs.website.python_api import python_reference  # noqa: E402

PAGES = ROOT / "build" / "site" / "pages"
STYLE = ROOT / "docs" / "website" / "style.css"


def write_pages(folder: Path, *, run_all: bool) -> None:
    """Write the pages of the site into a folder, which is emptied first.

    Parameters
    ----------
    folder : Path
        Where the pages go.
    run_all : bool
        Whether all notebooks are run, so that their pages have tables and pictures, or the first alone.
    """
    shutil.rmtree(folder, ignore_errors=True)
    pages, copies = sources(), {"style.css": STYLE}
    notebooks = [path for path in pages.values() if path.suffix == ".ipynb"]
    (folder / "notebooks").mkdir(parents=True)
    with ProcessPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        done = [
            pool.submit(notebook_page, path, folder / "notebooks", run=run_all or path == min(notebooks))
            for path in notebooks
        ]
        for place, path in pages.items():
            if path.suffix == ".md":
                _write(folder / place, page(place, path.read_text(encoding="utf-8"), pages, copies))
        _write(folder / "reference" / "commands.md", command_reference())
        _write(folder / "reference" / "python.md", python_reference())
        for place, path in copies.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / place)
        for each in done:
            each.result()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main() -> int:
    """Write the pages, then let the generator make the site of them."""
    parser = argparse.ArgumentParser(description="Build the site of the documentation.")
    parser.add_argument("--quick", action="store_true", help="run the first notebook alone")
    parser.add_argument("--serve", action="store_true", help="show the site on this machine")
    asked = parser.parse_args()
    write_pages(PAGES, run_all=not asked.quick)
    command = ["serve"] if asked.serve else ["build", "--clean", "--strict"]
    generator = [str(Path(sys.executable).with_name("zensical")), *command]
    return subprocess.run(generator, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
