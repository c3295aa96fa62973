"""One model on several hosts, a rank each: rank 0 in the engine's process, the others in processes of other hosts."""
