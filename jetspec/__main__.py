"""`python -m jetspec` is the command line."""

from jetspec.cli import main

main()
