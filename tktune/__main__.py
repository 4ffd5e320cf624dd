"""`python -m tktune` is `tktune`."""

from tktune.cli.app import main

main()
