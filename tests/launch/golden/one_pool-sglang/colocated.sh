#!/usr/bin/env bash
# Written by disagg-sim.
# colocated: 4 instances of TP2, 2 GPUs on 1 node each. SGLang 0.5.21.
# Run it once for each instance, on its node.
set -euo pipefail
CHECKPOINT=Qwen/Qwen3-32B
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:-127.0.0.1}"  # where it listens; the whole deployment fits on one node
SLOT="${SLOT:-0}"  # number of the instance on this node, from 0
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 2)) $((SLOT * 2 + 1)))}"
exec python3 -m sglang.launch_server \
  --model-path "$MODEL" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tp-size 2 \
  --max-running-requests 128 \
  --chunked-prefill-size 2048 \
  --max-prefill-tokens 2048 \
  --enable-mixed-chunk \
  --kv-cache-dtype bf16 \
  ${API_KEY:+--api-key "$API_KEY"}
