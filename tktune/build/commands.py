"""The exact command line of each kind of artifact. Runs nothing."""

from __future__ import annotations

from pathlib import Path

from tktune.build.toolchain import Toolchain, ToolchainKind
from tktune.core.build_spec import BuildSpec

# Hidden visibility, -Bsymbolic and -fno-gnu-unique keep the variants loaded into one process apart.
_SHARED = (
    *("-O3", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-Bsymbolic"),
    *("-fno-gnu-unique", "-pthread", "-ffp-contract=fast"),
)
_CUBIN = ("-cubin", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-lineinfo", "-Xptxas", "-v")
_SHARED_NVCC = (
    *("-shared", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-lineinfo", "-Xptxas", "-v"),
    *("-cudart", "static", "-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-gnu-unique"),
    *("-Xlinker", "-Bsymbolic"),
)

SUFFIX = {"shared": ".so", "cubin": ".cubin"}


def toolchain_kind(spec: BuildSpec) -> ToolchainKind:
    """nvcc for cubins and for shared artifacts made of a .cu file, else g++."""
    return "nvcc" if spec.kind == "cubin" or spec.source.suffix == ".cu" else "g++"


def flags(spec: BuildSpec, toolchain: Toolchain) -> list[str]:
    """Every flag but defines, include folders and file names, in order."""
    shared = _SHARED if toolchain.kind == "g++" else _SHARED_NVCC
    return [*(_CUBIN if spec.kind == "cubin" else shared), *toolchain.flags, *spec.flags]


def compile_argv(spec: BuildSpec, toolchain: Toolchain, output: Path) -> list[str]:
    """The command that compiles `spec` into `output`; no shell, no environment of its own."""
    defines = [f"-D{name}={value}" for name, value in sorted(spec.defines.items())]
    includes = [word for folder in spec.include_dirs for word in ("-I", str(folder.resolve()))]
    source = str(spec.source.resolve())
    return [str(toolchain.path), *flags(spec, toolchain), *defines, *includes, source, "-o", str(output)]
