"""Timing a program and checking its result."""
