#!/usr/bin/env bash
# Written by disagg-sim.
# decode: 1 instance of DP48 EP48+32, 48 GPUs on 12 nodes each. vLLM 0.31.0.
# Run it on every node of each instance.
set -euo pipefail
CHECKPOINT=nvidia/DeepSeek-R1-NVFP4
MODEL="${MODEL:-$CHECKPOINT}"
HOST="${HOST:?address of this node in a private network, where it listens}"
NODE_RANK="${NODE_RANK:?number of this node in its instance, from 0}"
HEAD="${HEAD:?address of node 0 of the instance}"
SLOT=0
export VLLM_API_KEY="${API_KEY:-}"  # asked for where it is not empty
export VLLM_NIXL_SIDE_CHANNEL_HOST="$HOST"
export VLLM_NIXL_SIDE_CHANNEL_PORT=$((5600 + SLOT * 48))
FOLLOWER=()
if [ "$NODE_RANK" -gt 0 ]; then FOLLOWER=(--headless); fi
exec vllm serve "$MODEL" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tensor-parallel-size 1 \
  --data-parallel-size 48 \
  --enable-expert-parallel \
  --all2all-backend flashinfer_nvlink_one_sided \
  --enable-eplb \
  --eplb-config '{"num_redundant_experts": 32}' \
  --max-model-len 6144 \
  --max-num-seqs 64 \
  --kv-cache-dtype fp8 \
  --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}' \
  --nnodes 12 \
  --node-rank "$NODE_RANK" \
  --master-addr "$HEAD" \
  --master-port 29500 \
  "${FOLLOWER[@]}"
