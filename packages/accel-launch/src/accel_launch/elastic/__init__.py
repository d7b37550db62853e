"""Several processes of one machine or more. checks, output, preemption, report and worker import no torch."""
