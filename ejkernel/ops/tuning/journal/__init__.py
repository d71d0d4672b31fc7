"""What is on disk while a tuning runs, so that a killed one is taken up again."""
