#!/usr/bin/env bash
# Written by disagg-sim.
# prefill: 3 instances of TP8 EP8, 8 GPUs on 1 node each. vLLM 0.31.0.
# Run it once for each instance, on its node.
set -euo pipefail
CHECKPOINT=deepseek-ai/DeepSeek-R1
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
SLOT="${SLOT:-0}"  # number of the instance on this node, from 0
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 8)) $((SLOT * 8 + 7)))}"
export VLLM_API_KEY="${API_KEY:-}"  # asked for where it is not empty
export VLLM_NIXL_SIDE_CHANNEL_HOST="$HOST"
export VLLM_NIXL_SIDE_CHANNEL_PORT=$((5600 + SLOT * 8))
exec vllm serve "$MODEL" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tensor-parallel-size 8 \
  --enable-expert-parallel \
  --max-num-seqs 2 \
  --max-num-batched-tokens 16384 \
  --kv-cache-dtype fp8 \
  --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'
