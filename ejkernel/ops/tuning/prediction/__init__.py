"""Answers without measuring: what the records of other calls say about the candidates of this one."""
