#!/usr/bin/env bash
# Written by disagg-sim.
# Answers clients, and sends their requests to the instances.
set -euo pipefail
# It asks clients for no key: leave it on 127.0.0.1, behind a proxy that does.
ROUTER_HOST="${ROUTER_HOST:-127.0.0.1}"  # where it listens
: "${PREFILL_URLS:?addresses of all prefill instances, such as HOST:8100}"
: "${DECODE_URLS:?addresses of all decode instances, such as HOST:8100}"
CONFIG="$(mktemp --suffix .yaml)"
servers() {
  printf '%s:\n  num_instances: %d\n  urls:\n' "$1" $(($# - 1))
  printf '    - "%s"\n' "${@:2}"
}
{
  printf 'hostname: "%s"\nport: 8000\n' "$ROUTER_HOST"
  servers context_servers $PREFILL_URLS
  servers generation_servers $DECODE_URLS
} > "$CONFIG"
exec trtllm-serve disaggregated --config "$CONFIG"
