"""Print aligned tables to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from disagg_sim.errors import printable

if TYPE_CHECKING:
    import pandas as pd

    from disagg_sim.report.plan import ScreenPart

#: Exit code of an answer that nothing keeps the limits.
INFEASIBLE = 2
#: Columns of the output when it is no terminal.
WIDE = 200


def print_table(
    rows: Iterable[Sequence[object]],
    *,
    header: Sequence[str] = (),
    numeric: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> None:
    """Print rows in columns; ``numeric`` are flush right, ``whole`` never folded. A cell may be rich ``Text``."""
    print(table_text(rows, header=header, numeric=numeric, whole=whole))


def table_text(
    rows: Iterable[Sequence[object]],
    *,
    header: Sequence[str] = (),
    numeric: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> str:
    """The lines that ``print_table`` prints."""
    table = Table(box=None, show_header=bool(header), padding=(0, 2, 0, 0), pad_edge=False)
    body = [
        [cell if isinstance(cell, Text) else Text(" ".join(printable(str(cell)).splitlines())) for cell in row]
        for row in rows
    ]
    for index in range(max((len(row) for row in body), default=len(header))):
        table.add_column(
            header[index] if index < len(header) else "",
            justify="right" if index in numeric else "left",
            overflow="fold",
            no_wrap=index in whole,
        )
    for row in body:
        table.add_row(*row)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDE)
    with console.capture() as text:
        console.print(table)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def blocks_text(blocks: Iterable[ScreenPart]) -> str:
    """The blocks with a blank line between them."""
    parts = []
    for block in blocks:
        if len(block.rows[0]) == 1:
            parts.append("\n".join(row[0] for row in block.rows))
        else:
            parts.append(table_text(block.rows, header=block.header, numeric=block.numeric))
    return "\n\n".join(parts) + "\n"


def print_frame(table: pd.DataFrame) -> None:
    """Print a data frame with four digits per number."""
    numeric = [i for i, column in enumerate(table.columns) if table[column].dtype.kind in "fi"]
    rows = [[f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in table.to_numpy().tolist()]
    print_table(rows, header=list(map(str, table.columns)), numeric=numeric)
