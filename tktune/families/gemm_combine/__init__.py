"""gemm_combine: the grouped GEMM whose landed rows are summed, weighted, into tokens on their source ranks."""
