"""The places that a cfg comes from: caches, stores, tiers, policy, events and selection."""
