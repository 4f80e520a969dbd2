#!/usr/bin/env bash
# Written by disagg-sim.
# decode: 1 instance of DP16 EP16, 16 GPUs on 2 nodes each. SGLang 0.5.21.
# Run it on every node of each instance.
set -euo pipefail
CHECKPOINT=deepseek-ai/DeepSeek-R1
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
NODE_RANK="${NODE_RANK:?number of this node in its instance, from 0}"
HEAD="${HEAD:?address of node 0 of the instance}"
SLOT=0
exec python3 -m sglang.launch_server \
  --model-path "$MODEL" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tp-size 16 \
  --dp-size 16 \
  --enable-dp-attention \
  --moe-dense-tp-size 1 \
  --ep-size 16 \
  --moe-a2a-backend deepep \
  --deepep-mode low_latency \
  --max-running-requests 1008 \
  --mem-fraction-static 0.9 \
  --kv-cache-dtype fp8_e4m3 \
  --disaggregation-mode decode \
  --disaggregation-transfer-backend nixl \
  --nnodes 2 \
  --node-rank "$NODE_RANK" \
  --dist-init-addr "$HEAD:29500" \
  ${API_KEY:+--api-key "$API_KEY"}
