"""The journal of a tuning on disk, from which a killed tuning is taken up again."""
