#!/usr/bin/env bash
# Written by disagg-sim.
# Answers clients, and sends their requests to the instances.
set -euo pipefail
ROUTER_HOST="${ROUTER_HOST:-127.0.0.1}"  # where it listens
# This router asks clients for no key: leave it on 127.0.0.1, behind a proxy that does.
export OPENAI_API_KEY="${API_KEY:-}"  # for its instances
: "${WORKER_URLS:?addresses of all worker instances, such as http://HOST:8100}"
exec vllm-router \
  --host "$ROUTER_HOST" \
  --port 8000 \
  --prometheus-host 127.0.0.1 \
  ${API_KEY:+--api-key "$API_KEY"} \
  --worker-urls $WORKER_URLS
