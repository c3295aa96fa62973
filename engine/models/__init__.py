"""Model architectures, by the names that config.json gives them."""
