#!/usr/bin/env bash
#SBATCH --job-name=rda
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=rda-%j.log
#
# One torchrun on each node of a job, from the root of the repository:
#
#   sbatch examples/launch/slurm.sh doctor
#   sbatch examples/launch/slurm.sh train --run-folder /shared/a
#
# A node's ranks divide its --cpus-per-task among them: rda train computes on CPUs.
#
# The ranks save 120 s before the time is over. The job goes on with the nodes
# that are left if one is lost, and begins again if its first node is lost.
set -euo pipefail
export RANKS=${RANKS:-2}  # on each node
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK > RANKS ? SLURM_CPUS_PER_TASK / RANKS : 1))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export STORE=${hosts%%$'\n'*}:$((29000 + SLURM_JOB_ID % 1000)) JOB=$SLURM_JOB_ID
export HOSTS=1:$SLURM_JOB_NUM_NODES

# torchrun kills ranks 30 s after SIGTERM. This gives them the 120 s of --signal,
# less those that torchrun itself takes to end. torch before 2.12 does not read it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110

python examples/launch/store.py "${STORE##*:}" &
trap 'kill $!' EXIT
# A job step inherits neither --no-kill nor --cpus-per-task.
srun --no-kill --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    bash examples/launch/several_hosts.sh "$@"
