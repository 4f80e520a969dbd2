#!/usr/bin/env bash
# Written by disagg-sim.
# decode: 2 instances of DP8 EP8, 8 GPUs on 1 node each. SGLang 0.5.21.
# Run it once for each instance, on its node.
set -euo pipefail
CHECKPOINT=deepseek-ai/DeepSeek-R1
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
SLOT="${SLOT:-0}"  # number of the instance on this node, from 0
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 8)) $((SLOT * 8 + 7)))}"
exec python3 -m sglang.launch_server \
  --model-path "$MODEL" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tp-size 8 \
  --dp-size 8 \
  --enable-dp-attention \
  --moe-dense-tp-size 1 \
  --ep-size 8 \
  --moe-a2a-backend deepep \
  --deepep-mode low_latency \
  --max-running-requests 512 \
  --mem-fraction-static 0.9 \
  --kv-cache-dtype fp8_e4m3 \
  --disaggregation-mode decode \
  --disaggregation-transfer-backend nixl \
  ${API_KEY:+--api-key "$API_KEY"}
