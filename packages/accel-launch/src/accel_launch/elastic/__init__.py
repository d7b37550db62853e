"""Several processes over torch's elastic agent. Importing run, agent, rendezvous or signals imports torch; the others
do not.
"""
