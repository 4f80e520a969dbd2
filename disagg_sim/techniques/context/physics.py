r"""Time scores and values where GPUs share the tokens of a sequence, and what they send each other for it.

**Decode.** Of the tp GPUs of an attention group, the dcp that would hold copies of a KV head hold shares of its tokens.
Each takes the heads of tp/dcp GPUs on 1/dcp of the context, and the outputs are merged by their softmax sums. For B new
tokens and :math:`H = n_q\,dcp/tp` heads, in each layer:

* queries, :math:`S_q = 2BHd_q` bytes, are gathered over the dcp GPUs (d_q is r_kv + d_r in latent space);
* sums, 4BH bytes of each of them, are gathered (``ag_rs``), or travel with the outputs (``a2a``);
* outputs, :math:`S_o = 2BHd_o`, are corrected by the sums, one pass through memory, and reduce-scattered: every GPU
  ends with the :math:`n_q/tp` heads that it projects.

``helix`` projects the queries of all H heads on every one of the dcp GPUs, so that there is nothing to gather, and
sends outputs as ``a2a`` does; where it *overlaps* (HOP-B), the exchange of a sequence hides behind the scores of the
next: :math:`\max(t_x/B, t_x - t_a(1 - 1/B))` of it stays visible.

**Prefill.** Of pcp ranks each takes two pieces of a prompt, one from its front and one from its back, so that all score
as many pairs. Keys and values of the new tokens, in 16 bits, are gathered over the ranks, once a layer; in a ``ring``
they pass from rank to rank while their pairs are scored, and :math:`(N-1)\max(t_{hop} - t_a/N, 0)` stays visible. Under
dcp the cached past of a chunk is gathered before its pairs are scored.

References: vLLM, docs/serving/context_parallel_deployment.md; N. Bhatia et al., "Helix parallelism",
:arxiv:`2507.07120`; H. Liu et al., "Ring attention", :arxiv:`2310.01889`; A. Yang et al., "Context parallelism for
scalable million-token inference", :arxiv:`2411.01783`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg_sim.physics.blocks.base import AttentionBlock
from disagg_sim.physics.cost import cheapest, kernel_cost, peer_cost, total_cost
from disagg_sim.physics.roofline import NOTHING, Cost, Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.tabulate import is_one
from disagg_sim.physics.work import ACTIVATION_BYTES, Numeric, Operator, Tokens, Work

#: Bytes of the sum of a softmax: fp32. [B]
SUM_BYTES = 4.0
#: One of six elementwise kernels of a layer, whose latencies ``elementwise_latency`` of a profile sums up. [1]
ONE_KERNEL = 1.0 / 6.0
#: A collective multiplies nothing.
_SENT = Work(0.0, 0.0)


def shared_decode(block: AttentionBlock[Any], at: Setup, tp: Numeric, tokens: Tokens, form: str) -> Cost:
    """Time scores and values of decodes whose cached tokens ``tokens.dcp`` GPUs share, and a layer's exchange. [s]"""
    dcp = tokens.dcp
    scores = cheapest(total_cost(ops, at) for ops in block.decode_share(at.precision, tp, dcp, tokens, form))
    rows, how = block.spec.shared_rows, at.sharing
    if rows is None:
        return scores
    heads = tokens.decodes * tokens.queries * (rows.heads * dcp / tp)
    outputs = heads * (rows.output * ACTIVATION_BYTES)
    sums = heads * SUM_BYTES
    queries = NOTHING
    if how.decode != "helix":
        size = heads * (rows.query * ACTIVATION_BYTES)
        queries = kernel_cost(Operator("all-gather of queries", "gather", _SENT, size=size, ranks=dcp), at)
    if how.decode == "ag_rs":
        gathered = Operator("all-gather of softmax sums", "gather", _SENT, size=sums * dcp, ranks=dcp)
        back = kernel_cost(gathered, at)
    else:
        back, outputs = NOTHING, outputs + sums
    moved = Work(0.0, heads * (2.0 * rows.output * ACTIVATION_BYTES))
    back = back + kernel_cost(Operator("merge of outputs", "elementwise", moved, runs=ONE_KERNEL), at)
    back = back + kernel_cost(Operator("reduce-scatter of outputs", "gather", _SENT, size=outputs, ranks=dcp), at)
    if how.overlaps:
        back = _behind(back, scores.time, np.maximum(tokens.decodes, 1.0))
    return scores + (queries + back) * np.where(np.asarray(dcp) > 1, 1.0, 0.0)


def _behind(exchange: Cost, scores: Numeric, sequences: Numeric) -> Cost:
    """What stays visible of an exchange, sequence by sequence, behind the scores of the sequence after. [s]"""
    share = 1.0 / sequences
    seen = np.maximum(exchange.time * share, exchange.time - scores * (1.0 - share))
    return Cost(seen, Sums(communication=seen))


def shared_prefill(block: AttentionBlock[Any], at: Setup, tp: Numeric, tokens: Tokens, form: str) -> Cost:
    """Time scores and values of prompts that ``tokens.pcp`` ranks share, and what keys and values take to come. [s]

    Two ranks of 8 GPUs, whose keys and values cross NICs, score a prompt of 131,072 tokens nearly twice as fast as one:

    >>> from disagg_sim.physics.blocks import layers_of
    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal")
    >>> ((layer, _),) = layers_of(at.model)
    >>> tokens = [Tokens(prompts=1.0, new=131072.0, pcp=pcp) for pcp in (1.0, 2.0)]
    >>> one, two = (shared_prefill(layer.attention, at, 8, each, "auto").time for each in tokens)
    >>> f"{one / two:.2f}"
    '1.86'
    """
    part, dcp, pcp = tokens.of_one, tokens.dcp, tokens.pcp
    cost = cheapest(total_cost(ops, at) for ops in block.prefill(at.precision, tp, part, form))
    if not is_one(pcp):
        row = sum(here for _, here in block.stores(ACTIVATION_BYTES, tp))
        size = tokens.prompts * tokens.new * row
        domains = np.ceil(tp * np.asarray(pcp) / at.system.nvlink_domain)
        sent = Operator("all-gather of keys and values", "gather", _SENT, size=size, ranks=pcp, domains=domains)
        if at.sharing.prefill == "ring":
            hop = peer_cost(sent._replace(name="ring of keys and values", size=size / pcp), np.asarray(domains) > 1, at)
            seen = (pcp - 1.0) * np.maximum(hop.time - cost.time / pcp, 0.0)
            cost = cost + Cost(seen, Sums(communication=seen))
        else:
            cost = cost + kernel_cost(sent, at)
    if not is_one(dcp) and block.spec.shared_rows is not None:
        row = sum(here * dcp for store, here in block.stores(at.precision.cache.bytes, tp, dcp) if not store.whole)
        size = tokens.prompts * tokens.past * row
        gathered = kernel_cost(Operator("all-gather of the past", "gather", _SENT, size=size, ranks=dcp), at)
        cost = cost + gathered * np.where((np.asarray(dcp) > 1) & (np.asarray(tokens.past) > 0), 1.0, 0.0)
    return cost
