"""The best configuration for every JAX kernel call; everything lives in `ejkernel.ops`."""
