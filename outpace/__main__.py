"""`python -m outpace` is the command `outpace`."""

from outpace.cli.app import main

main()
