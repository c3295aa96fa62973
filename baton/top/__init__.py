"""`baton top`: the fleet and the last requests in a terminal, kept up to date."""
