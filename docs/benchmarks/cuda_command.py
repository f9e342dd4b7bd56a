"""The command line of benchmarks that need a CUDA device."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch


def out_folder(doc: str) -> Path:
    """The only argument. Ends the program after `--help`, a wrong argument, or without a CUDA device.

    doc: of the script; its first line stands in the help.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT_FOLDER")
    out: Path = parser.parse_args().out
    require_cuda(parser)
    return out


def require_cuda(parser: argparse.ArgumentParser) -> None:
    """End the program of this command line where there is no CUDA device."""
    if not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog} needs a CUDA device; this machine has none.\n")
