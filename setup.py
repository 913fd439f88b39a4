"""Put what a project is made of into the wheel, as zerofit/project/; pyproject.toml describes the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("recipes", "deepspeed_configs", "launchers", "examples")


class BuildWithProject(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # an editable installation finds them in the checkout
            return
        project = Path(self.build_lib) / "zerofit" / "project"
        shutil.rmtree(project, ignore_errors=True)
        for name in FOLDERS:
            shutil.copytree(name, project / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        shutil.copy("Makefile", project)


setup(cmdclass={"build_py": BuildWithProject})
