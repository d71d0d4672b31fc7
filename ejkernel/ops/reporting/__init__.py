"""Reports to people: why a call has its cfg, and the figures behind it."""
