#!/usr/bin/env bash
# Written by disagg-sim.
# prefill: 1 instance of TP8 PP4, 32 GPUs on 4 nodes each. vLLM 0.31.0.
# Run it on every node of each instance.
set -euo pipefail
CHECKPOINT=deepseek-ai/DeepSeek-R1
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
NODE_RANK="${NODE_RANK:?number of this node in its instance, from 0}"
HEAD="${HEAD:?address of node 0 of the instance}"
SLOT=0
export VLLM_API_KEY="${API_KEY:-}"  # asked for where it is not empty
export VLLM_NIXL_SIDE_CHANNEL_HOST="$HOST"
export VLLM_NIXL_SIDE_CHANNEL_PORT=$((5600 + SLOT * 32))
FOLLOWER=()
if [ "$NODE_RANK" -gt 0 ]; then FOLLOWER=(--headless); fi
exec vllm serve "$MODEL" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tensor-parallel-size 8 \
  --pipeline-parallel-size 4 \
  --max-num-seqs 4 \
  --max-num-batched-tokens 4096 \
  --kv-cache-dtype fp8 \
  --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}' \
  --nnodes 4 \
  --node-rank "$NODE_RANK" \
  --master-addr "$HEAD" \
  --master-port 29500 \
  "${FOLLOWER[@]}"
