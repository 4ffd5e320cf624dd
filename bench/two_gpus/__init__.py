"""What benches that run one process a GPU share: options, words for ranks, their processes, and the rank itself."""
