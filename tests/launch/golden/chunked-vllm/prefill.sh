#!/usr/bin/env bash
# Written by disagg-sim.
# prefill: 1 instance of TP8 PP4, 32 GPUs on 4 nodes each. vLLM 0.31.0.
# Run it on every node of each instance.
set -feuo pipefail
export PYTHONSAFEPATH=1
[[ "${API_KEY:-}" =~ [^[:space:]] ]] || API_KEY=''
require() {
  local LC_ALL=C
  [[ "${!1:-}" =~ ^($2)$ ]] && return
  printf '%s=%q; allowed: %s\n' "$1" "${!1:-}" "$3" >&2
  exit 1
}
PLANNED=deepseek-ai/DeepSeek-R1
CHECKPOINT="${CHECKPOINT:-$PLANNED}"
if [ "$CHECKPOINT" != "$PLANNED" ]; then
  require CHECKPOINT '[0-9A-Za-z_./~][0-9A-Za-z_ ./~@:+=,-]*' 'a name on the hub, or a path'
  echo "starting CHECKPOINT=$CHECKPOINT in place of $PLANNED" >&2
fi
require HOST '[0-9A-Za-z:][0-9A-Za-z.:_-]*' 'address of this node in a private network, where it listens'
[[ "$HOST" =~ ^(127(\.[0-9]{1,3}){3}|::1|localhost)$ ]] || require TRUSTED_NETWORK 1 '1, where nobody else reaches HOST'
require NODE_RANK '0|[1-9][0-9]{0,3}' 'number of this node in its instance, from 0'
require HEAD '[0-9A-Za-z:][0-9A-Za-z.:_-]*' 'address of node 0 of the instance'
SLOT=0
export VLLM_API_KEY="${API_KEY:-}"  # asked for below /v1, /v2 and /inference
export VLLM_NIXL_SIDE_CHANNEL_HOST="$HOST"
export VLLM_NIXL_SIDE_CHANNEL_PORT=$((5600 + SLOT * 32))
FOLLOWER=()
if [ "$NODE_RANK" -gt 0 ]; then FOLLOWER=(--headless); fi
exec vllm serve "$CHECKPOINT" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tensor-parallel-size 8 \
  --pipeline-parallel-size 4 \
  --max-num-seqs 4 \
  --max-num-batched-tokens 4096 \
  --long-prefill-token-threshold 4096 \
  --kv-cache-dtype fp8 \
  --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}' \
  --nnodes 4 \
  --node-rank "$NODE_RANK" \
  --master-addr "$HEAD" \
  --master-port 29500 \
  "${FOLLOWER[@]}"
