"""The simulator: discrete events around the production Conductor, Batcher, page pools and eviction policies.

Only what moves bytes or computes is modelled: steps (`models/`), links, tiers, clocks. A floor above the rest of the
scheduler: it may use `_native`, and nothing of `pyengine/`.
"""
