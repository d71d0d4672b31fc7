"""The version of this package, written once: the build reads it from here, and asking for it imports nothing."""

__version__ = "0.1.0"
