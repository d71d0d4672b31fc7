"""Kernels of CUDA graphs: which instruction each of them comes from."""

from __future__ import annotations

from collections import defaultdict

from ejkernel.ops.reporting.graph_kernels import GraphKernels, Instruction, in_order
from ejkernel.ops.reporting.xplane import TracedProgram, _add_line, _Event, _of_graphs

NORM, PRODUCT, ATTENTION = "norm", "product", "attention"


def _step(name: str, opcode: str = "fusion", label: str = "", data: bytes = b"") -> Instruction:
    return Instruction(name, opcode, label, data)


def test_the_kernel_of_a_fusion_has_its_name():
    """XLA writes an underscore for what a function's name cannot have."""
    found = GraphKernels([[_step("loop-add.1", label=NORM), _step("loop-add.2", label=PRODUCT)]])
    assert found.labels(["loop_add_1", "loop_add_2"]) == [NORM, PRODUCT]


def test_a_kernel_of_a_custom_call_stands_in_it_by_name():
    """Triton's and Mosaic's are in the call's own text."""
    calls = [
        _step("call.1", "custom-call", ATTENTION, b"... name = mha_forward ..."),
        _step("call.2", "custom-call", NORM, b"... name = row_sums ..."),
    ]
    assert GraphKernels([calls]).labels(["row_sums"]) == [NORM]


def test_kernels_without_a_name_take_that_of_the_instructions_between_their_neighbours():
    """A product of cuBLAS may be two kernels; a copy is told from work."""
    steps = [
        _step("fusion.1", label=NORM),
        _step("copy.1", "copy"),
        _step("gemm.1", "custom-call", PRODUCT),
        _step("fusion.2", label=NORM),
    ]
    kernels = ["fusion_1", "memcpy32_post", "nvjet_tile", "splitk_sum", "fusion_2"]
    assert GraphKernels([steps]).labels(kernels) == [NORM, "", PRODUCT, PRODUCT, NORM]


def test_as_many_kernels_as_instructions_go_in_order():
    """Two products one behind the other."""
    steps = [_step("a"), _step("g.1", "custom-call", PRODUCT), _step("g.2", "custom-call", ATTENTION), _step("b")]
    assert GraphKernels([steps]).labels(["a", "nvjet", "nvjet", "b"]) == ["", PRODUCT, ATTENTION, ""]


def test_where_the_order_does_not_decide_there_is_no_label():
    """Three kernels of two different calls."""
    steps = [_step("a"), _step("g.1", "custom-call", PRODUCT), _step("g.2", "custom-call", ATTENTION), _step("b")]
    assert GraphKernels([steps]).labels(["a", "nvjet", "nvjet", "nvjet", "b"]) == [""] * 5


def test_a_kernel_that_serves_two_equal_fusions_is_told_by_its_place():
    """XLA compiles one of them; the second has the first one's name."""
    steps = [_step("reduce.1", label=NORM), _step("add.1"), _step("reduce.2", label=ATTENTION), _step("add.2")]
    assert GraphKernels([steps]).labels(["reduce_1", "add_1", "reduce_1", "add_2"]) == [NORM, "", ATTENTION, ""]


def test_a_graph_is_a_stretch_of_the_computation_that_has_most_of_its_kernels():
    """Other computations have instructions of the same names."""
    body = [_step("add.1", label=NORM), _step("mul.1", label=NORM), _step("gemm.1", "custom-call", PRODUCT)]
    main = [_step("add.1"), _step("gemm.2", "custom-call", ATTENTION)]
    found = GraphKernels([main, body])
    assert found.labels(["add_1", "mul_1", "nvjet"]) == [NORM, NORM, PRODUCT]
    assert found.labels(["nvjet"]) == [""]


def test_instructions_come_in_the_order_of_the_schedule():
    """A list without a schedule is taken as it is."""
    first, second = _step("a"), _step("b")
    assert in_order({1: first, 2: second}, [2, 1, 9]) == [second, first]
    assert in_order({1: first, 2: second}, []) == [first, second]


def test_each_launch_of_a_graph_is_looked_at_by_itself():
    """A loop launches one several times; kernels that overlap keep all of their time."""
    program = TracedProgram(
        frozenset({"add_1"}), {}, GraphKernels([[_step("add.1", label=NORM), _step("gemm.1", "custom-call", PRODUCT)]])
    )
    ran = {("jit_step", "7"): program}
    events = [
        _Event(start, 10.0, "command_buffer_1", "jit_step", "7", launch, kernel)
        for start, launch, kernel in (
            (0.0, "1", "add_1"),
            (8.0, "1", "nvjet"),
            (30.0, "2", "add_1"),
            (38.0, "2", "nvjet"),
        )
    ]
    found: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    _add_line(_of_graphs(events, ran), "gpu", ran, found)
    assert found == {
        ("add_1", NORM, "jit_step", "gpu"): [1e-8, 1e-8],
        ("nvjet", PRODUCT, "jit_step", "gpu"): [1e-8, 1e-8],
    }
