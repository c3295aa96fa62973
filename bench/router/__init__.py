"""What a router costs, beside others: `baton bench router`."""
