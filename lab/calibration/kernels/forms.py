"""Define the kernel tables: the columns that the CSV of each operator has (``forms.yaml``).

A file with a column ``form`` holds tables of several forms, one below the other; cells of columns that a row's form
lacks are empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from disagg_sim.facts.yaml_files import read_mapping

#: Words of every form.
IDENTITY = ("system", "framework", "version", "kernel_source")
#: Column of the measurement. [us]
LATENCY = "latency_us"
#: Column that names the form of each row where a file holds several.
FORM = "form"
#: Column that any table may have: a name of each row, by which verdicts tell it; else its line does.
ROW_ID = "row_id"


@dataclass(frozen=True, slots=True)
class TableForm:
    """Columns of one kind of table."""

    name: str
    words: tuple[str, ...]  # columns of text beside IDENTITY
    sizes: tuple[str, ...]  # whole numbers
    key: tuple[str, ...]  # columns of the shape by which rows are held out

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns."""
        return (*IDENTITY, *self.words, *self.sizes, LATENCY)


#: Name -> form.
FORMS = {
    name: TableForm(name, tuple(row["words"]), tuple(row["sizes"]), tuple(row.get("key", row["sizes"])))
    for name, row in read_mapping(Path(__file__).with_suffix(".yaml")).items()
}
#: Sizes that may be zero; all others start at 1.
MAY_BE_ZERO = frozenset({"sms", "past_len", "rank0_num_tokens", "past_tokens", "shared_index"})


def form_of(columns: Iterable[str]) -> TableForm | None:
    """The form that shares most columns with a table; None when it has less than half of every form's own."""
    present = set(columns) - {*IDENTITY, LATENCY}

    def likeness(form: TableForm) -> float:
        own = {*form.words, *form.sizes}
        return len(own & present) / len(own | present)

    best = max(FORMS.values(), key=likeness)
    return best if likeness(best) >= 0.5 else None
