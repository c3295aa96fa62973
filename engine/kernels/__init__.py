"""Native code for CPUs: `build` compiles it, `choice` says which instruction set, `library` calls it.

`docs/kernels.md` has the whole picture. Nothing here is imported by default: `build` must run without torch.
"""
