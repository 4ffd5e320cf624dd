"""What CUDA families share on a rank: driver calls, modules, descriptors, launches, clocks. Imported lazily."""
