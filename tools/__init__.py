"""Generators of files that are part of the repository. Not in the wheel."""
