"""Thin runners: `python -m scripts.NAME` from the root of a checkout. Nothing imports them."""
