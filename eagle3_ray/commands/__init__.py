"""What the commands `eagle3-NAME` and the jobs `jobs/NAME.py` do: a module each, whose `main` returns the exit code."""
