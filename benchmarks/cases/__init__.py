"""Calls of library operations from real models: a file for each operation, with its `CASES`."""
