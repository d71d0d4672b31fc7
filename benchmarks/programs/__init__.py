"""Whole programs that `program_gpu.py` tunes: each is written once, over operations of plain JAX or the library."""

from __future__ import annotations

from . import decode, dense, moe, vit
from .program import Program

PROGRAMS: dict[str, Program] = {
    program.name: program for program in (dense.PROGRAM, moe.PROGRAM, moe.WHOLE, decode.PROGRAM, vit.PROGRAM)
}
