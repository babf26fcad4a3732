"""The step benchmark: ``python benchmarks/network.py --workers 2 --link 100mbit`` is ``gradsieve bench step ...``."""

import sys

from gradsieve.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "step", *sys.argv[1:]]))
