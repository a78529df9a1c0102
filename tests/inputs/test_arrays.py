"""Reading other people's arrays: no copy, honest strides and dtypes, and one error per object that
can't be read."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from numba_prefix.inputs.arrays import Tensor, as_numpy, bits, contiguous_strides, describe, empty_like, overlaps, span

FORM = r"^x: got .+, expected .+"


class Exporter:
    """An object whose only protocol is __dlpack__."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)


class OldExporter(Exporter):
    """A producer from before DLPack 1.0: no max_version."""

    def __dlpack__(self) -> Any:  # type: ignore[override]
        return self.array.__dlpack__()


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 2),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class DLVersioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


class HandMade:
    """A producer with a capsule made by hand: float16 [2, 3] over `memory` unless told
    otherwise."""

    def __init__(self, *, version: int | None = None, flags: int = 0, **fields: Any) -> None:
        self.memory = np.arange(8, dtype=np.float16)
        self.shape = (ctypes.c_int64 * 2)(2, 3)
        tensor = DLTensor(data=self.memory.ctypes.data, device=(1, 0), ndim=2, dtype=(2, 16), lanes=1, shape=self.shape)
        for name, value in fields.items():
            setattr(tensor, name, value)
        self.tensor: Any = tensor
        self.capsule_name = b"dltensor"
        if version is not None:
            self.tensor = DLVersioned(version=(version, 0), flags=flags, tensor=tensor)
            self.capsule_name = b"dltensor_versioned"

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
            ("PyCapsule_New", ctypes.pythonapi)
        )
        return new(ctypes.addressof(self.tensor), self.capsule_name, None)


class CudaArray:
    """An object whose only protocol is __cuda_array_interface__. The address is made up and never
    read."""

    def __init__(self, **changes: Any) -> None:
        interface = {"shape": (2, 3), "typestr": "<f2", "data": (4096, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = interface | changes


class TestNumpy:
    def test_describes_what_is_there(self) -> None:
        a = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
        t = describe(a, "x")
        assert (t.name, t.kind, t.dtype, t.device, t.is_writable) == ("x", "numpy", "float16", "cpu", True)
        assert (t.shape, t.strides, t.address) == ((2, 3, 4), (12, 4, 1), a.ctypes.data)
        assert t.owner is a
        assert not t.is_copy
        assert as_numpy(t) is a

    @pytest.mark.parametrize(
        "view",
        [
            lambda a: a[::-1],
            lambda a: a[:, ::2],
            lambda a: a.T,
            lambda a: a[1:, 1:, 1:],
            lambda a: a[:0],
            lambda a: a[..., None],
            lambda a: np.broadcast_to(a, (5, 2, 3, 4)),
            np.asfortranarray,
        ],
    )
    def test_any_strides_without_a_copy(self, view: Any) -> None:
        a = view(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
        t = describe(a, "x")
        assert t.address == a.ctypes.data
        assert not t.is_copy
        assert t.is_writable == a.flags.writeable
        assert tuple(4 * s for s in t.strides) == a.strides
        np.testing.assert_array_equal(bits(t), a)

    def test_read_only_stays_read_only(self) -> None:
        a = np.zeros(3, np.float16)
        a.flags.writeable = False
        t = describe(a, "x")
        assert not t.is_writable
        assert not bits(t).flags.writeable

    def test_views_keep_the_memory_alive(self) -> None:
        a = np.arange(1000, dtype=np.float16)
        ref = weakref.ref(a)
        view = bits(describe(a, "x"))
        del a
        gc.collect()
        assert ref() is not None
        assert view[999] == np.float16(999).view(np.uint16)
        del view
        gc.collect()
        assert ref() is None

    def test_bfloat16(self) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        a = np.array([1.0, -2.5], ml_dtypes.bfloat16)
        t = describe(a[::-1], "x")
        assert (t.dtype, t.strides) == ("bfloat16", (-1,))
        assert as_numpy(t).dtype == ml_dtypes.bfloat16
        assert bits(t).tolist() == [0xC020, 0x3F80]
        assert empty_like(t, (2, 2), "bfloat16").dtype == ml_dtypes.bfloat16

    @pytest.mark.parametrize("fields", [["<f2", "u1"], ["u1", "<f2"]])
    def test_misaligned_elements_are_copied(self, fields: list[str]) -> None:
        record = np.zeros(5, dtype=[(f"f{i}", f) for i, f in enumerate(fields)])
        a = record[f"f{fields.index('<f2')}"]
        a[...] = np.arange(5)
        t = describe(a, "x")
        assert t.is_copy
        assert not t.is_writable
        assert t.owner is a
        assert as_numpy(t).tolist() == [0, 1, 2, 3, 4]

    def test_misaligned_buffers_are_copied(self) -> None:
        raw = b"\0" + np.arange(5, dtype=np.float16).tobytes()
        t = describe(np.frombuffer(raw, np.float16, offset=1), "x")
        assert t.is_copy
        assert t.address % 2 == 0
        assert as_numpy(t).tolist() == [0, 1, 2, 3, 4]

    def test_subclasses(self, tmp_path: Any) -> None:
        np.save(tmp_path / "a.npy", np.arange(6, dtype=np.float16).reshape(2, 3))
        mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
        t = describe(mapped, "x")
        assert t.address == mapped.ctypes.data
        assert not t.is_writable
        with pytest.raises(TypeError, match=FORM):
            describe(np.ma.masked_array([1.0, 2.0]), "x")

    @pytest.mark.parametrize("dtype", [">f2", ">i4", object, "S3", "M8[s]", [("a", "<f4")]])
    def test_refused_dtypes(self, dtype: Any) -> None:
        with pytest.raises(TypeError, match=FORM):
            describe(np.zeros(2, dtype), "x")


@pytest.mark.parametrize("obj", [None, 1, 1.5, "text", [1, 2], (1,), {}, np.float16(1), np.ndarray, object(), b"ab"])
def test_anything_else_is_refused(obj: Any) -> None:
    with pytest.raises(TypeError, match=FORM):
        describe(obj, "x")


class TestTorch:
    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "int64", "uint8", "bool"])
    def test_describes_what_is_there(self, torch: Any, dtype: str) -> None:
        a = torch.zeros(4, 6, dtype=getattr(torch, dtype))[1:, ::2]
        t = describe(a, "x")
        assert (t.kind, t.dtype, t.device, t.is_writable) == ("torch", dtype, "cpu", True)
        assert (t.shape, t.strides, t.address) == ((3, 3), (6, 2), a.data_ptr())
        assert type(t.shape) is tuple
        assert t.owner is a

    def test_writes_reach_the_tensor(self, torch: Any) -> None:
        a = torch.zeros(2, 3, dtype=torch.bfloat16)
        bits(describe(a.t(), "x"))[2, 1] = 0x3F80
        assert a[1, 2] == 1
        assert a.sum() == 1

    def test_bfloat16_as_numpy(self, torch: Any) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        view = as_numpy(describe(torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "x"))
        assert view.dtype == ml_dtypes.bfloat16
        assert view.tolist() == [1.5, -2.0]

    def test_gradients(self, torch: Any) -> None:
        a = torch.nn.Parameter(torch.zeros(2))
        with pytest.raises(ValueError, match="no gradient"):
            describe(a, "x")
        with torch.no_grad():
            assert describe(a, "x").address == a.data_ptr()
        with torch.inference_mode():
            assert describe(a, "x").address == a.data_ptr()
        assert describe(a.detach(), "x").address == a.data_ptr()

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_refused_tensors(self, torch: Any) -> None:
        negated = torch.tensor([1 + 2j]).conj().imag
        assert negated.is_neg()
        for a in (
            torch.eye(2).to_sparse(),
            torch.zeros(2, device="meta"),
            negated,
            torch.tensor([1 + 2j]).conj(),
            torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        ):
            with pytest.raises(TypeError, match=FORM):
                describe(a, "x")

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_fake_tensors(self, torch: Any) -> None:
        fake = pytest.importorskip("torch._subclasses.fake_tensor")
        with fake.FakeTensorMode():
            a = torch.zeros(2, 3)
        with pytest.raises(TypeError, match=FORM):
            describe(a, "x")

    def test_misaligned_buffers_are_copied(self, torch: Any) -> None:
        raw = bytearray(b"\0" + np.arange(5, dtype=np.float16).tobytes())
        t = describe(torch.frombuffer(raw, dtype=torch.float16, offset=1), "x")
        assert t.is_copy
        assert as_numpy(t).tolist() == [0, 1, 2, 3, 4]

    def test_empty_like(self, torch: Any) -> None:
        made = empty_like(describe(torch.zeros(2, dtype=torch.float16), "x"), (3, 4), "bfloat16")
        assert made.shape == (3, 4)
        assert made.dtype == torch.bfloat16

    def test_dlpack(self, torch: Any) -> None:
        a = torch.arange(12, dtype=torch.float32).to(torch.bfloat16).reshape(3, 4)
        t = describe(Exporter(a[1:, ::2]), "x")
        assert (t.kind, t.dtype, t.shape, t.strides) == ("dlpack", "bfloat16", (2, 2), (4, 2))
        assert t.address == a[1:].data_ptr()
        assert bits(t)[0, 1] == 0x40C0


class TestDlpack:
    @pytest.mark.parametrize("exporter", [Exporter, OldExporter])
    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint8", "int64", "bool"])
    def test_describes_what_is_there(self, exporter: Any, dtype: str) -> None:
        a = np.zeros((4, 6), dtype)[1:, ::2]
        t = describe(exporter(a), "x")
        assert (t.kind, t.dtype, t.device, t.is_writable) == ("dlpack", dtype, "cpu", True)
        assert (t.shape, t.strides, t.address) == ((3, 3), (6, 2), a.ctypes.data)
        assert not t.is_copy

    @pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="this NumPy exports no read-only arrays")
    def test_read_only_flag(self) -> None:
        a = np.zeros(3, np.float32)
        a.flags.writeable = False
        assert not describe(Exporter(a), "x").is_writable
        with pytest.raises(TypeError, match=FORM):  # the old protocol can't say it, so NumPy refuses
            describe(OldExporter(a), "x")

    def test_the_producer_is_kept_and_then_let_go(self) -> None:
        a = np.arange(1000, dtype=np.float32)
        ref = weakref.ref(a)
        exporter = Exporter(a)
        t = describe(exporter, "x")
        exporter.array = None
        del a
        gc.collect()
        assert ref() is not None
        assert as_numpy(t)[999] == 999
        del t
        gc.collect()
        assert ref() is None

    def test_offset_and_missing_strides(self) -> None:
        producer = HandMade(byte_offset=4)
        t = describe(producer, "x")
        assert (t.address, t.strides) == (producer.memory.ctypes.data + 4, (3, 1))
        assert as_numpy(t).tolist() == [[2, 3, 4], [5, 6, 7]]

    def test_versions(self) -> None:
        assert describe(HandMade(version=1), "x").is_writable
        assert not describe(HandMade(version=1, flags=1), "x").is_writable
        with pytest.raises(TypeError, match=r"DLPack 2\.0"):
            describe(HandMade(version=2), "x")

    @pytest.mark.parametrize(
        ("device", "expected"), [((2, 1), "cuda:1"), ((13, 0), "cuda:0"), ((3, 0), "cpu"), ((1, 0), "cpu")]
    )
    def test_devices(self, device: Any, expected: str) -> None:
        assert describe(HandMade(device=device), "x").device == expected

    @pytest.mark.parametrize(
        "fields", [{"device": (8, 0)}, {"lanes": 4}, {"dtype": (3, 16)}, {"dtype": (9, 8)}, {"byte_offset": 1}]
    )
    def test_refused_capsules(self, fields: Any) -> None:
        with pytest.raises(TypeError, match=FORM):
            describe(HandMade(**fields), "x")

    def test_no_capsule(self) -> None:
        class Liar:
            def __dlpack__(self, **_: Any) -> int:
                return 3

        with pytest.raises(TypeError, match=FORM):
            describe(Liar(), "x")

    def test_empty_like_without_a_namespace_is_numpy(self) -> None:
        t = describe(HandMade(), "x")
        made = empty_like(t, (2, 3), "float32")
        assert type(made) is np.ndarray
        assert (made.shape, made.dtype) == ((2, 3), np.float32)

    def test_empty_like_asks_the_namespace(self) -> None:
        made_with: dict[str, Any] = {}

        class Namespace:
            __name__ = "somebody"
            float32 = np.float32

            @staticmethod
            def empty(shape: Any, *, dtype: Any, device: Any) -> Any:
                made_with.update(dtype=dtype, device=device)
                return Exporter(np.empty(shape, dtype))

        class Array(Exporter):
            dtype = np.dtype(np.float16)
            device = "here"

            def __array_namespace__(self) -> Any:
                return Namespace()

        t = describe(Array(np.zeros(2, np.float16)), "x")
        assert isinstance(empty_like(t, (2, 3), "float16"), Exporter)
        assert made_with == {"dtype": np.dtype(np.float16), "device": "here"}
        empty_like(t, (2,), "float32")
        assert made_with["dtype"] is np.float32


class TestCudaArrayInterface:
    def test_describes_what_is_there(self) -> None:
        t = describe(CudaArray(), "x")
        assert (t.kind, t.dtype, t.device, t.is_writable) == ("dlpack", "float16", "cuda:0", True)
        assert (t.shape, t.strides, t.address) == ((2, 3), (3, 1), 4096)
        assert describe(CudaArray(strides=(12, 4)), "x").strides == (6, 2)
        assert not describe(CudaArray(data=(4096, True)), "x").is_writable

    @pytest.mark.parametrize("changes", [{"typestr": "<V2"}, {"typestr": ">f2"}, {"mask": 1}, {"strides": (7, 2)}])
    def test_refused(self, changes: Any) -> None:
        with pytest.raises(TypeError, match=FORM):
            describe(CudaArray(**changes), "x")

    def test_gpu_memory_is_not_shown_to_numpy(self) -> None:
        t = describe(CudaArray(), "x")
        for view in (as_numpy, bits):
            with pytest.raises(TypeError, match=FORM):
                view(t)

    def test_nothing_allocates_for_it(self) -> None:
        with pytest.raises(TypeError, match=FORM):
            empty_like(describe(CudaArray(), "x"), (2,), "float32")


def test_a_description_describes_itself() -> None:
    t = describe(np.zeros(2), "x")
    assert describe(t, "y") is t
    assert "owner" not in repr(t)


def test_contiguous_strides_and_span() -> None:
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides(()) == ()
    assert span((2, 3), (3, 1)) == (0, 6)
    assert span((2, 3), (-3, 1)) == (-3, 3)
    assert span((0, 3), (3, 1)) == (0, 0)


def test_overlaps() -> None:
    a = np.zeros((4, 6), np.float16)

    def check(x: Any, y: Any) -> bool:
        result = overlaps(describe(x, "x"), describe(y, "y"))
        assert overlaps(describe(y, "y"), describe(x, "x")) == result
        return result

    assert check(a, a)
    assert check(a[1:], a[:2])
    assert not check(a[:2], a[2:])
    assert not check(a[:, :3], a[:, 3:])  # interleaved rows of one buffer
    assert not check(a[:, ::2], a[:, 1::2])
    assert check(a[::-1], a[3:])
    assert not check(a[:0], a)
    assert not check(a, a.copy())
    assert not check(a, CudaArray(data=(a.ctypes.data, False)))
    assert check(CudaArray(), CudaArray(data=(4098, False)))


def test_imports_nothing_that_the_caller_did_not_bring() -> None:
    code = (
        "import sys; import numba_prefix.inputs.arrays, numba_prefix.inputs.problem, numba_prefix.reference, numpy as np; "
        "numba_prefix.inputs.arrays.describe(np.zeros(3, np.float16), 'x'); "
        "assert not {'torch', 'ml_dtypes', 'cupy'} & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tensor_can_be_made_by_hand() -> None:
    a = np.arange(6, dtype=np.float16)
    t = Tensor("x", a, "numpy", a.ctypes.data, "float16", (2, 3), (3, 1), "cpu", True)
    assert as_numpy(t).tolist() == [[0, 1, 2], [3, 4, 5]]
