"""Pallas kernels for GPUs, compiled by Mosaic GPU, which comes with JAX."""
