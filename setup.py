"""Builds ctrainer._C (always) and ctrainer._cuda (where nvcc is found).

CTRAINER_CUDA         auto (the default): build _cuda if nvcc works, else say why not
                      and go on; 0: don't; 1: fail if it cannot be built
CTRAINER_CUDA_ARCHS   compute capabilities to compile for, "75;80;...": see ARCHS
CTRAINER_CFLAGS, CTRAINER_LDFLAGS   more flags for C; without the latter the extension
                      is stripped
NVCC                  the compiler; else PATH, /usr/local/cuda, NVIDIA's wheels
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, OptionError

STRICT = ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wvla"]
EXACT = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# Python's own flags ask for debug information: it takes a third of the time and most
# of the file.
CFLAGS = ["-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-pthread", *STRICT, *EXACT]
CFLAGS += os.environ.get("CTRAINER_CFLAGS", "").split()
LDFLAGS = ["-pthread", *os.environ.get("CTRAINER_LDFLAGS", "-s").split()]
HEADERS = [*glob("csrc/**/*.h", recursive=True), *glob("csrc/**/*.def", recursive=True)]
HEADERS += ["setup.py"]

# Machine code for each; PTX of the first, which any other GPU compiles for itself.
ARCHS = os.environ.get("CTRAINER_CUDA_ARCHS", "75;80;86;89;90;100;120").split(";")
NVCC_FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-compress-mode=size"]
NVCC_FLAGS += ["--threads=0"]  # the architectures side by side
NVCC_HOST = "-fPIC,-fvisibility=hidden,-ffp-contract=off"
NVCC_HOST += ",-fno-exceptions,-fno-rtti,-fno-threadsafe-statics"  # no libstdc++
OLDEST_NVCC = 13
# Files of the core that both modules have.
SHARED = [
    f"csrc/core/{name}.c"
    for name in (
        *("base/alloc", "base/status", "base/wait"),
        *("comm/comm", "device/update"),
    )
]


def why_not_here() -> str | None:
    """What this machine or its Python is, where ctrainer is not built for it."""
    if sys.platform != "linux":
        return f"this is {sys.platform}, and ctrainer is built for Linux alone"
    if sys.maxsize < 2**32:
        return "this Python has 32 bits, and ctrainer is built for 64"
    if sys.implementation.name != "cpython":
        return f"this is {sys.implementation.name}, and ctrainer is built for CPython"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this Python has no GIL, under which ctrainer has not been tested"
    return None


class Nvcc:
    """A compiler for CUDA, and where its headers and libraries are."""

    def __init__(self, command: str) -> None:
        self.command = command
        version = re.search(r"release (\d+)\.", self.output("--version"))
        if version is None or int(version[1]) < OLDEST_NVCC:
            found = version[1] if version else "something unknown"
            raise CompileError(
                f"{command} is of CUDA {found}; {OLDEST_NVCC} or newer is needed"
            )
        top = re.search(r"TOP=(\S+)", self.output("--dryrun", "-c", "none.cu"))
        home = Path(top[1] if top else Path(command).parent.parent).resolve()
        self.include = self.folder_of("cuda_runtime_api.h", home, "include")
        self.library = self.folder_of("libcudart_static.a", home, "lib64", "lib")

    def output(self, *args: str) -> str:
        try:
            done = subprocess.run(
                [self.command, *args], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise CompileError(f"cannot run {self.command}: {error}") from error
        return done.stdout + done.stderr

    def folder_of(self, file: str, home: Path, *folders: str) -> str:
        looked = [p for f in folders for p in (home / f, *home.glob(f"targets/*/{f}"))]
        for folder in looked:
            if (folder / file).exists():
                return str(folder)
        raise CompileError(f"{self.command} has no {file} below {home}")

    def compile(self, source: str, obj: str, includes: list[str]) -> None:
        code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHS]
        code.append(f"-gencode=arch=compute_{ARCHS[0]},code=compute_{ARCHS[0]}")
        command = [self.command, *NVCC_FLAGS, *code, "-Xcompiler", NVCC_HOST]
        command += [*(f"-I{i}" for i in includes), "-c", source, "-o", obj]
        print(" ".join(command))
        Path(obj).parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        sys.stderr.write(done.stdout + done.stderr)
        if done.returncode != 0:
            raise CompileError(f"nvcc failed on {source}:\n{done.stderr[-2000:]}")


def find_nvcc() -> str | None:
    """$NVCC, the one in PATH, the usual place, or the one in NVIDIA's wheels."""
    given = os.environ.get("NVCC")
    if given:
        return given
    usual = ["/usr/local/cuda/bin", *(f"{p}/nvidia/cu13/bin" for p in sys.path if p)]
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(usual))


class BuildExt(build_ext):
    """Compiles the files of an extension side by side, and only those that changed."""

    nvcc: Nvcc | None = None

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:  # pip's folder is temporary: `make ext` compiles no more
            platform = f"{self.plat_name}-{sys.implementation.cache_tag}"
            self.build_temp = os.path.join("build", f"temp.{platform}")

    def build_extensions(self) -> None:
        self.compiler.src_extensions = [*self.compiler.src_extensions, ".cu"]
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        if ext is not cuda:
            self.build_changed(ext)
            return
        try:
            self.nvcc = Nvcc(find_nvcc() or "nvcc")
            ext.include_dirs.append(self.nvcc.include)
            ext.extra_link_args.insert(0, f"-L{self.nvcc.library}")
            self.build_changed(ext)
        except CCompilerError as error:
            if ext.optional:
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
                line = "*" * 78
                self.warn(
                    f"\n{line}\nctrainer is built WITHOUT its CUDA plugin: {error}\n"
                    f"CTRAINER_CUDA=1 makes this an error, 0 leaves CUDA out.\n{line}"
                )
            raise

    def build_changed(self, ext: Extension) -> None:
        newest = max(os.path.getmtime(p) for p in ext.depends)
        compile_c = self.compiler._compile

        def compile_one(obj: str, src: str, *rest: object) -> None:
            if src.endswith(".cu"):
                assert self.nvcc is not None
                self.nvcc.compile(src, obj, ext.include_dirs)
            else:
                compile_c(obj, src, *rest)

        def compile_stale(obj: str, src: str, *rest: object) -> None:
            made = os.path.getmtime(obj) if os.path.exists(obj) else 0.0
            if self.force or made < max(newest, os.path.getmtime(src)):
                compile_one(obj, src, *rest)

        def compile_all(
            sources, output_dir=None, macros=None, include_dirs=None, debug=0,
            extra_preargs=None, extra_postargs=None, depends=None,
        ):  # fmt: skip
            macros, objects, extra, pp, build = self.compiler._setup_compile(
                output_dir, macros, include_dirs, sources, depends, extra_postargs
            )
            cc = self.compiler._get_cc_args(pp, debug, extra_preargs)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                jobs = [  # the last files, of kernels, take longest
                    pool.submit(compile_stale, o, *build[o], cc, extra, pp)
                    for o in reversed(objects)
                ]
                for done, job in enumerate(jobs, 1):
                    job.result()
                    if sys.stdout.isatty():
                        end = "\n" if done == len(jobs) else ""
                        print(f"\r    {done} of {len(jobs)} files", end=end, flush=True)
            return objects

        self.compiler.compile = compile_all
        super().build_extension(ext)


def cuda_wanted() -> bool:
    choice = os.environ.get("CTRAINER_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise OptionError(f"CTRAINER_CUDA must be auto, 0 or 1, got {choice!r}")
    return choice == "1" or (choice == "auto" and find_nvcc() is not None)


native = Extension(
    "ctrainer._C",
    sorted(glob("csrc/**/*.c", recursive=True)),
    include_dirs=["csrc", numpy.get_include()],
    depends=HEADERS,
    extra_compile_args=CFLAGS,
    extra_link_args=LDFLAGS,
)
# The runtime is linked in and its symbols hidden, so that they meet no other copy. One
# file serves every Python from 3.11 on.
cuda = Extension(
    "ctrainer._cuda",
    sorted(glob("cuda/*.c") + glob("cuda/*.cu")) + SHARED,
    include_dirs=["csrc"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    depends=[*HEADERS, *glob("cuda/*.h"), *glob("cuda/*.cuh"), "cuda/exports.map"],
    extra_compile_args=CFLAGS,
    extra_link_args=[
        *("-lcudart_static", "-ldl", "-lrt"),
        "-Wl,--version-script=cuda/exports.map",
        *LDFLAGS,
    ],
    optional=os.environ.get("CTRAINER_CUDA", "auto") == "auto",
)

why = why_not_here()
if why is not None:
    sys.exit(f"ctrainer cannot be built: {why} (docs/start/install.md)")
Path("build").mkdir(exist_ok=True)
setup(
    ext_modules=[native, cuda] if cuda_wanted() else [native],
    cmdclass={"build_ext": BuildExt},
)
