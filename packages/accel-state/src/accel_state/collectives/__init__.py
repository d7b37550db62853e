"""Communication between the processes of a run, behind one interface; a single process has a null object."""
