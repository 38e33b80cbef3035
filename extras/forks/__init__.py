"""Experiments on top of the repository, each with its patch and its tests. Needs torch and git."""
