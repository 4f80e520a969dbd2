"""Turn equations and citations of docstrings into what a browser shows; the site's reader of docstrings loads this."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

MATH = re.compile(r"^\.\. math:: (?P<tex>.*(?:\n[ \t]+\S.*)*)", flags=re.MULTILINE)
DOI = re.compile(r":doi:`([^`]+)`")
ROLE = re.compile(r":(?:func|class|meth|mod):`~?([^`]+)`")


def for_site(text: str) -> str:
    """Write equations as MathML, DOIs as links and roles as code.

    >>> for_site("See :doi:`10.1/2`.")
    'See [doi:10.1/2](https://doi.org/10.1/2).'
    """
    text = MATH.sub(lambda found: convert(" ".join(textwrap.dedent(found["tex"]).split()), display="block"), text)
    return ROLE.sub(r"`\1`", DOI.sub(r"[doi:\1](https://doi.org/\1)", text))


class Docstrings(griffe.Extension):
    """Change every docstring once it has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = for_site(obj.docstring.value)
