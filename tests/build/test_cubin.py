"""Cubins: flags, what ptxas and the ELF symbol table say, and what rules a variant out."""

from __future__ import annotations

import pytest

from tktune.build import commands
from tktune.build.facts import contradictions, elf_symbols, objections, ptxas_entries
from tktune.build.toolchain import Toolchain, nvcc_present
from tktune.core.build_spec import BuildSpec
from tktune.core.errors import ArtifactError

needs_nvcc = pytest.mark.skipif(
    not nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels"
)

KERNEL = """
extern "C" __global__ void reverse(float* p) {
    __shared__ float tile[64];
    tile[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = tile[63 - threadIdx.x] + TKT_BIAS;
}
"""

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    48 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 48 bytes cumulative stack size, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'probe' for 'sm_90a'
ptxas info    : Function properties for probe
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Function properties for device_function
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def cubin(sources, arch="sm_90a", text=KERNEL, **fields):
    unit = sources.write("kernel.cu", text)
    return BuildSpec("kernel", "cubin", unit, arch, {"TKT_BIAS": "1.0f"}, **fields)


def test_the_numbers_of_ptxas_are_read():
    entries = ptxas_entries(LOG)
    assert entries["k"] == {
        "stack_bytes": 48,
        "spill_store_bytes": 12,
        "spill_load_bytes": 16,
        "registers": 168,
        "barriers": 9,
        "static_smem_bytes": 1024,
    }
    assert entries["probe"]["registers"] == 10 and entries["probe"]["static_smem_bytes"] == 0
    assert entries["device_function"]["stack_bytes"] == 8


def test_spills_and_system_calls_rule_a_variant_out_unless_the_family_allows_them(sources):
    spilled = {"spill_store_bytes": 12, "spill_load_bytes": 16, "registers": 168, "syscalls": []}
    assert "spills registers (12 bytes stored" in objections(cubin(sources), spilled)
    assert objections(cubin(sources, facts={"allow_spills": 1}), spilled) == ""
    called = {**spilled, "spill_store_bytes": 0, "spill_load_bytes": 0, "syscalls": ["__cuda_syscall_x"]}
    assert "__cuda_syscall_x" in objections(cubin(sources), called)
    assert objections(cubin(sources, facts={"allow_syscalls": 1}), called) == ""


def test_a_formula_the_compiler_contradicts_is_told(sources):
    real = {"registers": 168, "static_smem_bytes": 1024, "stack_bytes": 0}
    agreed = {"registers": 168, "static_smem_bytes": 1024, "smem_bytes": 98304}
    assert contradictions(cubin(sources, facts=agreed), real) == ()
    wrong = cubin(sources, facts={"registers": 160, "static_smem_bytes": 2048})
    assert len(contradictions(wrong, real)) == 2


def test_the_command_of_a_cubin(sources, tmp_path):
    found = Toolchain("nvcc", tmp_path / "nvcc", "13", ("-gencode", "arch=compute_120a,code=sm_120a"))
    argv = commands.compile_argv(
        cubin(sources, "sm_120a", flags=("-maxrregcount=168",)), found, tmp_path / "o"
    )
    for word in ("-cubin", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-lineinfo", "-maxrregcount=168"):
        assert word in argv
    assert argv[argv.index("-gencode") + 1] == "arch=compute_120a,code=sm_120a"
    assert argv[argv.index("-Xptxas") + 1] == "-v"


def test_a_shared_artifact_of_a_cu_file_is_made_by_nvcc(sources):
    spec = BuildSpec("user", "shared", sources.write("user.cu", KERNEL), "sm_90a")
    assert commands.toolchain_kind(spec) == "nvcc"
    found = Toolchain("nvcc", sources.unit, "13", ())
    assert {"-shared", "-Bsymbolic"} <= set(commands.flags(spec, found))


def test_elf_symbols_are_read_and_damage_is_told(cache, sources, tmp_path):
    (outcome,) = cache.build([sources.spec(1)])
    assert "answer" in elf_symbols(outcome.artifact.path)
    content = outcome.artifact.path.read_bytes()
    for harm in (b"text", content[:200], content[: len(content) - 100]):
        (tmp_path / "bad").write_bytes(harm)
        with pytest.raises(ArtifactError):
            elf_symbols(tmp_path / "bad")


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_a_kernel_compiles_and_its_facts_are_stored(cache, sources, arch):
    (outcome,) = cache.build([cubin(sources, arch, facts={"static_smem_bytes": 256, "registers": 32})])
    assert outcome.ok, outcome.error_sentence
    facts = outcome.artifact.facts
    assert 1 <= facts["registers"] <= 32
    assert facts["static_smem_bytes"] == 256
    assert facts["spill_store_bytes"] == 0 and facts["syscalls"] == [] and "reverse" in facts["entries"]
    assert "reverse" in elf_symbols(outcome.artifact.path)
    assert outcome.mismatches == ()
    assert cache.find(outcome.digest).facts == facts


@needs_nvcc
def test_a_kernel_that_spills_is_rejected_and_not_compiled_again(cache, sources):
    text = 'extern "C" __global__ void spill(float* p) {\n float a[96];\n'
    text += (
        "#pragma unroll\n for (int i = 0; i < 96; ++i) a[i] = p[i * 32 + threadIdx.x];\n __syncthreads();\n"
    )
    text += "#pragma unroll\n for (int i = 0; i < 96; ++i) p[i * 32 + threadIdx.x] = a[95 - i] * a[(i * 7) % 96];\n}\n"
    spec = cubin(sources, text=text, flags=("-maxrregcount=24",))
    (outcome,) = cache.build([spec])
    assert outcome.rejected and outcome.artifact is None and "spills registers" in outcome.error_sentence
    (again,) = cache.build([spec])
    assert again.rejected and again.cached
    allowed = cubin(sources, text=text, flags=("-maxrregcount=24",), facts={"allow_spills": 1})
    (kept,) = cache.build([allowed])
    assert kept.ok and kept.cached


@needs_nvcc
def test_a_kernel_that_does_not_compile_gives_the_compilers_sentence(cache, sources):
    (outcome,) = cache.build([cubin(sources, text="__global__ void f() { return foo; }")])
    assert 'identifier "foo" is undefined' in outcome.error_sentence
