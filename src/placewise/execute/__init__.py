"""Runs a placed step on real devices, and measures it: lowering, local executor, profiler, measured evaluator."""
