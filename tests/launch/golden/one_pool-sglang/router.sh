#!/usr/bin/env bash
# Written by disagg-sim.
# Answers clients, and sends their requests to the instances.
set -euo pipefail
ROUTER_HOST="${ROUTER_HOST:-127.0.0.1}"  # where it listens
if [ -z "${API_KEY:-}" ] && [ "$ROUTER_HOST" != 127.0.0.1 ]; then
  echo "API_KEY: a key that clients must send, as others reach $ROUTER_HOST" >&2
  exit 1
fi
: "${WORKER_URLS:?addresses of all worker instances, such as http://HOST:8100}"
exec python3 -m sglang_router.launch_router \
  --host "$ROUTER_HOST" \
  --port 8000 \
  --prometheus-host 127.0.0.1 \
  ${API_KEY:+--api-key "$API_KEY"} \
  --worker-urls $WORKER_URLS
