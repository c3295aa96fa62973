"""Several processes that compute one model together, each on a device of its own."""
