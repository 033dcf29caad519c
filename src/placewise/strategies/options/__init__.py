"""The search over optional ops: which tensors are recomputed, and which wait on another device."""
