"""Measures steps on the device at hand, and learns from them how long a step takes."""
