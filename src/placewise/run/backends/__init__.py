"""What runs the lanes: CPU threads, CUDA streams, CUDA graphs."""
