"""Programs of more than one process: all of them run the same cfg."""
