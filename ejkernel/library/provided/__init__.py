"""Adapters to other packages' implementations; each imports its package when it is first asked about a call."""
