"""Techniques at work: demonstrations, tables, pictures. Needs torch; test_lab.py Node, too."""
