"""Compares two steps of a trainer with one process, and names the bug. Needs torch."""
