#!/usr/bin/env bash
# Written by disagg-sim.
# Answers clients, and sends their requests to the instances.
set -feuo pipefail
export PYTHONSAFEPATH=1
[[ "${API_KEY:-}" =~ [^[:space:]] ]] || API_KEY=''
require() {
  local LC_ALL=C
  [[ "${!1:-}" =~ ^($2)$ ]] && return
  printf '%s=%q; allowed: %s\n' "$1" "${!1:-}" "$3" >&2
  exit 1
}
ROUTER_HOST="${ROUTER_HOST:-127.0.0.1}"
require ROUTER_HOST '[0-9A-Za-z:][0-9A-Za-z.:_-]*' 'where it listens'
[[ "$ROUTER_HOST" =~ ^(127(\.[0-9]{1,3}){3}|::1|localhost)$ ]] || require TRUSTED_NETWORK 1 '1, where nobody else reaches ROUTER_HOST'
URL='https?://([0-9A-Za-z._-]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}'
require PREFILL_URLS " *$URL( +$URL)* *" 'addresses of all prefill instances, such as http://HOST:8100, apart by spaces'
require DECODE_URLS " *$URL( +$URL)* *" 'addresses of all decode instances, such as http://HOST:8100, apart by spaces'
export OPENAI_API_KEY="${API_KEY:-}"  # for its instances
ARGUMENTS=()
for url in $PREFILL_URLS; do ARGUMENTS+=(--prefill "$url"); done
for url in $DECODE_URLS; do ARGUMENTS+=(--decode "$url"); done
exec vllm-router \
  --host "$ROUTER_HOST" \
  --port 8000 \
  --prometheus-host 127.0.0.1 \
  --vllm-pd-disaggregation \
  --kv-connector nixl \
  "${ARGUMENTS[@]}"
