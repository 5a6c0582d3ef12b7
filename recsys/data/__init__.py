"""Data: preparation, streaming reader, and the batch that models read."""
