#!/usr/bin/env bash
# colocated: 4 instances of TP2, 2 GPUs on 1 node each. vLLM 0.31.0.
# Run it once for each instance, on its node.
set -euo pipefail
MODEL="${MODEL:-Qwen/Qwen3-32B}"
SLOT="${SLOT:-0}"  # number of the instance on this node, from 0
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 2)) $((SLOT * 2 + 1)))}"
exec vllm serve "$MODEL" \
  --host 0.0.0.0 \
  --port "$((8100 + SLOT))" \
  --tensor-parallel-size 2 \
  --max-num-seqs 128 \
  --max-num-batched-tokens 2176 \
  --gpu-memory-utilization 0.9 \
  --kv-cache-dtype bfloat16
