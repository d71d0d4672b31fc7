"""The `ejkernel` command: what a person does around the library without writing code."""
