"""The documented door to `PersistentCache`, which lives with the stores."""

from ..store.persistent import PersistentCache as PersistentCache
