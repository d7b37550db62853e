#!/bin/bash
# Train on the GPUs of one node:  sbatch examples/slurm/one_node.sh
#SBATCH --job-name=digits
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

set -euo pipefail
source .venv/bin/activate # the environment in which accel is installed

accel launch examples/digits.py --output_dir "runs/$SLURM_JOB_ID"
