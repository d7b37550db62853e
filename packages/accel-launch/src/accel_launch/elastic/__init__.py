"""Several processes over torch's elastic agent. Importing these modules imports torch, except worker and report."""
