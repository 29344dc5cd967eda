#!/usr/bin/env bash
# Our version of table 12: what drafting a token costs beside a verify pass. Random weights in the shape of Qwen3-8B, so
# nothing has to be fetched. The report sets the paper's numbers beside ours.
#   benchmarks/recipes/table12.sh [OUT]      in the root of the repository
set -euo pipefail
out=${1:-runs/bench/table12}
mkdir -p "$out"
for depth in 1 2 4 8 16 32 64 128 256 512; do
    [ -e "$out/$depth.json" ] || ${JETSPEC:-jetspec} profile --shape "${SHAPE:-qwen3-8b}" --set tree.width=1 \
        --set tree.ngrams=false --set "head.block_size=$((depth + 1))" --budget $((depth + 1)) --out "$out/$depth.json" \
        --context 128 --context 256 --context 512 --context 1024 --context 2048 --context 4096
done
${BENCHMARKS:-python -m benchmarks} report "$out"/*.json --out "$out/report"
