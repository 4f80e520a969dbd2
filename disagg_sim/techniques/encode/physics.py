"""Time the encoding of the images of a request, and size what goes on to prefill.

Every patch sees all others of its image: 2*P_v FLOP of matrix multiplies a patch and 4*L*d*N^2 of attention an image,
P_v the weights of the tower. No table of measured encoders is at hand, so all of it, attention included, is timed at
the rates of bf16 GEMMs of the system; one GPU encodes a request, image by image.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg_sim.errors import InputError, as_float, quoted, whole_number
from disagg_sim.facts.model import EncoderSpec, ModelSpec
from disagg_sim.facts.precision import BF16
from disagg_sim.physics.cost import total_cost
from disagg_sim.physics.kv_transfer import own_link_bandwidth
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import ACTIVATION_BYTES, Operator, Work, gemm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodeStep:
    """What an instance of an encode pool, one GPU, does for a request."""

    setup: Setup
    images: int  # of a request [1]
    height: int  # of an image [pixel]
    width: int  # [pixel]
    tokens: int  # of a request: part of its prompt [token]
    time: float  # to encode all of them, none cached [s]
    transfer: float  # of the embeddings over the NIC [s]
    embedding_bytes: float  # of a request [B]
    flops: float  # of a request, none cached [FLOP]
    cached: float  # share of images whose embeddings are kept [1]

    @property
    def operators(self) -> list[tuple[Operator, int]]:
        """Operators of one image and how often each runs; counts of one GPU."""
        return _operators(self.setup.model, self.height, self.width)

    @property
    def each_s(self) -> float:
        """Time for which a request keeps a GPU. [s]"""
        return self.time * (1.0 - self.cached)

    @property
    def request_rate(self) -> float:
        """Requests that one GPU encodes. [request/s]"""
        return 1.0 / self.each_s

    @property
    def latency(self) -> float:
        """What encoding and the transfer of embeddings add to the FTL, nothing of it hidden or cached. [s]"""
        return self.time + self.transfer


def encoder_operators(encoder: EncoderSpec, hidden: int, patches: int) -> list[tuple[Operator, int]]:
    """Operators of the tower and its projector for one image, and how often each runs."""
    n, d, f, joined = patches, encoder.hidden, encoder.width, encoder.hidden * encoder.merge**2
    tokens, layers = n // encoder.merge**2, encoder.layers
    scores = Work(4.0 * d * n**2, 4.0 * d * n * ACTIVATION_BYTES)
    attention = Operator("attention", "gemm", scores, BF16.name, shape=(n, n, 2 * d))
    return [
        (gemm("query, key, value", n, 3 * d, d, BF16), layers),
        (attention, layers),
        (gemm("output", n, d, d, BF16), layers),
        (gemm("up", n, f, d, BF16), layers),
        (gemm("down", n, d, f, BF16), layers),
        (Operator("elementwise", "elementwise", Work(0.0, n * (16.0 * d + 6.0 * f))), layers),
        (gemm("join", tokens, joined, joined, BF16), 1),
        (gemm("project", tokens, hidden, joined, BF16), 1),
    ]


def encode_step(at: Setup, *, images: int, height: int, width: int, cached: float = 0.0) -> EncodeStep:
    """Time the encoding of the images of one request on one GPU.

    Parameters
    ----------
    at : Setup
        Model with an ``encoder`` in its file, and the system of the encode pool.
    images : int
        Of a request. [1]
    height, width : int
        Of an image. [pixel]
    cached : float
        Share of images whose embeddings a cache holds, from 0, below 1. [1]

    Returns
    -------
    EncodeStep
        Time and transfer of a request [s], and the rate of a GPU [request/s].

    Raises
    ------
    InputError
        A model without encoder, values out of range.

    Examples
    --------
    Two images of 6400 patches, 1600 tokens each; 21.1 TFLOP at 989 TFLOP/s take 21 ms, norms and residuals 3 ms:

    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("kimi_k2_5", "h200_sxm", "fp8", profile="ideal")
    >>> step = encode_step(at, images=2, height=1120, width=1120)
    >>> step.tokens, f"{1e3 * step.time:.0f} ms, {step.embedding_bytes / 1e6:.0f} MB"
    (3200, '24 ms, 46 MB')
    """
    encoder = at.model.encoder
    if encoder is None:
        raise InputError(f"model {at.model.name} has no encoder in its file: it takes no images")
    for name, value in (("images", images), ("height", height), ("width", width)):
        whole_number(name, value)
    if not 0.0 <= as_float(cached) < 1.0:
        raise InputError(f"cached {quoted(cached)} is out of range; allowed: from 0, below 1")
    tokens, operators = images * encoder.tokens(height, width), _operators(at.model, height, width)
    one = sum(total_cost([op], at).time * runs for op, runs in operators)
    size = tokens * at.model.hidden * ACTIVATION_BYTES
    link = own_link_bandwidth(at.system, at.profile, within_domain=False)
    return EncodeStep(
        setup=at,
        images=images,
        height=height,
        width=width,
        tokens=tokens,
        time=float(images * one),
        transfer=at.profile.p2p_latency_across + size / link,
        embedding_bytes=size,
        flops=float(images * sum(op.work.flops * runs for op, runs in operators)),
        cached=cached,
    )


def _operators(model: ModelSpec, height: int, width: int) -> list[tuple[Operator, int]]:
    """Those of one image of so many pixels."""
    assert model.encoder is not None, "an EncodeStep is made of models with one"
    return encoder_operators(model.encoder, model.hidden, model.encoder.patches(height, width))
