"""Steps written to a file, with the KV that they read, and computed again from it."""
