#!/usr/bin/env bash
# From prompts to the benchmark of smollm2.yaml: answers, heads, measurement. Stopped at any time, the same command
# goes on. PROMPTS are the training prompts that one chooses, a file or folder; QUESTIONS is a folder with a file per task.
#   benchmarks/recipes/smollm2.sh PROMPTS QUESTIONS [STEPS]      in the root of the repository
# AT_ONCE=4 trains all heads at the same time on a GPU that has room for them.
set -euo pipefail
usage="give PROMPTS QUESTIONS [STEPS]"
prompts=${1:?$usage} questions=${2:?$usage}
export STEPS=${3:-1000} JETSPEC=${JETSPEC:-jetspec} ANSWERS=runs/smollm2/greedy.jsonl

train() { # NAME RECIPE [OPTIONS]
    $JETSPEC train "jetspec/recipes/$2.yaml" --set steps="$STEPS" --set "data=[$ANSWERS]" --set "out=runs/bench/$1" "${@:3}"
}
export -f train

$JETSPEC data regenerate --data "$prompts" --out "$ANSWERS" --set prompts.on_bad=skip
xargs -L 1 -P "${AT_ONCE:-1}" bash -c 'train "$@"' train <<HEADS
edge smollm2_135m
causal smollm2_135m --set head.edge_rank=0
bidirectional smollm2_135m --set head.edge_rank=0 --set head.causal=false --set optimizer.lr=1.0e-2
eagle3 smollm2_135m_eagle3
dspark smollm2_135m --set head.causal=false --set head.shifted=true --set head.edge_gate=none --set optimizer.lr=1.0e-2
dflash2 smollm2_135m --set head.causal=false --set head.edge_gate=alone --set head.conv_taps=2 --set optimizer.lr=1.0e-2
HEADS
${BENCHMARKS:-python -m benchmarks} run benchmarks/recipes/smollm2.yaml --data-dir "$questions"
