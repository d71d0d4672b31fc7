"""Search among many candidates for those to measure next: the space as numbers, and one strategy a file."""
