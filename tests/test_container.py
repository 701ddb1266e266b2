"""The container's files agree with each other, with the package and with the guide. Nothing is built."""

import re
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from .docs.reading import blocks
from .test_package import FILES, FOLDERS, PROJECT

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
GUIDE = ROOT / "docs" / "guide" / "containers.md"


def targets(mounts: list[str]) -> set[str]:
    """The folders of a container that mounts, such as "runs:/work:ro", put something at."""
    return {re.split(r":(?=/)", mount)[1].partition(":")[0] for mount in mounts}


def test_the_context_has_what_the_wheel_is_built_from():
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(kept) == {*FILES, *FOLDERS}


def test_the_torch_of_the_image_is_one_that_the_package_takes():
    version = re.search(r"^ARG TORCH=torch==(\S+)$", DOCKERFILE, re.MULTILINE)
    assert version is not None
    (needed,) = (one for one in map(Requirement, PROJECT["project"]["dependencies"]) if one.name == "torch")
    assert needed.specifier.contains(Version(version[1]))


def test_every_folder_of_the_image_is_mounted_and_in_the_guide():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    mounted = targets(services["train"]["volumes"])
    assert targets(services["tui"]["volumes"]) == mounted
    volumes = re.search(r"^VOLUME \[(.+)\]$", DOCKERFILE, re.MULTILINE)
    assert volumes is not None and set(re.findall('"(.+?)"', volumes[1])) < mounted
    assert set(re.findall(r"^\| `(/\S+)` \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)) == mounted
    run = next(block.text for block in blocks(GUIDE) if "docker run" in block.text)
    assert targets(re.findall(r'-v "(.+?)"', run)) < mounted
    assert services["train"]["ulimits"] == {"memlock": -1} and "--ulimit memlock=-1" in run
