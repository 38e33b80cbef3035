"""Predicts memory and time of a layout. Needs only Python; --measure and the tests need torch."""
