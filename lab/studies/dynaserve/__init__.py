"""DynaServe, claim by claim."""

from __future__ import annotations

from lab.studies.claims import PaperText

#: Its claims.
TEXT = PaperText(__name__)
