#!/usr/bin/env bash
# Written by disagg-sim.
# Answers clients, and sends their requests to the instances.
set -euo pipefail
ROUTER_HOST="${ROUTER_HOST:-127.0.0.1}"  # where it listens
# This router asks clients for no key: leave it on 127.0.0.1, behind a proxy that does.
export OPENAI_API_KEY="${API_KEY:-}"  # for its instances
: "${PREFILL_URLS:?addresses of all prefill instances, such as http://HOST:8100}"
: "${DECODE_URLS:?addresses of all decode instances, such as http://HOST:8100}"
ARGUMENTS=()
for url in $PREFILL_URLS; do ARGUMENTS+=(--prefill "$url"); done
for url in $DECODE_URLS; do ARGUMENTS+=(--decode "$url"); done
exec vllm-router \
  --host "$ROUTER_HOST" \
  --port 8000 \
  --prometheus-host 127.0.0.1 \
  --vllm-pd-disaggregation \
  --kv-connector nixl \
  ${API_KEY:+--api-key "$API_KEY"} \
  "${ARGUMENTS[@]}"
