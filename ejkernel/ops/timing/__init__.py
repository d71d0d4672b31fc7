"""How long does this take, and is it right."""
