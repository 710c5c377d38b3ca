#!/bin/bash
# Hosts without GPUs: one rank per socket, whose threads stay on the cores and in the memory of that socket.
# Gradients travel as bytes: between hosts with 10 Gbit/s or less that is most of a step.
#
#   sbatch --nodes 8 examples/launch/cpu_cluster.sh --steps 1000
#
#SBATCH --job-name=trigram-cpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-socket=1
#SBATCH --exclusive

export TRIGRAM_ALGORITHM="${TRIGRAM_ALGORITHM:-bytegrad}"
# Each rank counts the cores that srun has bound it to.
exec srun --kill-on-bad-exit=1 --cpu-bind=sockets bash -c '
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
    exec "${PYTHON:-python}" examples/train_gpt.py "$@"' train "$@"
