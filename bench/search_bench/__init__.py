"""What bench/search.py compares."""
