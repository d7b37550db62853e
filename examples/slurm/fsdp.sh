#!/bin/bash
# Train a sharded model on several nodes:  sbatch examples/slurm/fsdp.sh
#
# The file describes the sharding; the number of processes is SLURM's.
#SBATCH --job-name=fsdp
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out

set -euo pipefail
source .venv/bin/activate

accel launch --config_file examples/config_templates/fsdp2.yaml examples/fsdp.py --output_dir "runs/$SLURM_JOB_ID"
