"""Sparse <-> bytes: what goes in comes out, and nothing that was tampered with gets through."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve import ops
from gradsieve.ops import native, reference
from gradsieve.ops.reference import empty, positions, to_int16
from gradsieve.types import BLOCK
from gradsieve.wire import BITMAP, FIELDS, HEADER, LIST, Format, Frame, WireError, form_of

pytestmark = pytest.mark.usefixtures("poison")

CPU = torch.device("cpu")
STEP = 5
FORMS = pytest.mark.parametrize("form", [LIST, BITMAP], ids=["list", "bitmap"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def fill(sparse, rows):
    """Put the given coordinates, with values 1, 2, 3, ..., into a Sparse."""
    for row, index in enumerate(rows):
        index = torch.tensor(sorted(index), dtype=torch.int64)
        blocks = sparse.counts_LB.shape[1]
        sparse.counts_LB[row] = torch.bincount(index // BLOCK, minlength=blocks)[:blocks]
        sparse.offsets_LK[row, : len(index)] = to_int16(index % BLOCK)
        sparse.values_LK[row, : len(index)] = torch.arange(1, len(index) + 1).to(sparse.values_LK.dtype)
        sparse.wanted_L[row] = len(index)
        sparse.nonfinite_L[row] = row


def packed(rows, size, slots, form=LIST, values=torch.float32):
    frame = Frame.empty(Format(size, slots, values, layout=77, form=form), len(rows), CPU)
    fill(frame.sparse, rows)
    return frame.form, frame.pack(STEP).clone()


def opened(form, buffer):
    frame = Frame(form, buffer)
    sparse, wrong_L = frame.unpack(STEP)
    return frame, sparse, wrong_L.tolist()


@st.composite
def payloads(draw):
    size = draw(st.sampled_from([1, 7, 8, 9, 300, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5]))
    near = st.one_of(st.integers(0, size - 1), st.sampled_from([0, size - 1, size // 2, min(size - 1, BLOCK - 1)]))
    rows = draw(st.lists(st.sets(near, max_size=20), min_size=1, max_size=3))
    spare = draw(st.integers(0, 5))
    return rows, size, max(map(len, rows)) + spare


@FORMS
@given(case=payloads(), values=st.sampled_from(DTYPES))
def test_round_trip(form, case, values):
    rows, size, slots = case
    form, buffer = packed(rows, size, slots, form, values)
    assert buffer.dtype == torch.uint8
    assert buffer.shape[1] == form.bytes
    _, sparse, wrong = opened(form, buffer)
    assert wrong == [False] * len(rows)
    index_LK, valid_LK = positions(sparse)
    for row, index in enumerate(rows):
        assert index_LK[row, valid_LK[row]].tolist() == sorted(index)
        assert sparse.values_LK[row, : len(index)].tolist() == list(range(1, len(index) + 1))
        assert sparse.wanted_L[row] == len(index)
        assert sparse.nonfinite_L[row] == row


@given(case=payloads(), flips=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1 << 20)), max_size=4))
def test_bitmaps_of_all_ops_agree(case, flips):
    """Also on what was tampered with: bits that the counts do not say, past the end, more than there are slots."""
    rows, size, slots = case
    form, buffer = packed(rows, size, slots, BITMAP)
    with ops.using(reference):
        assert torch.equal(packed(rows, size, slots, BITMAP)[1], buffer)
    _, start, end, _ = form.parts
    for row, at in flips:
        buffer[row % len(rows), start + at % (end - start)] ^= 1 << at % 8
    found = []
    for module in (reference, native):
        with ops.using(module):
            _, sparse, wrong = opened(form, buffer.clone())
        found.append((sparse.offsets_LK.tolist(), wrong))
    assert found[0][1] == found[1][1]
    for index, mine, theirs, wrong in zip(rows, found[0][0], found[1][0], found[0][1], strict=True):
        assert wrong or mine[: len(index)] == theirs[: len(index)]


def test_nothing_at_all_travels_too():
    for size, slots in ((0, 0), (10, 0)):
        form, buffer = packed([[], []], size, slots)
        assert opened(form, buffer)[2] == [False, False]


@FORMS
@pytest.mark.parametrize("field", FIELDS[: FIELDS.index("step") + 1])
def test_a_wrong_header_is_refused_by_rank_and_field(form, field):
    form, buffer = packed([[1, 2], [3], [250]], 300, 4, form)
    buffer[1, 4 * FIELDS.index(field)] ^= 1
    frame, _, wrong = opened(form, buffer)
    assert wrong == [False, True, False]
    with pytest.raises(WireError, match=rf"^payload of rank 1: {field} is -?\d+, -?\d+ was agreed$"):
        raise frame.complaint(STEP, 1)


@FORMS
@pytest.mark.parametrize("count", [-1, 0, 3, 5, 301, BLOCK + 1, 2**31 - 1, -(2**31)])
def test_wrong_counts_are_refused(form, count):
    """Row 1 has two elements in four slots; a list of three would name a padding slot, coordinate 0, again."""
    form, buffer = packed([[1, 2], [0, 5]], 300, 4, form)
    Frame(form, buffer).counts_LB[1, 0] = count
    frame, _, wrong = opened(form, buffer)
    silent = form.form == LIST and count == 0  # a worker may send nothing
    assert wrong == [False, not silent]
    assert "payload of rank 1: its counts or positions" in str(frame.complaint(STEP, 1))


@pytest.mark.parametrize("offsets", [[5, 5], [300, 1], [65535, 1], [-1, -1]])
def test_wrong_offsets_are_refused(offsets):
    form, buffer = packed([[1, 2], [3, 4]], 300, 4)
    Frame(form, buffer).offsets_LK[1, :2] = to_int16(torch.tensor(offsets) & 0xFFFF)
    assert opened(form, buffer)[2] == [False, True]


def test_an_offset_beyond_the_last_block_is_refused():
    form, buffer = packed([[1, BLOCK + 2]], BLOCK + 5, 2)
    assert opened(form, buffer.clone())[2] == [False]
    Frame(form, buffer).offsets_LK[0, 1] = 5
    assert opened(form, buffer)[2] == [True]


@pytest.mark.parametrize("bit", [0, 7, 299, 300, 303, 319])
def test_a_flipped_bit_of_the_bitmap_is_refused(bit):
    """A bit too many, a bit too few, and a bit past the last coordinate."""
    form, buffer = packed([[1, 2], [0, 299]], 300, 4, BITMAP)
    Frame(form, buffer).index[1, bit // 8] ^= 1 << bit % 8
    assert opened(form, buffer)[2] == [False, True]


@FORMS
@given(data=st.data())
def test_no_corruption_crashes(form, data):
    """Any bytes whatever: refused, or a Sparse whose every position is in range and there once."""
    form, buffer = packed([[1, 2, 250], [3]], 300, 6, form)
    for _ in range(data.draw(st.integers(1, 6))):
        buffer[data.draw(st.integers(0, 1)), data.draw(st.integers(0, form.bytes - 1))] = data.draw(st.integers(0, 255))
    _, sparse, wrong = opened(form, buffer)
    index_LK, valid_LK = positions(sparse)
    for index_K, valid_K, refused in zip(index_LK, valid_LK, wrong, strict=True):
        kept = index_K[valid_K].tolist()
        assert refused or (len(set(kept)) == len(kept) and all(0 <= i < 300 for i in kept))


@pytest.mark.parametrize("change", [lambda b: b[:, :-8], lambda b: b[0], lambda b: b.int()], ids=["cut", "flat", "int"])
def test_a_payload_of_another_shape_is_refused(change):
    form, buffer = packed([[1], [2]], 300, 4)
    with pytest.raises(WireError, match=f"where {form.bytes} bytes were agreed"):
        Frame(form, change(buffer))


def test_the_form_is_the_smaller_of_the_two():
    for size in (0, 1, 64, 1000, BLOCK + 1):
        for slots in {0, size // 17, size // 16, size // 15, size}:
            both = {form: Format(size, slots, torch.float32, form=form).bytes for form in (LIST, BITMAP)}
            assert both[form_of(size, slots)] == min(both.values())


def test_bytes_are_header_counts_index_and_values():
    """4 bytes an element with 16-bit values, beyond a header of 64 and 4 a block."""
    assert Format(10 * BLOCK, 1000, torch.bfloat16).bytes == 4 * HEADER + 4 * 10 + 4 * 1000


def test_a_size_beyond_32_bits_fits_the_header():
    header = Format(5 * 2**31 + 9, 3, torch.float32).header.tolist()
    assert header[FIELDS.index("high")] * 2**31 + header[FIELDS.index("low")] == 5 * 2**31 + 9


def test_slots_of_an_empty_sparse_are_what_was_asked_for():
    assert empty(2, BLOCK + 1, 7, torch.float16, CPU).slots == 7
