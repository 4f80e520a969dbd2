#!/usr/bin/env bash
# Written by disagg-sim.
# colocated: 4 instances of TP2, 2 GPUs on 1 node each. vLLM 0.31.0.
# Run it once for each instance, on its node.
set -euo pipefail
CHECKPOINT=Qwen/Qwen3-32B
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:-127.0.0.1}"  # where it listens; the whole deployment fits on one node
SLOT="${SLOT:-0}"  # number of the instance on this node, from 0
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 2)) $((SLOT * 2 + 1)))}"
export VLLM_API_KEY="${API_KEY:-}"  # asked for where it is not empty
exec vllm serve "$MODEL" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tensor-parallel-size 2 \
  --max-num-seqs 128 \
  --max-num-batched-tokens 2176 \
  --gpu-memory-utilization 0.9 \
  --kv-cache-dtype bfloat16
