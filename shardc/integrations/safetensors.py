"""Reads slices of tensors from safetensors files, and writes such files one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, product
from pathlib import Path

import torch
from safetensors import safe_open

from shardc.errors import InputError
from shardc.runtime.sharded_init import Lazy

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Maps the name of each tensor of a checkpoint to a `Lazy` that reads it; InputError if files are missing."""
    if (folder / SINGLE).is_file():
        files = [folder / SINGLE]
    elif (folder / INDEX).is_file():
        files = [folder / name for name in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))]
    else:
        raise InputError(
            f"{folder} is no folder with {SINGLE} or {INDEX}",
            fix="pass a folder of safetensors files; huggingface_hub.snapshot_download(name) fetches one",
        )
    for file in files:
        if not file.is_file():
            raise InputError(f"{folder / INDEX} lists {file.name}, which is not there", fix="fetch the folder again")
    return {name: tensor for file in files for name, tensor in _read_file(file)}


def _read_file(path: Path) -> Iterator[tuple[str, Lazy]]:
    """Yields (name, `Lazy`) for each tensor of a safetensors file. A `Lazy` reads elements from the file when they
    are needed.
    """
    file = safe_open(path, framework="pt")
    for name in file.keys():
        piece = file.get_slice(name)
        meta = torch.empty(piece.get_shape(), dtype=_DTYPES[piece.get_dtype()], device="meta")
        yield name, Lazy(meta, lambda index, name=name, meta=meta: _read(file, name, meta, index))  # type: ignore[misc]


def _read(file: safe_open, name: str, meta: torch.Tensor, index: tuple[Sequence[int], ...]) -> torch.Tensor:
    """Reads the elements of a tensor at ``index``, a sequence of indices per dim; one contiguous box at a time."""
    if not index:
        return file.get_tensor(name)
    if not all(map(len, index)):
        return torch.empty([len(indices) for indices in index], dtype=meta.dtype)
    piece, runs = file.get_slice(name), [list(_runs(indices)) for indices in index]
    if all(len(run) == 1 for run in runs):
        return piece[tuple(source for ((source, _),) in runs)]
    out = torch.empty([len(indices) for indices in index], dtype=meta.dtype)
    for pairs in product(*runs):
        out[tuple(target for _, target in pairs)] = piece[tuple(source for source, _ in pairs)]
    return out


def _runs(indices: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Splits ``indices`` into runs of consecutive numbers. Yields for each run (its slice of the tensor, its slice of
    ``indices``).
    """
    if isinstance(indices, range):
        yield slice(indices.start, indices.stop), slice(0, len(indices))
        return
    first = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield slice(indices[first], indices[at - 1] + 1), slice(first, at)
            first = at


def write_file(path: Path | None, tensors: Mapping[str, Lazy]) -> None:
    """Writes ``tensors`` to a safetensors file, one in memory at a time. With path None it only reads them, since
    reading is a collective that all ranks join.
    """
    if path is None:
        for tensor in tensors.values():
            tensor.value()
        return
    sizes = [tensor.numel() * tensor.itemsize for tensor in tensors.values()]
    ends = list(accumulate(sizes))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for (name, tensor), size, end in zip(tensors.items(), sizes, ends, strict=True):
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end - size, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.value().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def forget(folder: Path, keep: Iterable[str]) -> None:
    """Deletes an earlier checkpoint's single file and index (`SINGLE`, `INDEX`) from ``folder``, except names in
    ``keep``. Readers would otherwise load these instead of the new files.
    """
    for name in {SINGLE, INDEX} - set(keep):
        with suppress(FileNotFoundError):
            (folder / name).unlink()
