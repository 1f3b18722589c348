"""Builds ctrainer._C (always) and ctrainer._cuda (where nvcc is found)."""

import os
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

STRICT = ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wvla"]
EXACT = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
CFLAGS = ["-std=c11", "-O3", "-fvisibility=hidden", "-pthread", *STRICT, *EXACT]
CFLAGS += os.environ.get("CTRAINER_CFLAGS", "").split()
LDFLAGS = ["-pthread", *os.environ.get("CTRAINER_LDFLAGS", "").split()]
HEADERS = glob("csrc/*/*.h") + glob("csrc/*/*.def")


class BuildExt(build_ext):
    """Compiles the files of an extension side by side, and only those that changed."""

    def build_extension(self, ext: Extension) -> None:
        newest = max(os.path.getmtime(p) for p in [*ext.depends, "setup.py"])
        compile_one = self.compiler._compile

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
                jobs = [
                    pool.submit(compile_stale, o, *build[o], cc, extra, pp)
                    for o in objects
                ]
                for job in jobs:
                    job.result()
            return objects

        self.compiler.compile = compile_all
        super().build_extension(ext)


native = Extension(
    "ctrainer._C",
    sorted(glob("csrc/core/*.c") + glob("csrc/cpu/*.c") + glob("csrc/binding/*.c")),
    include_dirs=["csrc", numpy.get_include()],
    depends=HEADERS,
    extra_compile_args=CFLAGS,
    extra_link_args=LDFLAGS,
)

Path("build").mkdir(exist_ok=True)
setup(ext_modules=[native], cmdclass={"build_ext": BuildExt})
