"""Every decoder of transformers that can be built small."""
