"""The CUDA kernels compiled for a GPU, on a machine without one: the interpreter forgives what a compiler does not."""

import pytest

triton = pytest.importorskip("triton", minversion="3.6")
tl = triton.language

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from gradsieve.ops import triton_arrived as arrived  # noqa: E402
from gradsieve.ops import triton_given as given  # noqa: E402
from gradsieve.ops import triton_refine as refining  # noqa: E402
from gradsieve.ops import triton_select as selecting  # noqa: E402
from gradsieve.ops import triton_send as sending  # noqa: E402
from gradsieve.ops import triton_sieve as sieving  # noqa: E402
from gradsieve.ops.rng import ROUNDS  # noqa: E402
from gradsieve.ops.triton_work import COPIES, FEW, MANY  # noqa: E402

pytestmark = pytest.mark.skipif(not isinstance(sieving.sieve, triton.JITFunction), reason="kernels are interpreted")
POINTERS = {
    "fp32": "memory list_p values target out before rows",
    "i1": "when",
    "fp64": "moments bracket bands",
    "i16": "offsets",
    "i64": "bounds sampled strides firsts keys_LS",
    "i32": "table words list_at nonfinite per_unit per_group counts wanted nonfinite_out zeros heads starts gates "
    "arrivals wants histogram keys ranks ends reopened index_LK half bad",
}
KINDS = {name: f"*{kind}" for kind, names in POINTERS.items() for name in names.split()}
LARGEST = 3.0e38
CHOICE = {"GATED": False, "SAMPLED": False}
SIEVE = {"MOMENTS": False, "WIRE": tl.float32, "LARGEST": LARGEST, "ALIGN": 4, "LISTING": True, "UNIT": 32}


def kernels():
    for steps, copies in ((0, COPIES), (6, 1)):
        yield "sample", selecting.sample, {"STEPS": steps, "WIDTH": 256}
        yield "choose", selecting.choose, {"STEPS": steps, "COPIES": copies, **CHOICE}
        yield "rank", selecting.choose, {"STEPS": steps, "COPIES": copies, **CHOICE, "SAMPLED": True}
        yield "settle", refining.settle, {"STEPS": steps, "GAUSSIAN": True}
        yield "sieve", sieving.sieve, {"STEPS": steps, "SEGMENTED": True, "TAKE": False, **SIEVE}
        yield "count", sending.count, {"STEPS": steps, **sizes(MANY)}
        yield "pack many", sending.pack, {"STEPS": steps, "SEGMENTED": True, "LARGEST": LARGEST, **sizes(MANY)}
    yield "floors", selecting.floors, {"WIDTH": 32_768, "GROUPS": 1024}
    yield "take", sieving.sieve, {"STEPS": 0, "SEGMENTED": False, "TAKE": True, **SIEVE, "WIRE": tl.bfloat16}
    yield "moments", sieving.sieve, {"STEPS": 0, "SEGMENTED": True, "TAKE": False, **SIEVE, "MOMENTS": True}
    yield "groups", sending.groups, {}
    yield "pack few", sending.pack, {"STEPS": 0, "SEGMENTED": False, "LARGEST": LARGEST, **sizes(FEW)}
    yield "running", sending.running, {"WIDTH": 4096}
    yield "place", given.place, {"LARGEST": LARGEST, "WIDTH": 256}
    yield "place_counts", given.place_counts, {"STEPS": 17}
    yield "draw", given.draw, {"STEPS": 6, "ROUNDS": ROUNDS, "WIDTH": 256}
    yield "mean", arrived.mean, {"WIDTH": 1024}
    yield "touch", arrived.touch, {"ADD": True, "WIDTH": 256}
    yield "undo", arrived.undo, {"WIDTH": 1024}
    yield "misplaced", arrived.misplaced, {"WIDTH": 256}
    yield "decode", arrived.decode, {"PART": 16_384, "WORKERS": 8, "WIDTH": 256}


def sizes(options):
    return {name: value for name, value in options.items() if name.isupper()}


CASES = list(kernels())


@pytest.fixture(autouse=True)
def no_old_results(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("case", CASES, ids=[f"{name}-{constants.get('STEPS', 0)}" for name, _, constants in CASES])
def test_compiles_for_a_hopper(case):
    name, kernel, constants = case
    compiled = compiled_for_hopper(kernel, constants, "*bf16" if name in ("take", "sample") else "*fp32", early=True)
    assert compiled.asm["cubin"]
    assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == ("EARLY" in kernel.arg_names)


@pytest.mark.parametrize("name", ["take", "sample", "pack few", "touch", "undo"])
def test_compiles_for_a_memory_of_16_bits(name):
    kernel, constants = next((kernel, constants) for known, kernel, constants in CASES if known == name)
    compiled = compiled_for_hopper(kernel, constants, "*bf16", early=True, memory="*bf16")
    assert compiled.asm["cubin"]


def test_an_older_gpu_waits_for_nothing():
    compiled = compiled_for_hopper(sending.groups, {}, "*fp32", early=False)
    assert "griddepcontrol" not in compiled.asm["ptx"]


def compiled_for_hopper(kernel, constants, grad, early, memory="*fp32"):
    constants = constants | ({"EARLY": early} if "EARLY" in kernel.arg_names else {})
    kinds = {
        **KINDS,
        "grad": grad,
        "memory": memory,
        "target": memory,
        **dict.fromkeys(("decay", "gain", "divisor"), "fp32"),
    }
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    places = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if "*" in signature[name]}
    source = ASTSource(kernel, signature, places, aligned)
    options = {"num_warps": 4, "launch_pdl": early, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
