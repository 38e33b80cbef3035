"""Write it yourself: python -m extras.exercises"""
