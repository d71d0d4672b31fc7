"""Stores of configs: one store and its files, folders of stores, layers, lock files and packs."""
