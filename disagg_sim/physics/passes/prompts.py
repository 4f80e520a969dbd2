"""Time a pass of prompts whose start may be cached, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.facts.hardware import KvTier
from disagg_sim.facts.traffic import HBM
from disagg_sim.physics.cache_tiers import load_time
from disagg_sim.physics.passes.chunked import chunked_passes
from disagg_sim.physics.passes.prefill import PrefillPass, PromptLoad, prefill_pass
from disagg_sim.physics.roofline import Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric


def prompt_pass(
    at: Setup,
    mapping: Sharding,
    *,
    batch: Numeric,
    isl: Numeric,
    past: Numeric,
    chunk_tokens: Numeric,
    tier: KvTier | None = None,
    mla_form: str = "auto",
) -> PrefillPass:
    """Time the prefill of a batch of prompts of one length and one cached past; arrays of shape (rows, batches). [s]

    A past below HBM (``tier``) is loaded first, or computed again if that is faster.
    """
    (done,) = PromptPasses(at, mapping, batch, chunk_tokens, (mla_form,)).passes(isl, past, tier)
    return done


class PromptPasses:
    """Time passes of prompts of several lengths and pasts, each length and past once for all cache tiers.

    With ``lone``, ``batch`` counts the prompts of one DP rank, and the others have none.
    """

    def __init__(
        self,
        at: Setup,
        mapping: Sharding,
        batch: Numeric,
        chunk_tokens: Numeric,
        forms: tuple[str, ...],
        *,
        lone: bool = False,
    ) -> None:
        self.at, self.mapping, self.batch, self.lone = at, mapping, batch, lone
        self._as_full = batch * mapping.dp_attn if lone else batch  # prompts, if every rank had as many as the fullest
        self.chunk_tokens, self.forms = chunk_tokens, forms
        self._known: dict[tuple[float, float], list[PrefillPass]] = {}

    def passes(self, isl: Numeric, past: Numeric, tier: KvTier | None) -> list[PrefillPass]:
        """Time the pass of ``prompt_pass`` under each form of MLA."""
        if np.ndim(isl - past):
            return self._each(isl, past)
        found = self._timed(isl, past)
        if tier is None or not past:
            return found
        load = load_time(self.at, self.mapping, batch=self._as_full, past=past, tier=tier)
        again = self._timed(isl, 0.0)
        return [
            computed.where(np.asarray(computed.ftl < loaded.ftl + load), loaded._replace(load=load))
            for computed, loaded in zip(again, found, strict=True)
        ]

    def expected(
        self, prompts: Sequence[tuple[float, float, float, str]], counted: tuple[float, float] | None
    ) -> list[PrefillPass]:
        """Average passes over lengths and pasts [token], weights [1] and tiers; FTL is of ``counted`` if set."""
        system = self.at.system
        self.time_at_once([prompt[:2] for prompt in prompts] + ([] if counted is None else [counted]))
        means = [PrefillPass(0.0, 0.0, Sums())] * len(self.forms)
        for isl, past, weight, tier in prompts:
            means = [
                PrefillPass(
                    mean.ftl + weight * each.ftl,
                    mean.busy + weight * each.busy,
                    mean.sums.plus(each.sums, weight),
                    mean.load + weight * each.load,
                    mean.stall + weight * each.stall,
                )
                for mean, each in zip(means, self.passes(isl, past, system.tier(tier)), strict=True)
            ]
        if counted is None:
            return means
        longest = self.passes(*counted, system.tier(HBM))
        return [mean._replace(ftl=each.ftl) for mean, each in zip(means, longest, strict=True)]

    def time_at_once(self, prompts: Iterable[tuple[float, float]]) -> None:
        """Time prompts without a past in one table, which ``passes`` then reads; a column is a prompt and a batch."""
        isl = [isl for isl, past in dict.fromkeys(prompts) if not past and (isl, past) not in self._known]
        if np.ndim(self.batch) != 2 or len(isl) < 2:
            return
        batches = np.shape(self.batch)[1]
        every = PromptPasses(
            self.at, self.mapping, np.tile(self.batch, len(isl)), self.chunk_tokens, self.forms, lone=self.lone
        )
        found = every.passes(np.repeat(isl, batches)[None, :], 0.0, None)
        for place, each in enumerate(isl):
            self._known[each, 0.0] = [done.columns(place * batches, batches) for done in found]

    def _timed(self, isl: float, past: float) -> list[PrefillPass]:
        if (isl, past) not in self._known:
            self._known[isl, past] = self._each(isl, past)
        return self._known[isl, past]

    def _each(self, isl: Numeric, past: Numeric) -> list[PrefillPass]:
        at, mapping, batch, chunk, forms = self.at, self.mapping, self.batch, self.chunk_tokens, self.forms
        if np.any(np.asarray(chunk) > 0):
            full = self._as_full
            return chunked_passes(at, mapping, batch=full, isl=isl, chunk_tokens=chunk, past=past, forms=forms)
        own = PromptLoad(batch, 1.0 * (isl - past)) if self.lone else None
        return [
            prefill_pass(at, mapping, batch=batch, isl=isl, past=past, mla_form=form, slowest=own) for form in forms
        ]


def form_of_whole(form: str, *, reused: bool) -> str:
    """Name the form of MLA that passes of whole prompts run.

    They have no earlier chunk to keep, and without a past nothing to project again.

    >>> [form_of_whole(form, reused=False) for form in ("auto", "absorbed", "cached")]
    ['naive', 'absorbed', 'naive']
    >>> [form_of_whole(form, reused=True) for form in ("auto", "absorbed", "cached")]
    ['auto', 'absorbed', 'naive']
    """
    return form if form == "absorbed" or (reused and form == "auto") else "naive"
