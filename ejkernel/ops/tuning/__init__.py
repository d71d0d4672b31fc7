"""Tuning: finds the best of a call's candidates."""
