#!/bin/bash
# Train on several nodes:  sbatch examples/slurm/several_nodes.sh
#
# The launcher reads nodes, ranks, address and port from SLURM, and starts itself on each node with srun.
#SBATCH --job-name=digits
#SBATCH --nodes=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

set -euo pipefail
source .venv/bin/activate

# accel doctor   # checks every node of the job first: versions, clocks, network
accel launch --mixed_precision bf16 examples/digits.py --output_dir "runs/$SLURM_JOB_ID"
