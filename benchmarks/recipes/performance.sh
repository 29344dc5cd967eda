#!/usr/bin/env bash
# Every record of the performance page, measured on this machine. Stopped at any time, the same command goes on: records of
# the same commit are kept. `python -m benchmarks records --out OUT` then compares them with the limits.
#   benchmarks/recipes/performance.sh QUESTIONS [OUT]      in the root of the repository
# DEVICE=cpu measures without a GPU, ONLY="NAME NAME" some of the records.
set -uo pipefail
questions=${1:?give QUESTIONS [OUT]} out=${2:-docs/results} device=${DEVICE:-cuda}
jetspec=${JETSPEC:-jetspec} benchmarks=${BENCHMARKS:-python -m benchmarks} smollm2=smollm2-135m-instruct
commit=$(git rev-parse HEAD) failed=""

is_made() { # or not asked for
    [[ -n ${ONLY:-} && " $ONLY " != *" $1 "* ]] || grep -qs "\"commit\": \"$commit\"" "$out/$1.json"
}

profile() { # NAME SHAPE [OPTIONS]
    is_made "$1" || $jetspec profile --shape "${@:2}" --set "profile.device=$device" --out "$out/$1.json" || failed+=" $1"
}

bench() { # NAME RECIPE DTYPE
    is_made "$1" && return
    local folder="runs/bench/$1_${commit::7}"
    $benchmarks run "benchmarks/recipes/$2.yaml" --data-dir "$questions" --dtype "$3" --device "$device" --out "$folder" ||
        failed+=" $1"
    cp "$folder/results.json" "$out/$1.json"
}

mkdir -p "$out"
profile profile_qwen3_8b qwen3-8b --budget 64 --budget 128 --context 256 --context 2048 --context 8192
profile profile_qwen3_8b_edge qwen3-8b --set head.edge_rank=128 --budget 64 --budget 128 --context 256
profile profile_qwen3_30b_a3b qwen3-30b-a3b --budget 64 --context 256
profile profile_smollm2 $smollm2 --weights real --head $smollm2 --budget 32 --budget 64 --budget 128 --context 256
bench engine_speed engine_speed bfloat16
bench engine_batches engine_batches bfloat16
bench engine_batches_float32 engine_batches float32
bench engine_strict engine_strict bfloat16
bench engine_strict_float32 engine_strict float32
is_made engine_soak || $benchmarks soak --head $smollm2 --data "$questions" --device "$device" --out "$out/engine_soak.json" ||
    failed+=" engine_soak"
[ -z "$failed" ] || { echo "failed, or say that something is wrong:$failed" >&2; exit 1; }
