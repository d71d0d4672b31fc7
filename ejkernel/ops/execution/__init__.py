"""Running a kernel: one call from its arguments to a compiled program."""
