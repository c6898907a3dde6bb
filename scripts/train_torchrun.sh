#!/usr/bin/env bash
# One rank per GPU under torchrun. Start the same line on every node, with the first node's name and the number of nodes.
#   scripts/train_torchrun.sh first-node 4 my.toml runs/mine
set -euo pipefail
host=$1 nodes=$2 config=$3 out=$4
shift 4
torchrun --nnodes "$nodes" --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint "$host:29500" \
  -m clipscale train "$config" --out "$out" --auto-resume "$@"
