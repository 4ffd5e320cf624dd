"""What measures a machine instead of a kernel: a family that a gang runs for `tktune doctor`."""
