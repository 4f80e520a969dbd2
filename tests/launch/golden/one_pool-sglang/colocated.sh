#!/usr/bin/env bash
# Written by disagg-sim.
# colocated: 4 instances of TP2, 2 GPUs on 1 node each. SGLang 0.5.21.
# Run it once for each instance, on its node.
set -feuo pipefail
export PYTHONSAFEPATH=1
[[ "${API_KEY:-}" =~ [^[:space:]] ]] || API_KEY=''
require() {
  local LC_ALL=C
  [[ "${!1:-}" =~ ^($2)$ ]] && return
  printf '%s=%q; allowed: %s\n' "$1" "${!1:-}" "$3" >&2
  exit 1
}
PLANNED=Qwen/Qwen3-32B
CHECKPOINT="${CHECKPOINT:-$PLANNED}"
if [ "$CHECKPOINT" != "$PLANNED" ]; then
  require CHECKPOINT '[0-9A-Za-z_./~][0-9A-Za-z_ ./~@:+=,-]*' 'a name on the hub, or a path'
  echo "starting CHECKPOINT=$CHECKPOINT in place of $PLANNED" >&2
fi
HOST="${HOST:-127.0.0.1}"  # where it listens; the whole deployment fits on one node
require HOST '[0-9A-Za-z:][0-9A-Za-z.:_-]*' 'address of this node in a private network, where it listens'
[[ "$HOST" =~ ^(127(\.[0-9]{1,3}){3}|::1|localhost)$ ]] || [ -n "${API_KEY:-}" ] || require TRUSTED_NETWORK 1 '1, where nobody else reaches HOST; or give API_KEY, which clients must send'
SLOT="${SLOT:-0}"
require SLOT '0|[1-9][0-9]{0,3}' 'number of the instance on this node, from 0'
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 2)) $((SLOT * 2 + 1)))}"
exec python3 -m sglang.launch_server \
  --model-path "$CHECKPOINT" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tp-size 2 \
  --max-running-requests 128 \
  --cuda-graph-max-bs-decode 128 \
  --chunked-prefill-size 2176 \
  --max-prefill-tokens 2176 \
  --enable-mixed-chunk \
  --kv-cache-dtype bf16 \
  ${API_KEY:+--api-key "$API_KEY"}
