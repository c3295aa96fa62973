"""The model on one device of this process."""
