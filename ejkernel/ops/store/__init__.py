"""Where configs are kept: the store and its files, folders, layers, lock files and packs."""
