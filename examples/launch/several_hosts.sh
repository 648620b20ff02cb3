#!/usr/bin/env bash
# The ranks of this host. Run it on every host, with the same words.
#
#   export STORE=HOST:29400    where examples/launch/store.py runs
#   export HOSTS=1:2           fewest and most hosts
#   RANKS=8 bash examples/launch/several_hosts.sh doctor
#   RANKS=8 bash examples/launch/several_hosts.sh train --run-folder /shared/a
#
# ADDRESS is where the other hosts reach this one, if its name leads elsewhere.
# A store takes each JOB once: another name begins another job.
set -euo pipefail

# Each start has a store of its own. Ranks find addresses of dead ones otherwise.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

restarts=$([ "${1:-}" = train ] && echo 9 || echo 0)
exec torchrun --nnodes "${HOSTS:?}" --nproc-per-node "${RANKS:?}" \
    --rdzv-id "${JOB:-${1:-job}}" --rdzv-backend c10d --rdzv-endpoint "${STORE:?}" \
    --rdzv-conf "is_host=0${LAST_CALL:+,last_call_timeout=$LAST_CALL}" \
    ${ADDRESS:+--local-addr "$ADDRESS"} \
    --max-restarts "$restarts" -m ring_dilated_attention "$@"
