#!/usr/bin/env bash
# Answers clients, and sends their requests to the instances.
set -euo pipefail
: "${PREFILL_URLS:?addresses of all prefill instances, such as HOST:8100}"
: "${DECODE_URLS:?addresses of all decode instances, such as HOST:8100}"
CONFIG="$(mktemp --suffix .yaml)"
servers() {
  printf '%s:\n  num_instances: %d\n  urls:\n' "$1" $(($# - 1))
  printf '    - "%s"\n' "${@:2}"
}
{
  printf 'hostname: 0.0.0.0\nport: 8000\n'
  servers context_servers $PREFILL_URLS
  servers generation_servers $DECODE_URLS
} > "$CONFIG"
exec trtllm-serve disaggregated --config "$CONFIG"
