#!/usr/bin/env bash
# Written by disagg-sim.
# prefill: 6 instances of DP4 EP4, 4 GPUs on 1 node each. vLLM 0.31.0.
# Run it once for each instance, on its node.
set -euo pipefail
CHECKPOINT=nvidia/DeepSeek-R1-NVFP4
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
SLOT="${SLOT:-0}"  # number of the instance on this node, from 0
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 4)) $((SLOT * 4 + 3)))}"
export VLLM_API_KEY="${API_KEY:-}"  # asked for where it is not empty
export VLLM_NIXL_SIDE_CHANNEL_HOST="$HOST"
export VLLM_NIXL_SIDE_CHANNEL_PORT=$((5600 + SLOT * 4))
exec vllm serve "$MODEL" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tensor-parallel-size 1 \
  --data-parallel-size 4 \
  --enable-expert-parallel \
  --all2all-backend flashinfer_nvlink_one_sided \
  --max-model-len 6144 \
  --max-num-seqs 1 \
  --max-num-batched-tokens 5120 \
  --kv-cache-dtype fp8 \
  --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'
