"""Gives the wheel the tag of the machine and the Python that its extension is for."""

from setuptools import Distribution, setup


class WithExtension(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(distclass=WithExtension)
