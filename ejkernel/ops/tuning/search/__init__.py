"""Which of many candidates to measure next: the space as numbers, and one strategy a file."""
