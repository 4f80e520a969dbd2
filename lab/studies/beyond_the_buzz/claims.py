"""Collect and evaluate the claims of "Beyond the Buzz" (arXiv 2506.05508).

Kinds say where a claim comes from: ``paper`` is said in its text, ``figure`` read from its pictures, ``derived``
follows from its equations. Acceptance bands of pictures are this project's own reading. Every claim runs under the
default recipe (fp8 attention) unless its note says otherwise; interactivity is compared over 20-100 tokens/s/user,
near the paper's plots, where the acceptance names no other range.
"""

from __future__ import annotations

from lab.studies import claims as judged
from lab.studies.beyond_the_buzz import (
    claims_gain,
    claims_limits,
    claims_mappings,
    claims_ratio,
    claims_shape,
    claims_sharing,
    claims_transfer,
)
from lab.studies.beyond_the_buzz.evidence import Evidence

PROFILES = ("ideal", "optimistic", "measured")
#: Every claim, in order.
CLAIMS: tuple[judged.Claim[Evidence], ...] = judged.claims_of(
    claims_gain, claims_limits, claims_mappings, claims_ratio, claims_shape, claims_sharing, claims_transfer
)
