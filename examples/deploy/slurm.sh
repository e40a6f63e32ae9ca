#!/usr/bin/env bash
# One worker on every node but the first, which leads:
#   spanker key new key && sbatch --nodes 3 --ntasks-per-node 1 slurm.sh model.gguf 'Once upon a time'
set -euo pipefail
model=$1 prompt=$2
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export SPANKER_KEY_FILE=$PWD/key
workers=("${nodes[@]:1}")
srun --nodes "${#workers[@]}" --nodelist "$(IFS=,; echo "${workers[*]}")" --overlap \
    spanker worker --listen 0.0.0.0:7077 &
# Workers that listen answer.
until spanker workers --workers "$(IFS=,; echo "${workers[*]}")" >/dev/null 2>&1; do sleep 1; done
spanker run -m "$model" -p "$prompt" --workers "$(IFS=,; echo "${workers[*]}")"
kill %1
