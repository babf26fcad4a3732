"""The native CPU ops: a plain shared library beside ops/native.py; without a compiler the package installs without."""

from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

OPS = "src/gradsieve/ops"


class PlainLibrary(build_ext):
    """Loaded with ctypes: no Python ABI in its name, no module initialiser to export."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


setup(
    cmdclass={"build_ext": PlainLibrary},
    ext_modules=[
        Extension(
            "gradsieve.ops._native",
            sorted(glob(f"{OPS}/native*.c")),
            depends=sorted(glob(f"{OPS}/native*.h")),
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
            libraries=["m"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
)
