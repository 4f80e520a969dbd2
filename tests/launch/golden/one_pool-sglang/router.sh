#!/usr/bin/env bash
# Answers clients, and sends their requests to the instances.
set -euo pipefail
: "${WORKER_URLS:?addresses of all worker instances, such as http://HOST:8100}"
exec python3 -m sglang_router.launch_router \
  --host 0.0.0.0 \
  --port 8000 \
  --worker-urls $WORKER_URLS
