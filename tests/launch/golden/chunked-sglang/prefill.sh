#!/usr/bin/env bash
# Written by disagg-sim.
# prefill: 1 instance of TP8 PP4, 32 GPUs on 4 nodes each. SGLang 0.5.21.
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
  --tp-size 8 \
  --pp-size 4 \
  --max-running-requests 4 \
  --chunked-prefill-size 4096 \
  --max-prefill-tokens 4096 \
  --mem-fraction-static 0.9 \
  --kv-cache-dtype fp8_e4m3 \
  --disaggregation-mode prefill \
  --disaggregation-transfer-backend nixl \
  --disaggregation-bootstrap-port "$((8998 + SLOT))" \
  --nnodes 4 \
  --node-rank "$NODE_RANK" \
  --dist-init-addr "$HEAD:29500" \
  ${API_KEY:+--api-key "$API_KEY"}
