"""Prints, as constraints for pip, the lowest versions that pyproject.toml admits of what runs and tests need.

Of torch it is the lowest CPU build that pip finds; where there is none, only a line on stderr is printed.
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu shows pip one of every release.
"""

import re
import subprocess
import sys

import tomllib


def numbers(version):
    return [int(part) for part in version.split(".")]


with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
requirements = project["dependencies"] + project["optional-dependencies"]["test"]
lowest = dict(re.match(r"([\w-]+).*?>=([\d.]+)", requirement).groups() for requirement in requirements)

pip = [sys.executable, "-m", "pip", "index", "versions", "torch"]
listed = subprocess.run(pip, capture_output=True, text=True).stdout.partition("INSTALLED")[0]
builds = re.findall(r"([\d.]+)\+cpu", listed)
builds = [build for build in builds if numbers(build) >= numbers(lowest["torch"])]
if builds:
    lowest["torch"] = min(builds, key=numbers) + "+cpu"
    print(*(f"{name}=={version}" for name, version in lowest.items()), sep="\n")
else:
    print("lowest versions: skipped, for pip finds no CPU build of torch here", file=sys.stderr)
