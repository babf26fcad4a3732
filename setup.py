"""The native CPU ops: a plain shared library beside ops/native.py; without a compiler the package installs without."""

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
            [f"{OPS}/native.c", f"{OPS}/native_dense.c", f"{OPS}/native_loops.c"],
            depends=[f"{OPS}/native.h", f"{OPS}/native_loops.h"],
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
            libraries=["m"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
)
