"""Click-through-rate models on sharded embedding tables, from a laptop's CPU to a cluster with one recipe."""

__version__ = "0.1.0"
