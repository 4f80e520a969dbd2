#!/usr/bin/env bash
# Written by disagg-sim.
# decode: 1 instance of DP48 EP48+32, 48 GPUs on 12 nodes each. SGLang 0.5.21.
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
PLANNED=nvidia/DeepSeek-R1-NVFP4
CHECKPOINT="${CHECKPOINT:-$PLANNED}"
if [ "$CHECKPOINT" != "$PLANNED" ]; then
  require CHECKPOINT '[0-9A-Za-z_./~][0-9A-Za-z_ ./~@:+=,-]*' 'a name on the hub, or a path'
  echo "starting CHECKPOINT=$CHECKPOINT in place of $PLANNED" >&2
fi
require HOST '[0-9A-Za-z:][0-9A-Za-z.:_-]*' 'address of this node in a private network, where it listens'
[[ "$HOST" =~ ^(127(\.[0-9]{1,3}){3}|::1|localhost)$ ]] || [ -n "${API_KEY:-}" ] || require TRUSTED_NETWORK 1 '1, where nobody else reaches HOST; or give API_KEY, which clients must send'
require NODE_RANK '0|[1-9][0-9]{0,3}' 'number of this node in its instance, from 0'
require HEAD '[0-9A-Za-z:][0-9A-Za-z.:_-]*' 'address of node 0 of the instance'
SLOT=0
exec python3 -m sglang.launch_server \
  --model-path "$CHECKPOINT" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tp-size 48 \
  --dp-size 48 \
  --enable-dp-attention \
  --moe-dense-tp-size 1 \
  --ep-size 48 \
  --moe-a2a-backend deepep \
  --deepep-mode low_latency \
  --enable-eplb \
  --ep-num-redundant-experts 32 \
  --context-length 6144 \
  --max-running-requests 3072 \
  --cuda-graph-max-bs-decode 64 \
  --kv-cache-dtype fp8_e4m3 \
  --disaggregation-mode decode \
  --disaggregation-transfer-backend nixl \
  --nnodes 12 \
  --node-rank "$NODE_RANK" \
  --dist-init-addr "$HEAD:29500" \
  ${API_KEY:+--api-key "$API_KEY"}
