"""Descriptions of the caller's arrays: NumPy, torch, DLPack or CUDA-array-interface objects.

Nothing is copied, apart from arrays whose elements don't lie at whole multiples of the item size.
torch and ml_dtypes are never imported for callers who don't use them.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_EXPECTED = "a NumPy array, a torch tensor, or an object with __dlpack__ or __cuda_array_interface__"
_DLPACK_MAJOR = 1
# By DLDeviceType: plain, CUDA, pinned host and CUDA managed memory.
_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}
DLPACK_DTYPES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_DLPACK_BOOL = 6
_READ_ONLY_FLAG = 1
_IMMUTABLE = ("jax", "jaxlib", "tensorflow")  # libraries that share an array's memory among values
_MAX_WORK: Any = 100_000  # candidate solutions that np.shares_memory may try
_POINTER_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL of the CUDA driver API

ITEM_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
BITS = {"float16": "uint16", "bfloat16": "uint16"}

_numpy_dtypes: dict[Any, str] = {}
_torch_dtypes: dict[Any, str] = {}


# Treat as frozen. It is not declared so, since that makes creation four times slower.
@dataclass(slots=True, eq=False)
class Tensor:
    """The facts that a kernel needs about a caller's array. The memory stays valid as long as this
    object lives."""

    name: str  # the argument's name, for messages
    owner: Any = field(repr=False)  # the caller's own object
    # "numpy", "torch", "dlpack" (CUDA-array-interface objects too) or "c" (memory of a C caller, no
    # owner)
    kind: str
    address: int  # of element [0, …, 0]
    dtype: str  # "float16", "bfloat16", "float32", "int32", …
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    device: str  # "cpu" or "cuda:0", "cuda:1", …
    is_writable: bool
    # Holds the memory where it isn't the owner's own: a copy, a capsule
    keeper: Any = field(default=None, repr=False)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_copy(self) -> bool:
        """Whether the memory is a private copy, so that writes would not reach the owner."""
        return self.keeper is not None and self.kind != "dlpack"


def describe(obj: Any, name: str) -> Tensor:
    """Describe `obj`, the caller's argument `name`, without copying it.

    Takes NumPy arrays (ml_dtypes.bfloat16 included), torch CPU and CUDA tensors, and any object
    with `__dlpack__` or `__cuda_array_interface__`; a Tensor comes back as it is. Elements that
    don't lie at multiples of the item size (a field of a structured array) are copied. A DLPack
    producer on a GPU is asked to be ready on the legacy default stream; the launch of a kernel on a
    `__cuda_array_interface__` object has to honour that interface's "stream".

    Raises TypeError for any other object, byte order or memory layout, ValueError for a torch
    tensor that requires a gradient while gradients are recorded.
    """
    if type(obj) is np.ndarray:
        return _describe_numpy(obj, name)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, getattr(torch, "Tensor", ())):
        return _describe_torch(torch, obj, name)
    if type(obj) is Tensor:
        return obj
    if isinstance(obj, np.ndarray):
        if isinstance(obj, np.ma.MaskedArray):
            raise TypeError(f"{name}: got a masked array, expected {_EXPECTED}")
        return _describe_numpy(obj, name)
    if hasattr(obj, "__dlpack__") and not isinstance(obj, (type, np.generic)):
        return _describe_dlpack(obj, name)
    if hasattr(obj, "__cuda_array_interface__") and not isinstance(obj, type):
        return _describe_cuda_interface(obj, name)
    raise TypeError(f"{name}: got {type(obj).__name__}, expected {_EXPECTED}")


def as_numpy(t: Tensor) -> NDArray[Any]:
    """The described CPU memory as a NumPy array, shaped and strided as `t` says, without a copy.

    bfloat16 is shown as ml_dtypes.bfloat16 where that can be imported, else as its bits (uint16).
    Raises TypeError for memory on a GPU.
    """
    if t.keeper is None and type(t.owner) is np.ndarray and t.owner.shape == t.shape:
        return t.owner
    if t.dtype != "bfloat16":
        return _view(t, t.dtype)
    dtype = _bfloat16()
    view = _view(t, "uint16")
    return view if dtype is None else view.view(dtype)


def bits(t: Tensor) -> NDArray[Any]:
    """The same view as as_numpy, but with 16-bit floats shown as uint16."""
    return _view(t, BITS.get(t.dtype, t.dtype))


def empty_like(t: Tensor, shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised array of the caller's kind, on the device of `t`.

    An object of another library is asked for its array namespace; a CPU object without one gets a
    NumPy array. Raises TypeError where no library can allocate for the caller.
    """
    if t.kind == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=t.owner.device)
    if t.kind == "dlpack":
        made = _empty_in_namespace(t, shape, dtype)
        if made is not None:
            return made
        if t.device != "cpu":
            raise TypeError(
                f"{t.name}: got {type(t.owner).__name__}, which can't allocate, expected an output array to be given"
            )
    if dtype != "bfloat16":
        return np.empty(shape, dtype)
    found = t.owner.dtype if t.kind == "numpy" and t.dtype == dtype else _bfloat16()
    if found is None:
        raise TypeError(f"{t.name}: got bfloat16 data, expected ml_dtypes to be installed (or an output array given)")
    return np.empty(shape, found)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a dense row-major array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@lru_cache(maxsize=1024)
def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """First and one-past-last element touched, relative to element [0, …, 0]; (0, 0) for no
    elements."""
    if 0 in shape:
        return 0, 0
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + 1


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether two arrays share an element. Arrays too entangled to decide count as sharing. No
    memory is read."""
    if a.device != b.device:
        return False
    a_first, a_end = span(a.shape, a.strides)
    b_first, b_end = span(b.shape, b.strides)
    a_bytes, b_bytes = ITEM_BYTES[a.dtype], ITEM_BYTES[b.dtype]
    if (
        a.address + a_end * a_bytes <= b.address + b_first * b_bytes
        or b.address + b_end * b_bytes <= a.address + a_first * a_bytes
    ):
        return False
    try:
        return np.shares_memory(_addresses(a), _addresses(b), max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return True


class _Memory:
    """Lends a Tensor's memory to NumPy, and keeps the Tensor alive."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, t: Tensor, dtype: str) -> None:
        item = np.dtype(dtype)
        self.tensor = t
        self.__array_interface__ = {
            "version": 3,
            "typestr": item.str,
            "shape": t.shape,
            "strides": tuple([s * item.itemsize for s in t.strides]),
            "data": (t.address, not t.is_writable),
        }


def _view(t: Tensor, dtype: str) -> NDArray[Any]:
    if t.device != "cpu":
        raise TypeError(f"{t.name}: got an array on {t.device}, expected one on the CPU")
    return _addresses(t, dtype)


def _addresses(t: Tensor, dtype: str | None = None) -> NDArray[Any]:
    dtype = dtype or BITS.get(t.dtype, t.dtype)
    return np.empty(t.shape, dtype) if 0 in t.shape else np.asarray(_Memory(t, dtype))


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


@lru_cache(maxsize=1024)
def _element_strides(byte_strides: tuple[int, ...], item_bytes: int) -> tuple[int, ...] | None:
    if any(s % item_bytes for s in byte_strides):
        return None
    return tuple([s // item_bytes for s in byte_strides])


def _numpy_dtype(dtype: np.dtype[Any], name: str) -> str:
    if not dtype.isnative:
        order = "big" if dtype.byteorder == ">" else "little"
        raise TypeError(f"{name}: got {order}-endian dtype {dtype.str}, expected native byte order")
    # ml_dtypes' types look like this.
    is_extension = dtype.kind == "V" and dtype.names is None and not dtype.name.startswith("void")
    if dtype.kind not in "biufc" and not is_extension:
        raise TypeError(f"{name}: got dtype {dtype}, expected a numeric dtype")
    return _numpy_dtypes.setdefault(dtype, dtype.name)


_BEHIND_HEADER = object.__basicsize__


def _quick_address(a: NDArray[Any]) -> int:
    """The pointer behind the object's header, where NumPy's own C macros read it: 0.7 us instead of
    3.4 us through the array interface."""
    return ctypes.c_void_p.from_address(id(a) + _BEHIND_HEADER).value or 0


def _interface_address(a: NDArray[Any]) -> int:
    return int(a.__array_interface__["data"][0])


_sample = np.empty(1)
data_address = _quick_address if _quick_address(_sample) == _interface_address(_sample) else _interface_address


def _describe_numpy(a: NDArray[Any], name: str) -> Tensor:
    dtype = _numpy_dtypes.get(a.dtype) or _numpy_dtype(a.dtype, name)
    item_bytes = a.itemsize
    strides = _element_strides(a.strides, item_bytes)
    address = data_address(a)
    if strides is None or address % ITEM_BYTES.get(dtype, 1):
        copy = np.array(a, order="C", copy=True, subok=False)
        strides = contiguous_strides(copy.shape)
        return Tensor(name, a, "numpy", copy.ctypes.data, dtype, copy.shape, strides, "cpu", False, copy)
    return Tensor(name, a, "numpy", address, dtype, a.shape, strides, "cpu", a.flags.writeable)


def _describe_torch(torch: Any, tensor: Any, name: str) -> Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: got a tensor that requires grad, expected torch.no_grad(): no gradient is computed")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_neg() or tensor.is_conj():
        raise TypeError(f"{name}: got a sparse, quantized, negated or conjugated view, expected a plain strided tensor")
    if _is_recorded(torch):
        raise TypeError(
            f"{name}: got a tensor while torch records a graph, expected torch.ops.numba_prefix.prefix_encoder, "
            "which graphs can hold (import numba_prefix.integrations.torch)"
        )
    device = "cpu" if tensor.is_cpu else str(tensor.device)
    if device != "cpu" and not tensor.is_cuda:
        raise TypeError(f"{name}: got a tensor on {device}, expected one on cpu or cuda")
    dtype = _torch_dtypes.get(tensor.dtype)
    if dtype is None:
        dtype = _torch_dtypes.setdefault(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    keeper = None
    try:
        address, strides = tensor.data_ptr(), tensor.stride()
        if address % ITEM_BYTES.get(dtype, 1):
            keeper = tensor.detach().clone()
            address, strides = keeper.data_ptr(), keeper.stride()
    except RuntimeError:  # a fake or nested tensor
        address, strides = 0, ()
    shape = tuple(tensor.shape)
    if not address and (0 not in shape or not strides):
        raise TypeError(f"{name}: got {type(tensor).__name__} without memory, expected a plain strided tensor")
    return Tensor(name, tensor, "torch", address, dtype, shape, strides, device, keeper is None, keeper)


def _is_recorded(torch: Any) -> bool:
    """Whether this thread's operators are being recorded by torch.jit.trace or make_fx: a graph
    would have the output's allocation, and nothing that writes to it."""
    c = torch._C
    if c._get_tracing_state() is not None:
        return True
    return c._len_torch_dispatch_stack() > 0 and c._get_dispatch_mode(c._TorchDispatchModeKey.PROXY) is not None


class DLTensor(ctypes.Structure):
    """DLPack's description of an array."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _open_capsule(capsule: Any, name: str) -> tuple[DLTensor, bool]:
    """The tensor inside a DLPack capsule, and whether writing to it is allowed."""
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        pointer = _capsule_pointer(capsule, b"dltensor_versioned")
        versioned = _DLManagedTensorVersioned.from_address(pointer)
        if versioned.major != _DLPACK_MAJOR:
            found = f"{versioned.major}.{versioned.minor}"
            raise TypeError(f"{name}: got a DLPack {found} capsule, expected version {_DLPACK_MAJOR}")
        return versioned.tensor, not versioned.flags & _READ_ONLY_FLAG
    if _capsule_is_valid(capsule, b"dltensor"):
        return DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")), True
    raise TypeError(f"{name}: got {type(capsule).__name__} from __dlpack__, expected a DLPack capsule")


def _describe_dlpack(obj: Any, name: str) -> Tensor:
    # The capsule is never marked as used: its own destructor calls the producer's deleter once the
    # Tensor is gone.
    try:
        try:
            capsule = obj.__dlpack__(max_version=(_DLPACK_MAJOR, 0))
        except TypeError:  # a producer older than DLPack 1.0 doesn't know the keyword
            capsule = obj.__dlpack__()
    except Exception as error:
        got = f"{type(obj).__name__} whose __dlpack__ failed ({error})"
        raise TypeError(f"{name}: got {got}, expected {_EXPECTED}") from error
    dl, is_writable = _open_capsule(capsule, name)
    # Capsules of before DLPack 1.0 cannot say it.
    is_writable = is_writable and type(obj).__module__.partition(".")[0] not in _IMMUTABLE
    device = _DLPACK_DEVICES.get(dl.device_type)
    if device is None:
        raise TypeError(f"{name}: got memory on DLPack device type {dl.device_type}, expected cpu or cuda")
    if device == "cuda":
        device = f"cuda:{dl.device_id}"
    if dl.code == _DLPACK_BOOL:
        dtype = "bool"
    elif dl.lanes == 1 and dl.code in DLPACK_DTYPES:
        dtype = f"{DLPACK_DTYPES[dl.code]}{dl.bits}"
    else:
        got = f"DLPack dtype code {dl.code}, {dl.bits} bits, {dl.lanes} lanes"
        raise TypeError(f"{name}: got {got}, expected a plain integer or floating-point dtype")
    shape = tuple(dl.shape[: dl.ndim]) if dl.ndim else ()
    strides = tuple(dl.strides[: dl.ndim]) if dl.ndim and dl.strides else contiguous_strides(shape)
    address = (dl.data or 0) + dl.byte_offset
    if address % ITEM_BYTES.get(dtype, 1):
        raise TypeError(f"{name}: got a misaligned {dtype} array, expected its elements at multiples of their size")
    return Tensor(name, obj, "dlpack", address, dtype, shape, strides, device, is_writable, capsule)


def _describe_cuda_interface(obj: Any, name: str) -> Tensor:
    interface = obj.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise TypeError(f"{name}: got a masked array, expected {_EXPECTED}")
    item = np.dtype(interface["typestr"])
    dtype = _numpy_dtype(item, name)
    address, is_read_only = interface["data"]
    shape = tuple(interface["shape"])
    byte_strides = interface.get("strides")
    if byte_strides is None:
        strides: tuple[int, ...] | None = contiguous_strides(shape)
    else:
        strides = _element_strides(tuple(byte_strides), item.itemsize)
    if strides is None or address % item.itemsize:
        raise TypeError(f"{name}: got a misaligned {dtype} array, expected its elements at multiples of their size")
    device = f"cuda:{_device_ordinal(address)}"
    return Tensor(name, obj, "dlpack", address, dtype, shape, strides, device, not is_read_only, interface)


def _device_ordinal(address: int) -> int:
    """The GPU that holds `address`, according to the driver; 0 where there is no driver."""
    ordinal = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        status = driver.cuPointerGetAttribute(ctypes.byref(ordinal), _POINTER_DEVICE_ORDINAL, ctypes.c_void_p(address))
    except (OSError, AttributeError):
        return 0
    return ordinal.value if status == 0 else 0


def _empty_in_namespace(t: Tensor, shape: tuple[int, ...], dtype: str) -> Any:
    """An empty array made by the owner's own library, or None where that can't make one to be
    written in place."""
    if type(t.owner).__module__.partition(".")[0] in ("numba", "numba_cuda"):
        cuda = sys.modules.get("numba.cuda")
        return None if cuda is None else cuda.device_array(shape, dtype)
    if not hasattr(t.owner, "__array_namespace__"):
        return None
    namespace = t.owner.__array_namespace__()
    if namespace.__name__.partition(".")[0] in _IMMUTABLE:
        return None
    wanted = t.owner.dtype if dtype == t.dtype else getattr(namespace, dtype, None)
    if wanted is None:
        return None
    made = namespace.empty(shape, dtype=wanted, device=getattr(t.owner, "device", None))
    return made if _describe_dlpack(made, t.name).is_writable else None
