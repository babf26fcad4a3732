"""The arrows of the design point one way; the core needs torch and numpy alone; collectives live in one file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradsieve

ROOT = Path(gradsieve.__file__).parent
LEVELS = [
    {"types", "version"},
    {"ops"},
    {"compressors"},
    {"feedback", "landing", "layout", "wire", "exchange", "meter", "theory"},
    {"step"},
    {"options", "state", "handshake", "pace"},
    {"sieve"},
    {"ddp", "simulate"},
    {""},  # the package itself: the public names
    {"lab"},
    {"cli"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
EXTRAS = {"lab", "cli"}
COLLECTIVES = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
]
FILES = sorted(ROOT.rglob("*.py"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def part_of(path):
    """The part of the house that a file belongs to: its folder or its own name."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports_of(path, tree):
    """Every module that a file imports, inside functions too."""
    package = ["gradsieve", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            whole = {f"{module}.{alias.name}" for alias in node.names if (ROOT / f"{alias.name}.py").exists()}
            whole |= {f"{module}.{alias.name}" for alias in node.names if (ROOT / alias.name).is_dir()}
            if module == "gradsieve" and len(whole) == len(node.names):
                yield from sorted(whole)
            else:
                yield module


def climbs(path, tree):
    """The imports of a file that point up."""
    own = part_of(path)
    for module in imports_of(path, tree):
        names = module.split(".")
        if names[0] == "gradsieve":
            part = names[1] if len(names) > 1 else ""
            assert part in LEVEL, f"{module}: give it a place in LEVELS"
            if LEVEL[part] > LEVEL[own]:
                yield module


def collectives_in(tree):
    """Calls of collectives of torch.distributed, under whatever name the file has for it."""
    homes = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            homes |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            homes |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            yield from (alias.name for alias in node.names if alias.name in COLLECTIVES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES and ast.unparse(node.value) in homes:
            yield node.attr


@each_file
def test_no_import_points_up(path):
    assert list(climbs(path, ast.parse(path.read_text()))) == []


@each_file
def test_the_core_needs_torch_and_numpy_alone(path):
    if part_of(path) in EXTRAS or path.name.startswith("triton"):
        pytest.skip("an extra, or for CUDA only")
    roots = {module.partition(".")[0] for module in imports_of(path, ast.parse(path.read_text()))}
    assert roots <= {"gradsieve", "torch", "numpy"} | set(sys.stdlib_module_names)


@each_file
def test_collectives_are_called_in_one_file_and_nothing_is_pickled(path):
    tree = ast.parse(path.read_text())
    ends_groups, times_plain_ones = ROOT / "lab" / "group.py", ROOT / "lab" / "bench"
    if path not in (ROOT / "exchange" / "group.py", ends_groups) and times_plain_ones not in path.parents:
        assert list(collectives_in(tree)) == []
    assert not {"pickle", "dill", "cloudpickle", "marshal", "shelve"} & set(imports_of(path, tree))
    assert not [name for name in COLLECTIVES if "object" in name and name in path.read_text()]


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("wire.py", "def f():\n    from gradsieve.step import Channel", ["gradsieve.step"]),
        ("wire.py", "from gradsieve import step", ["gradsieve.step"]),
        ("wire.py", "from . import step", ["gradsieve.step"]),
        ("wire.py", "import gradsieve", ["gradsieve"]),
        ("wire.py", "from gradsieve import TopK", ["gradsieve"]),
        ("ops/x.py", "from ..wire import Frame", ["gradsieve.wire"]),
        ("step.py", "from gradsieve import ops\nfrom gradsieve.wire import Frame", []),
        ("lab/x.py", "import gradsieve as gs", []),
    ],
)
def test_the_walk_sees_every_way_to_import(name, source, found):
    assert list(climbs(ROOT / name, ast.parse(source))) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.distributed as dist\ndist.all_reduce(x)", ["all_reduce"]),
        ("import torch\ntorch.distributed.barrier()", ["barrier"]),
        ("from torch import distributed as d\nd.broadcast(x)", ["broadcast"]),
        ("from torch.distributed import all_gather", ["all_gather"]),
        ("import torch.distributed as dist\ndist.get_rank()\nlink.gather(x)", []),
    ],
)
def test_the_walk_sees_every_way_to_call(source, found):
    assert list(collectives_in(ast.parse(source))) == found


def test_importing_the_package_loads_no_extra():
    code = "import sys, gradsieve; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    loaded = set(ast.literal_eval(out))
    assert "torch" in loaded
    assert not loaded & {"typer", "rich", "sklearn", "matplotlib", "jinja2", "pydantic", "lightning", "accelerate"}
