#!/usr/bin/env bash
# Written by disagg-sim.
# decode: 2 instances of TP4, 4 GPUs on 1 node each. SGLang 0.5.21.
# Run it once for each instance, on its node.
set -euo pipefail
CHECKPOINT=nvidia/Llama-3.1-70B-Instruct-FP8
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
SLOT="${SLOT:-0}"  # number of the instance on this node, from 0
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 4)) $((SLOT * 4 + 3)))}"
export SGLANG_DISAGG_STAGING_BUFFER=1
exec python3 -m sglang.launch_server \
  --model-path "$MODEL" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tp-size 4 \
  --context-length 6144 \
  --max-running-requests 96 \
  --kv-cache-dtype fp8_e4m3 \
  --disaggregation-mode decode \
  --disaggregation-transfer-backend nixl \
  ${API_KEY:+--api-key "$API_KEY"}
