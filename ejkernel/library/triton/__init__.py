"""Pallas kernels for GPUs, compiled by Triton."""
