"""The `ejkernel` command: work around the library that needs no code."""
