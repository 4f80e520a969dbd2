#!/usr/bin/env bash
# prefill: 1 instance of TP8 PP4, 32 GPUs on 4 nodes each. TensorRT-LLM 1.3.0rc29.
# Run it once for each instance, in an allocation of Slurm over 4 nodes.
set -euo pipefail
MODEL="${MODEL:-deepseek-ai/DeepSeek-R1}"
SLOT=0
exec srun --nodes 4 --ntasks 32 --ntasks-per-node 8 --mpi pmix trtllm-llmapi-launch trtllm-serve "$MODEL" \
  --config "$(dirname "$0")/prefill.yaml" \
  --host 0.0.0.0 \
  --port "$((8100 + SLOT))"
