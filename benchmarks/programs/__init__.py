"""Whole programs that `program_gpu.py` tunes: each written once over operations that are plain JAX's or the library's."""

from __future__ import annotations

from . import decode, dense, moe, vit
from .program import Program

PROGRAMS: dict[str, Program] = {
    program.name: program for program in (dense.PROGRAM, moe.PROGRAM, decode.PROGRAM, vit.PROGRAM)
}
