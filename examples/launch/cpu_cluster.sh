#!/bin/bash
# Hosts without GPUs: one rank per socket, whose threads stay on the cores and in the memory of that socket.
# Gradients travel as bytes: between hosts with 10 Gbit/s or less that is most of a step.
#
#   sbatch --nodes 8 examples/launch/cpu_cluster.sh --steps 1000
#
#SBATCH --job-name=trigram-cpu
#SBATCH --nodes=2
#SBATCH --exclusive

export TRIGRAM_ALGORITHM="${TRIGRAM_ALGORITHM:-bytegrad}"
# How many sockets a host has, Slurm knows; all hosts are alike.
sockets=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*Sockets=\([0-9]*\).*/\1/p')
# Each rank counts the cores that srun has bound it to.
exec srun --ntasks=$((SLURM_JOB_NUM_NODES * sockets)) --ntasks-per-node="$sockets" --ntasks-per-socket=1 \
    --cpu-bind=sockets --kill-on-bad-exit=1 bash -c '
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
    exec "${PYTHON:-python}" examples/train_gpt.py "$@"' train "$@"
