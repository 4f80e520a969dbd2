#!/usr/bin/env bash
# Written by disagg-sim.
# prefill: 6 instances of DP4 EP4, 4 GPUs on 1 node each. TensorRT-LLM 1.3.0rc29.
# Run it once for each instance, on its node.
set -euo pipefail
CHECKPOINT=nvidia/DeepSeek-R1-NVFP4
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
SLOT="${SLOT:-0}"  # number of the instance on this node, from 0
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 4)) $((SLOT * 4 + 3)))}"
exec trtllm-serve "$MODEL" \
  --config "$(dirname "$0")/prefill.yaml" \
  --host "$HOST" \
  --port "$((8100 + SLOT))"
