#!/bin/bash
# A job of Slurm: srun starts one rank per task, and the script needs nothing else.
#
#   sbatch examples/launch/slurm.sh                                        two hosts, four ranks on each
#   sbatch --nodes 1 --ntasks-per-node 2 examples/launch/slurm.sh --epochs 1
#
#SBATCH --job-name=trigram
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# If one rank fails, Slurm ends the others.
exec srun --kill-on-bad-exit=1 "${PYTHON:-python}" examples/train_digits.py "$@"
