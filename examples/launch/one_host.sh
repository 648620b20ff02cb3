#!/usr/bin/env bash
# The ranks of one host. Lost ranks start again, from the newest checkpoint.
#
#   RANKS=8 bash examples/launch/one_host.sh doctor
#   RANKS=8 bash examples/launch/one_host.sh train --run-folder runs/a
set -euo pipefail
restarts=$([ "${1:-}" = train ] && echo 9 || echo 0)
exec torchrun --standalone --nproc-per-node "${RANKS:?}" --max-restarts "$restarts" -m ring_dilated_attention "$@"
