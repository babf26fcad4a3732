"""The op benchmark: ``python benchmarks/ops.py --device cpu`` is ``gradsieve bench ops --device cpu``."""

from gradsieve.lab.bench.ops import main

if __name__ == "__main__":
    main()
