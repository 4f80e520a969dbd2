"""DOPD, claim by claim."""

from __future__ import annotations

from pathlib import Path

from lab.studies.claims import PaperText

#: Its claims in words.
TEXT = PaperText(Path(__file__).parent)
