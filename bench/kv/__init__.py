"""`baton bench kv`: what moving KV costs. Parts that measure, a table, a picture and bars that are met or missed."""
