"""Several processes on torch's elastic agent. checks, preemption, report and worker import no torch."""
