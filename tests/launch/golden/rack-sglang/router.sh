#!/usr/bin/env bash
# Answers clients, and sends their requests to the instances.
set -euo pipefail
: "${PREFILL_URLS:?addresses of all prefill instances, such as http://HOST:8100}"
: "${DECODE_URLS:?addresses of all decode instances, such as http://HOST:8100}"
ARGUMENTS=()
for url in $PREFILL_URLS; do ARGUMENTS+=(--prefill "$url" "$((8998 + ${url##*:} - 8100))"); done
for url in $DECODE_URLS; do ARGUMENTS+=(--decode "$url"); done
exec python3 -m sglang_router.launch_router \
  --host 0.0.0.0 \
  --port 8000 \
  --pd-disaggregation \
  "${ARGUMENTS[@]}"
