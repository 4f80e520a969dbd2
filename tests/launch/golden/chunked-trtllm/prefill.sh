#!/usr/bin/env bash
# Written by disagg-sim.
# prefill: 1 instance of TP8 PP4, 32 GPUs on 4 nodes each. TensorRT-LLM 1.3.0rc29.
# Run it once for each instance, in an allocation of Slurm over 4 nodes.
set -euo pipefail
CHECKPOINT=deepseek-ai/DeepSeek-R1
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
SLOT=0
exec srun --nodes 4 --ntasks 32 --ntasks-per-node 8 --mpi pmix trtllm-llmapi-launch trtllm-serve "$MODEL" \
  --config "$(dirname "$0")/prefill.yaml" \
  --host "$HOST" \
  --port "$((8100 + SLOT))"
