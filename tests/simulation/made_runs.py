"""Records of runs written by hand, for tests of what is computed from them."""

import numpy as np

from disagg_sim.simulation.records import Decision, Instances, Outcome, Requests, RunResult, Samples

LETTERS = {"c": Outcome.COMPLETED, "r": Outcome.REJECTED, "f": Outcome.FAILED, "u": Outcome.UNFINISHED}


def made_requests(arrival, first, finish, output, status=None, transfer=None) -> Requests:
    """Requests that arrive, emit their first token and finish at given times; ``status`` by letters."""
    n = len(arrival)
    nothing, nowhere = np.full(n, np.nan), np.full(n, -1)
    moved = np.zeros(n) if transfer is None else np.asarray(transfer, dtype=float)
    return Requests(
        request=np.arange(n),
        arrival_s=np.asarray(arrival, dtype=float),
        input_tokens=np.full(n, 100),
        output_tokens=np.asarray(output),
        status=np.array([int(LETTERS[letter]) for letter in status or "c" * n]),
        prefill_instance=np.zeros(n, dtype=int),
        decode_instance=nowhere,
        prefill_start_s=nothing,
        prefill_end_s=np.asarray(first, dtype=float),
        first_token_s=np.asarray(first, dtype=float),
        transfer_s=moved,
        exposed_transfer_s=moved / 2,
        reserve_wait_s=np.zeros(n),
        decode_start_s=nothing,
        finish_s=np.asarray(finish, dtype=float),
        preemptions=np.zeros(n, dtype=int),
        cached_tokens=np.zeros(n, dtype=int),
        segments=np.ones(n, dtype=int),
        transferred_tokens=np.where(moved > 0, 100, 0),
        migrations=np.zeros(n, dtype=int),
    )


def made_run(requests: Requests, *, edges=(0.0, 0.1, 0.2), counts=(0, 0)) -> RunResult:
    """A run of two instances of 2 GPUs over 100 s, one of them busy half the time, the other for the first 25 s."""
    zero = np.zeros(3, dtype=int)
    return RunResult(
        policy="vllm",
        deployment="two",
        trace="made",
        seed=7,
        requests=requests,
        itl_edges=np.array(edges, dtype=float),
        itl_counts=np.array(counts),
        samples=Samples(
            time_s=np.array([0.0, 50.0, 100.0]),
            arrivals=np.array([1, 2, 2]),
            finished=np.array([0, 1, 2]),
            queued=np.array([4, 2, 0]),
            running=np.array([1, 1, 0]),
            kv_use=np.array([0.1, 0.5, 0.0]),
            gpus=np.array([4, 4, 4]),
            prefill_gpus=np.array([2, 2, 2]),
            decode_gpus=np.array([2, 2, 2]),
            transfers=zero,
        ),
        instances=Instances(
            role=np.array([0, 1]),
            gpus=np.array([2, 2]),
            start_s=np.array([0.0, 0.0]),
            stop_s=np.array([100.0, 100.0]),
            busy_s=np.array([50.0, 25.0]),
            decode_steps=np.array([0, 10]),
            decode_s=np.array([0.0, 25.0]),
            prefill_tokens=np.array([100, 0]),
            decode_tokens=np.array([0, 10]),
            flops=np.array([6e15, 2e15]),
            flips=np.array([1, 2]),
            kv_blocks=np.array([10, 10]),
            failed_s=np.zeros(2),
        ),
        decisions=(Decision(30.0, "flip", 1, "instance 1 to prefill", "prompts wait"),),
        duration_s=100.0,
        peak_flops=1e14,
        wall_s=0.5,
        cpu_s=0.25,
    )
