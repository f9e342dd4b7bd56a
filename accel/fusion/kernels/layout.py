"""Row layouts: which (B, L, D) tensors the elementwise kernels can walk."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def refuse_rows(**tensors: Tensor) -> str:
    """Why the tensors cannot be walked row by row; empty if they can.

    The first must be (B, L, D) with rows that do not overlap; the others have its dtype and width
    and may be of size 1 in B or L. For these, eager's output is contiguous, as the kernels' is.
    """
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.dtype != first.dtype:
            return f"{name}: {tensor.dtype}, not {first.dtype}"
        if tensor.dim() != 3:
            return f"{name}: {tensor.dim()} dimensions, not 3"
        if tensor.shape[2] != first.shape[2] or any(
            size not in (1, full) for size, full in zip(tensor.shape[:2], first.shape[:2], strict=True)
        ):
            return f"{name}: shape {tuple(tensor.shape)} against {tuple(first.shape)}"
        if tensor.stride(2) != 1 or not _batch_is_outer(tensor):
            return f"{name}: strides {tensor.stride()}"
    return "" if _rows_are_distinct(first) else f"rows overlap: strides {first.stride()}"


def as_rows(tensor: Tensor) -> Tensor:
    """A contiguous (..., D) tensor of more than three dimensions as (1, rows, D); others as they are."""
    return tensor.view(1, -1, tensor.shape[-1]) if tensor.dim() > 3 and tensor.is_contiguous() else tensor


def row_strides(tensor: Tensor) -> tuple[int, int]:
    """(batch, row) strides in elements; 0 where the size is 1, so that the row is repeated."""
    batch, rows = tensor.shape[:2]
    return (0 if batch == 1 else tensor.stride(0)), (0 if rows == 1 else tensor.stride(1))


def head_strides(tensor: Tensor) -> tuple[int, int, int]:
    """Strides in elements of the first three of four dimensions; 0 where the batch is 1."""
    batch, second, third, _ = tensor.stride()
    return (0 if tensor.shape[0] == 1 else batch), second, third


def row_grid(shape: Sequence[int], block: int) -> tuple[int, int, int]:
    """One program per row and `block` columns of an output of shape (B, L, D): (L, D / block, B)."""
    batch, rows, width = shape
    return rows, -(-width // block), batch


def _rows_are_distinct(tensor: Tensor) -> bool:
    strides = zip(tensor.shape[:2], tensor.stride()[:2], strict=True)
    return all(size == 1 or stride >= tensor.shape[2] for size, stride in strides)


def _batch_is_outer(tensor: Tensor) -> bool:
    batch_stride, row_stride = row_strides(tensor)
    return batch_stride == 0 or batch_stride >= row_stride
