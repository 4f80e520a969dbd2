#!/usr/bin/env bash
# Written by disagg-sim.
# decode: 2 instances of DP8 EP8, 8 GPUs on 1 node each. TensorRT-LLM 1.3.0rc29.
# Run it once for each instance, on its node.
set -euo pipefail
CHECKPOINT=deepseek-ai/DeepSeek-R1
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
SLOT="${SLOT:-0}"  # number of the instance on this node, from 0
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 8)) $((SLOT * 8 + 7)))}"
exec trtllm-serve "$MODEL" \
  --config "$(dirname "$0")/decode.yaml" \
  --host "$HOST" \
  --port "$((8100 + SLOT))"
