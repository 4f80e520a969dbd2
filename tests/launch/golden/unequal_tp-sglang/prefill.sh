#!/usr/bin/env bash
# Written by disagg-sim.
# prefill: 3 instances of TP2, 2 GPUs on 1 node each. SGLang 0.5.21.
# Run it once for each instance, on its node.
set -euo pipefail
CHECKPOINT=nvidia/Llama-3.1-70B-Instruct-FP8
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
SLOT="${SLOT:-0}"  # number of the instance on this node, from 0
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 2)) $((SLOT * 2 + 1)))}"
export SGLANG_DISAGG_STAGING_BUFFER=1
exec python3 -m sglang.launch_server \
  --model-path "$MODEL" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tp-size 2 \
  --context-length 6144 \
  --max-running-requests 4 \
  --chunked-prefill-size 16384 \
  --max-prefill-tokens 16384 \
  --kv-cache-dtype fp8_e4m3 \
  --disaggregation-mode prefill \
  --disaggregation-transfer-backend nixl \
  --disaggregation-bootstrap-port "$((8998 + SLOT))" \
  ${API_KEY:+--api-key "$API_KEY"}
