#!/usr/bin/env bash
# One rank per GPU on every node of a Slurm job; put back in line, it goes on from its newest checkpoint.
#   sbatch --nodes 4 scripts/train_slurm.sh my.toml runs/mine
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --requeue
set -euo pipefail
config=$1 out=$2
shift 2
# Ranks find each other through the first node of the step; see clipscale/dist/world.py.
srun --kill-on-bad-exit=1 clipscale train "$config" --out "$out" --auto-resume "$@"
