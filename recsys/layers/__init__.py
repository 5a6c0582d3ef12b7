"""Layers for one device: no knowledge of sharding, ranks or files.

Shape letters everywhere: B rows of a batch, N events of all histories of a batch, L length of a history, F id
features, D width of a vector, H hidden width, T tasks.
"""
