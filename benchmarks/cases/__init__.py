"""Calls of library operations from real models: a file for each operation, with GPU, CPU and CHECK lists."""
