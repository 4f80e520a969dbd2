#!/usr/bin/env bash
# Written by disagg-sim.
# prefill: 3 instances of TP2, 2 GPUs on 1 node each. vLLM 0.31.0.
# Run it once for each instance, on its node.
set -euo pipefail
CHECKPOINT=nvidia/Llama-3.1-70B-Instruct-FP8
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
SLOT="${SLOT:-0}"  # number of the instance on this node, from 0
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 2)) $((SLOT * 2 + 1)))}"
export VLLM_API_KEY="${API_KEY:-}"  # asked for where it is not empty
export VLLM_NIXL_SIDE_CHANNEL_HOST="$HOST"
export VLLM_NIXL_SIDE_CHANNEL_PORT=$((5600 + SLOT * 2))
exec vllm serve "$MODEL" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tensor-parallel-size 2 \
  --max-model-len 6144 \
  --max-num-seqs 4 \
  --max-num-batched-tokens 16384 \
  --gpu-memory-utilization 0.9 \
  --kv-cache-dtype fp8 \
  --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'
