"""What people are shown: why a call has its cfg, and the figures behind it."""
