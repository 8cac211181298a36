#!/usr/bin/env bash
# Starts a run, kills it after its first checkpoint, resumes it, asks it three questions and merges it.
# Variables typed after the script's name are passed on to the training command.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
run=${RUN_NAME:-example-resume}
folder=${RUNS_DIR:-runs}/$run

make train CONFIG=examples/06_resume_and_infer/resume.yaml RUN_NAME="$run" "$@" &
training=$!
until [ -e "$folder/checkpoints/last" ] || ! kill -0 "$training" 2>/dev/null; do sleep 0.2; done
if kill -0 "$training" 2>/dev/null; then
    echo "a checkpoint is there: asking the run to stop"
    kill -TERM "$training"
fi
wait "$training" || echo "the run stopped with code $?"

make resume RUN="$run"
make infer RUN="$run" INPUT=examples/06_resume_and_infer/questions.txt OUTPUT="$folder/answers.jsonl"
cat "$folder/answers.jsonl"
make merge RUN="$run"
