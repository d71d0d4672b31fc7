"""Which candidate is best."""
