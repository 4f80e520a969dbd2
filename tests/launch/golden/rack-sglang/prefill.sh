#!/usr/bin/env bash
# Written by disagg-sim.
# prefill: 6 instances of DP4 EP4, 4 GPUs on 1 node each. SGLang 0.5.21.
# Run it once for each instance, on its node.
set -euo pipefail
CHECKPOINT=nvidia/DeepSeek-R1-NVFP4
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
SLOT="${SLOT:-0}"  # number of the instance on this node, from 0
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 4)) $((SLOT * 4 + 3)))}"
exec python3 -m sglang.launch_server \
  --model-path "$MODEL" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tp-size 4 \
  --dp-size 4 \
  --enable-dp-attention \
  --moe-dense-tp-size 1 \
  --ep-size 4 \
  --moe-a2a-backend deepep \
  --deepep-mode normal \
  --context-length 6144 \
  --max-running-requests 4 \
  --chunked-prefill-size 20480 \
  --max-prefill-tokens 5120 \
  --kv-cache-dtype fp8_e4m3 \
  --disaggregation-mode prefill \
  --disaggregation-transfer-backend nixl \
  --disaggregation-bootstrap-port "$((8998 + SLOT))" \
  ${API_KEY:+--api-key "$API_KEY"}
