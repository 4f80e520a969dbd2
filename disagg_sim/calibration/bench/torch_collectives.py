"""Collectives timed over processes of one machine: one process a rank, PyTorch's distributed package."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

WARM_UPS, REPEATS, CALLS = 3, 7, 10  # [1]


def collective_times(ranks: int, wanted: Sequence[tuple[str, int]], backend: str) -> list[float]:
    """Times of collectives, each as its slowest rank sees it. [s]

    Parameters
    ----------
    ranks
        Processes, each with a GPU of its own under "nccl". [1]
    wanted
        (op, bytes): "all_reduce", "all_gather", "reduce_scatter" or "alltoall", and the full tensor, of "alltoall"
        the send buffer of a rank, in two-byte elements.
    backend
        "nccl" on GPUs, "gloo" on the CPU (which lacks some of them on older releases).
    """
    from torch import multiprocessing

    told = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (tuple(wanted), ranks, backend, _free_port(), told)
    running = multiprocessing.start_processes(_rank, args=arguments, nprocs=ranks, join=False, start_method="spawn")
    slowest = [0.0] * len(wanted)
    for _ in range(ranks * len(wanted)):
        place, seconds = told.get()
        slowest[place] = max(slowest[place], seconds)
    running.join()
    return slowest


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    """Mean time of ``CALLS`` calls, started together. [s]"""
    distributed.barrier()
    if backend == "nccl":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(CALLS):
        call()
    if backend == "nccl":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / CALLS
