"""Checkpoints that are not plain safetensors: GGUF files, and weights that others have quantised."""
