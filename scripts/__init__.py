"""Thin runners: `python -m scripts.NAME` from the root of a checkout. No code of the package imports them."""
