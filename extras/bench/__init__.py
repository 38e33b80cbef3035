"""Races --fast against torch's own parts, and each trick against its absence. Needs torch."""
