"""Candidates in a process of their own, so that a crash or a hang costs the candidate alone."""
