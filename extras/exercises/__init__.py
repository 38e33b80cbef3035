"""Sixteen techniques to write yourself, tested on real processes. Needs torch."""
