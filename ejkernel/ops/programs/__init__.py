"""Whole programs: the calls inside them, found, tuned together, recorded, kept and frozen."""
