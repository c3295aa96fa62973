"""The contracts: `baton/v1/*.proto` and the Python code generated from them (`make protos`)."""
