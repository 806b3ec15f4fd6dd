"""Accuracy and speed of every way to decode, measured in one run on the user's own machine."""
