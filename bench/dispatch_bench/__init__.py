"""The parts of `bench/gpu_dispatch_gemm.py`: what is measured, the ranks that measure it, and what is made of it."""
