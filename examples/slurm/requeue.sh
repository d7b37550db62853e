#!/bin/bash
# A run that is longer than the time limit:  sbatch examples/slurm/requeue.sh
#
# SLURM sends SIGUSR1 two minutes before the limit. The script saves its state and exits with code 75, the job is
# requeued, and the same command resumes. Write checkpoints to a file system that all nodes share.
#SBATCH --job-name=resume
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --time=00:30:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

set -uo pipefail
source .venv/bin/activate

code=0
accel launch examples/resume.py --output_dir "runs/$SLURM_JOB_ID" || code=$?
if [ "$code" = 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
