#!/usr/bin/env bash
# Written by disagg-sim.
# colocated: 4 instances of TP2, 2 GPUs on 1 node each. vLLM 0.31.0.
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
[[ "$HOST" =~ ^(127(\.[0-9]{1,3}){3}|::1|localhost)$ ]] || require TRUSTED_NETWORK 1 '1, where nobody else reaches HOST'
SLOT="${SLOT:-0}"
require SLOT '0|[1-9][0-9]{0,3}' 'number of the instance on this node, from 0'
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$(seq -s, $((SLOT * 2)) $((SLOT * 2 + 1)))}"
export VLLM_API_KEY="${API_KEY:-}"  # asked for below /v1, /v2 and /inference
exec vllm serve "$CHECKPOINT" \
  --host "$HOST" \
  --port "$((8100 + SLOT))" \
  --tensor-parallel-size 2 \
  --max-num-seqs 128 \
  --max-num-batched-tokens 2176 \
  --gpu-memory-utilization 0.9 \
  --kv-cache-dtype bfloat16
