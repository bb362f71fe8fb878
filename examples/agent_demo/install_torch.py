"""Install PyTorch for the CPU without several gigabytes of CUDA libraries.

On Linux the plain requirement `torch==X` resolves to a build that depends on the CUDA libraries, unless pip
is configured to find a CPU wheel first. The demo needs none of them, so this script asks pip what the plain
requirement would bring, and turns to PyTorch's own CPU index when the answer holds CUDA packages. A torch of
the right version that is installed already, CUDA build or not, is left alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_PACKAGE = re.compile(r"(nvidia|cuda)[-_]", re.IGNORECASE)


class InstallError(Exception):
    """pip failed; its own messages have been shown."""


def installed_version() -> str | None:
    """The version of the torch that this interpreter would import, or None."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfies(version: str | None, wanted: str) -> bool:
    """Whether `version` is `wanted`; a build label such as +cpu counts only where `wanted` names one."""
    if version is None:
        return False
    return version == wanted or version.partition("+")[0] == wanted


def cuda_packages(requirement: str) -> list[str]:
    """Names of the CUDA packages that the plain requirement would install; downloads metadata only.

    Raises: InstallError when pip cannot resolve the requirement.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet"]
    report = ["--dry-run", "--ignore-installed", "--report", "-"]
    result = subprocess.run([*command, *report, requirement], stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise InstallError(f"pip cannot resolve {requirement}")
    names = [item["metadata"]["name"] for item in json.loads(result.stdout)["install"]]
    return sorted(name for name in names if CUDA_PACKAGE.match(name))


def install(requirement: str, *options: str) -> None:
    command = [sys.executable, "-m", "pip", "install", *options, requirement]
    if subprocess.run(command, check=False).returncode != 0:
        raise InstallError(f"pip could not install {requirement}")


def ensure(requirement: str) -> None:
    """Install `requirement` (`torch==X`) if it is missing, in the build that brings no CUDA libraries."""
    version = installed_version()
    if satisfies(version, requirement.partition("==")[2]):
        print(f"torch {version} is installed already", flush=True)
        return
    print(f"Asking pip what {requirement} would bring here", flush=True)
    unwanted = cuda_packages(requirement)
    if not unwanted:
        print(f"Installing {requirement}, a build without CUDA libraries: about 200 MB", flush=True)
        install(requirement)
    else:
        print(
            f"The default build brings {len(unwanted)} CUDA packages (several GB). "
            f"Installing the CPU build from {CPU_INDEX} instead: about 200 MB",
            flush=True,
        )
        install(requirement, "--index-url", CPU_INDEX)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Install PyTorch without CUDA libraries.")
    parser.add_argument("requirement", help="pinned requirement, for example torch==2.13.0")
    options = parser.parse_args(argv)
    if not re.fullmatch(r"torch==[0-9][^\s,;]*", options.requirement):
        parser.error(f"expected torch==VERSION, found {options.requirement!r}")
    try:
        ensure(options.requirement)
    except InstallError as error:
        print(f"install_torch: {error}; see pip's messages above", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("install_torch: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
