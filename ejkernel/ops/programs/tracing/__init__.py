"""Processes that trace candidates, so that one Python need not trace them all."""
