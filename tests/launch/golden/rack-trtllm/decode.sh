#!/usr/bin/env bash
# Written by disagg-sim.
# decode: 1 instance of DP48 EP48+32, 48 GPUs on 12 nodes each. TensorRT-LLM 1.3.0rc29.
# Run it once for each instance, in an allocation of Slurm over 12 nodes.
set -euo pipefail
CHECKPOINT=nvidia/DeepSeek-R1-NVFP4
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
SLOT=0
exec srun --nodes 12 --ntasks 48 --ntasks-per-node 4 --mpi pmix trtllm-llmapi-launch trtllm-serve "$MODEL" \
  --config "$(dirname "$0")/decode.yaml" \
  --host "$HOST" \
  --port "$((8100 + SLOT))"
