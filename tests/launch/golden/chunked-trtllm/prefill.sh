#!/usr/bin/env bash
# Written by disagg-sim.
# prefill: 1 instance of TP8 PP4, 32 GPUs on 4 nodes each. TensorRT-LLM 1.3.0rc29.
# Run it once for each instance, in an allocation of Slurm over 4 nodes.
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
SLOT=0
exec srun --nodes 4 --ntasks 32 --ntasks-per-node 8 --mpi pmix trtllm-llmapi-launch trtllm-serve "$CHECKPOINT" \
  --config "$(dirname "$0")/prefill.yaml" \
  --host "$HOST" \
  --port "$((8100 + SLOT))"
