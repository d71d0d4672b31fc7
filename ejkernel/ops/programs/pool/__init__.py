"""Tuning on many processes: tasks that travel as text, their schedule, and the pools that run them."""
