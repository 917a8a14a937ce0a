"""Objects on their way between the pool and its ranks: pickle, with two additions.

Functions and classes travel by name, as always with pickle, but together with the file their module was read from. A
module that cannot be imported by name over there is loaded from that file: test modules under pytest's importlib mode
are such, since no folder of theirs is on the import path. Results' tensors travel as NumPy arrays (bfloat16, which
NumPy lacks, as float32), so that whoever reads them need not load torch.
"""

import importlib
import importlib.util
import io
import pickle
import sys
from types import FunctionType, ModuleType
from typing import Any


def pack(value: Any, *, arrays: bool = False) -> bytes:
    """`value` as bytes for `unpack` in another process. arrays: turn the tensors in it into NumPy arrays."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, arrays)
    pickler.dump(value)
    return pickle.dumps((pickler.files, buffer.getvalue()))


def unpack(parcel: bytes) -> Any:
    """What `pack` was given; loads the modules it needs."""
    files, content = pickle.loads(parcel)
    for name, file in files.items():
        if name not in sys.modules:
            _load(name, file)
    return pickle.loads(content)


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, arrays: bool):
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.arrays = arrays
        self.files: dict[str, str] = {}  # module's name: its file

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type):
            file = getattr(sys.modules.get(value.__module__), "__file__", None)
            if file:
                self.files[value.__module__] = file
        elif self.arrays and isinstance(value, (torch := sys.modules["torch"]).Tensor):
            tensor = value.detach().cpu()
            return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().__reduce__()
        return NotImplemented


def _load(name: str, file: str) -> None:
    """Imports the module `name`; from `file` when the import path does not lead to that file."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # no such parent package
        spec = None
    if spec is not None and spec.origin == file:
        importlib.import_module(name)
        return
    parent = name
    while parent := parent.rpartition(".")[0]:
        sys.modules.setdefault(parent, ModuleType(parent))  # `import a.b.c` asks for a and a.b
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
