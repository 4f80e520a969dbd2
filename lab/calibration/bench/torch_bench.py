"""Time PyTorch's kernels: on a GPU inside CUDA graphs with a cold cache, on a CPU by the wall clock.

Collectives run over processes of one machine, one a rank, by PyTorch's distributed package.

PyTorch is of the extra ``measure``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from disagg_sim.errors import InputError, check_word
from disagg_sim.extras import extra, safe_path
from disagg_sim.laboratory import in_workers
from disagg_sim.units import MS

DEVICES = ("cuda", "cpu")
WARM_UPS, REPEATS = 3, 7  # of a timed graph [1]
#: Inputs rotate through this many times the cache, so that no call finds its weights there. [1]
CACHES = 3
#: Calls in one graph: enough to hide the replay itself behind them. [1]
CALLS = 16
#: Collectives that start together, of which the mean counts. [1]
TOGETHER = 10


def torch_bench(device: str = "cuda") -> TorchBench:
    """Make the bench of a device, "cuda", or "cpu" to try the command out."""
    check_word("device", device, DEVICES)
    with extra("measure"):
        import torch
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("PyTorch finds no GPU here; --device cpu only tries the command out")
    return TorchBench(torch, device)


class TorchBench:
    """Times a call of PyTorch's kernels on a device. [s]; ``None`` where it has no such kernel or lacks the memory."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch, self._device = torch, device
        self._gpu = device == "cuda"
        self._cache = torch.cuda.get_device_properties(0).L2_cache_size if self._gpu else 0
        self._absent = (RuntimeError, AttributeError)  # no kernel (NotImplementedError is one), memory; no such type

    @property
    def name(self) -> str:
        """What the driver calls the device."""
        return str(self._torch.cuda.get_device_name(0)) if self._gpu else "CPU"

    @property
    def versions(self) -> Mapping[str, str]:
        """Library -> version, for ``torch`` and, where collectives run, ``nccl``."""
        torch = self._torch
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if self._gpu else "none"
        return {"torch": str(torch.__version__), "nccl": nccl}

    @property
    def ranks(self) -> int:
        """GPUs here, over which collectives run; 1 = none do. [1]"""
        return int(self._torch.cuda.device_count()) if self._gpu else 1

    def gemm(self, dtype: str, m: int, n: int, k: int) -> float | None:
        """``C[m,n] = A[m,k] @ B[k,n]``, B out of the cache; fp8 with one scale a tensor."""
        makers = {"bfloat16": self._bf16, "fp8": self._fp8}
        return self._seconds(lambda: makers[dtype](m, n, k))

    def copy(self, elements: int) -> float | None:
        """Device memory to device memory, ``elements`` of two bytes read and as many written."""
        size = 2 * elements

        def calls() -> Sequence[Callable[[], Any]]:
            pairs = [(self._bytes(size), self._bytes(size)) for _ in range(self._copies(2 * size))]
            return [partial(to.copy_, source) for to, source in pairs]

        return self._seconds(calls)

    def launch(self, graph: bool) -> float | None:
        """A kernel that does next to nothing, inside a graph or launched by the host one by one."""

        def calls() -> Sequence[Callable[[], Any]]:
            one = self._torch.zeros(1, device=self._device)
            return [lambda: one.add_(1.0)]

        return self._seconds(calls, graph=graph)

    def collectives(self, ranks: int, wanted: Sequence[tuple[str, int]]) -> Sequence[float]:
        """Times of (op, message bytes) over ``ranks`` processes, a GPU each; bytes as in the table of collectives."""
        return collective_times(ranks, wanted, "nccl" if self._gpu else "gloo")

    def _bytes(self, size: int) -> Any:
        return self._torch.zeros(size, dtype=self._torch.uint8, device=self._device)

    def _copies(self, size: int) -> int:
        """How many operands of ``size`` bytes keep the cache cold. [1]"""
        return max(1, min(CALLS, -(-CACHES * self._cache // max(size, 1))))

    def _random(self, *shape: int) -> Any:
        return self._torch.randn(*shape, dtype=self._torch.bfloat16, device=self._device)

    def _bf16(self, m: int, n: int, k: int) -> Sequence[Callable[[], Any]]:
        a = self._random(m, k)
        weights = [self._random(n, k) for _ in range(self._copies(2 * n * k))]
        return [partial(self._torch.matmul, a, b.t()) for b in weights]

    def _fp8(self, m: int, n: int, k: int) -> Sequence[Callable[[], Any]]:
        torch = self._torch
        if not self._gpu:
            raise NotImplementedError
        one = torch.ones((), device=self._device)
        a = self._random(m, k).to(torch.float8_e4m3fn)
        weights = [self._random(n, k).to(torch.float8_e4m3fn) for _ in range(self._copies(n * k))]
        scaled = torch._scaled_mm
        return [partial(scaled, a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16) for b in weights]

    def attention(self, batch: int, new: int, keys: int, q_heads: int, kv_heads: int, head_dim: int) -> float | None:
        """Causal attention of ``new`` tokens a sequence over ``keys``."""
        attend = self._torch.nn.functional.scaled_dot_product_attention

        def calls() -> Sequence[Callable[[], Any]]:
            query = self._random(batch, q_heads, new, head_dim)
            cached = [
                (self._random(batch, kv_heads, keys, head_dim), self._random(batch, kv_heads, keys, head_dim))
                for _ in range(self._copies(4 * batch * kv_heads * keys * head_dim))
            ]
            causal = new > 1
            return [partial(attend, query, k, v, is_causal=causal, enable_gqa=True) for k, v in cached]

        return self._seconds(calls)

    def _seconds(self, make: Callable[[], Sequence[Callable[[], Any]]], *, graph: bool = True) -> float | None:
        """Median time of one of the calls that ``make`` prepares. [s]"""
        try:
            calls = make()
            rounds = max(1, CALLS // len(calls))
            with self._torch.no_grad():
                replay = self._captured(calls, rounds) if self._gpu and graph else None
                for _ in range(WARM_UPS):
                    self._run(calls, 1, replay)
                return median(self._run(calls, rounds, replay) for _ in range(REPEATS)) / (rounds * len(calls))
        except self._absent:  # out of memory is a RuntimeError
            return None
        finally:
            if self._gpu:
                self._torch.cuda.empty_cache()

    def _captured(self, calls: Sequence[Callable[[], Any]], rounds: int) -> Callable[[], None]:
        """All calls as one CUDA graph."""
        torch = self._torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _repeat(calls, 1)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _repeat(calls, rounds)
        replay: Callable[[], None] = graph.replay
        return replay

    def _run(self, calls: Sequence[Callable[[], Any]], rounds: int, replay: Callable[[], None] | None) -> float:
        """Time of ``rounds`` times all calls. [s]"""
        if not self._gpu:
            begun = time.perf_counter()
            _repeat(calls, rounds)
            return time.perf_counter() - begun
        torch = self._torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if replay is not None:
            replay()
        else:
            _repeat(calls, rounds)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * MS


def _repeat(calls: Sequence[Callable[[], Any]], rounds: int) -> None:
    for _ in range(rounds):
        for call in calls:
            call()


def collective_times(ranks: int, wanted: Sequence[tuple[str, int]], backend: str) -> list[float]:
    """Times of collectives (op, bytes), each as its slowest rank sees it; bytes are those of the full tensor, of
    "alltoall" the send buffer of a rank, in two-byte elements. [s]
    """
    from torch import multiprocessing

    told = multiprocessing.get_context("spawn").SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = int(probe.getsockname()[1])
    arguments = (tuple(wanted), ranks, backend, free, told)
    with safe_path():
        started = multiprocessing.start_processes
        running = started(in_workers(_rank), args=arguments, nprocs=ranks, join=False, start_method="spawn")
    slowest = [0.0] * len(wanted)
    for _ in range(ranks * len(wanted)):
        place, seconds = told.get()
        slowest[place] = max(slowest[place], seconds)
    running.join()
    return slowest


def _rank(rank: int, wanted: tuple[tuple[str, int], ...], ranks: int, backend: str, port: int, told: Any) -> None:
    """What one process does: join, repeat each collective, tell (place, median time of a call)."""
    import torch
    from torch import distributed

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    store = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    for place, (op, size) in enumerate(wanted):
        call = _call(torch, distributed, op, max(size // 2 // ranks, 1), ranks, device)
        times = [_once(torch, distributed, call, backend) for _ in range(WARM_UPS + REPEATS)]
        told.put((place, median(times[WARM_UPS:])))
    distributed.destroy_process_group()


def _call(torch: Any, distributed: Any, op: str, share: int, ranks: int, device: Any) -> Callable[[], Any]:
    """The collective on a tensor of ``share`` elements a rank."""
    part = torch.zeros(share, dtype=torch.bfloat16, device=device)
    full = torch.zeros(share * ranks, dtype=torch.bfloat16, device=device)
    other = torch.zeros_like(full)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: distributed.all_reduce(full),
        "all_gather": lambda: distributed.all_gather_into_tensor(full, part),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(part, full),
        "alltoall": lambda: distributed.all_to_all_single(other, full),
    }
    return calls[op]


def _once(torch: Any, distributed: Any, call: Callable[[], Any], backend: str) -> float:
    """Mean time of ``TOGETHER`` calls, started together. [s]"""
    distributed.barrier()
    if backend == "nccl":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(TOGETHER):
        call()
    if backend == "nccl":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / TOGETHER
