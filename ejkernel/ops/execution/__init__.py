"""How a kernel runs."""
