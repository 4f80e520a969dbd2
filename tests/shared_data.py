"""Public data that stand beside a checkout: a test names the file that it reads and is skipped where that is missing.

What else lies in a folder is nobody's concern: a file that is added there changes no test. ``test_architecture.py``
holds that no test finds its data in another way.
"""

from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2] / "shared" / "data"


def shared_file(name: str) -> Path:
    """Path of a data file by its name below the data folder, such as ``kernels/gemm.csv``."""
    path = _ROOT / name
    if not path.is_file():
        pytest.skip(f"{name} is not beside the checkout")
    return path


def lend(checkout: Path) -> None:
    """Let a copy of the checkout find the same files, by a link beside it."""
    if _ROOT.is_dir():
        (checkout.parent / _ROOT.parent.name).symlink_to(_ROOT.parent)
