#!/usr/bin/env bash
# From prompts to the benchmarks of qwen25_coder.yaml and qwen25_coder_long.yaml: answers, a head, measurement. Stopped at
# any time, the same command goes on. PROMPTS are the training prompts that one chooses, a file or folder; QUESTIONS is a
# folder with a file per task.
#   benchmarks/recipes/qwen25_coder.sh PROMPTS QUESTIONS [STEPS]      in the root of the repository
# MODEL=FILE reads the target from a GGUF file, SHARD=0/4 has a fourth of the prompts answered, JOBS=2 processes answer.
set -euo pipefail
usage="give PROMPTS QUESTIONS [STEPS]"
prompts=${1:?$usage} questions=${2:?$usage} steps=${3:-1000}
model=${MODEL:-Qwen/Qwen2.5-Coder-1.5B-Instruct} jetspec=${JETSPEC:-jetspec} answers=runs/qwen25_coder/greedy.jsonl

$jetspec data regenerate --model "$model" --data "$prompts" --out "$answers" --set prompts.on_bad=skip \
    --set prompts.shard="${SHARD:-0/1}" --jobs "${JOBS:-1}"
$jetspec train jetspec/recipes/qwen25_coder_1_5b.yaml --set "model=$model" --set "data=[$answers]" --set "steps=$steps"
for recipe in qwen25_coder qwen25_coder_long; do
    ${BENCHMARKS:-python -m benchmarks} run "benchmarks/recipes/$recipe.yaml" --model "$model" --data-dir "$questions"
done
