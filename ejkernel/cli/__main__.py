"""Runs the `ejkernel` command as `python -m ejkernel.cli`."""

from .main import main

main()
