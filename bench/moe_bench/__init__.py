"""What bench/gpu_moe_layer.py runs: one rank, the serial path, and the arithmetic of what ranks found."""
