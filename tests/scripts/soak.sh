#!/bin/bash
# The long form of every sampled check. Appends a row to docs/soak.md: date, commit, seeds, counts.
set -euo pipefail
cd "$(dirname "$0")/../.."

export TIDEMILL_SOAK=1
# Other histories every day; a failing one is named with the line that replays it.
export TIDEMILL_SIM_FIRST="${TIDEMILL_SIM_FIRST:-$(($(date +%Y%m%d) * 100000))}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT

cargo test --workspace --locked --no-fail-fast -- --nocapture 2>&1 | tee "$log"
ran=$(grep -cE '^test .* \.\.\. ok$' "$log" || true)
histories=$(grep -oE '^[0-9]+ seeds from [0-9]+: .*$' "$log" | head -1 | tr '|' '/')
commit=$(git rev-parse --short HEAD)
echo "| $(date +%F) | $commit | $ran | ${histories:-none} |" >>docs/soak.md
echo "soak: $ran tests; a row was added to docs/soak.md"
