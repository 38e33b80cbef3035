"""Write it yourself: python -m exercises"""
