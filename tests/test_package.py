"""What people install: a pure Python wheel with the package alone in it, and an import that waits for nothing."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import outpace

ROOT = Path(__file__).parent.parent


def built_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_is_pure_and_holds_the_package_alone(tmp_path: Path) -> None:
    wheel = built_wheel(tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} <= {"outpace", f"outpace-{outpace.__version__}.dist-info"}
    assert "outpace/inject/policies/llama.py" in names
    assert "outpace/quality/text.txt" in names


@pytest.mark.slow
def test_item_19_the_wheel_has_types_and_says_where_it_comes_from(tmp_path: Path) -> None:
    archive = zipfile.ZipFile(built_wheel(tmp_path))
    assert "outpace/py.typed" in archive.namelist()
    told = archive.read(f"outpace-{outpace.__version__}.dist-info/METADATA").decode()
    assert "\nProject-URL: Homepage, https://" in told
    assert "\nClassifier: Programming Language :: Python :: 3.13\n" in told


def test_importing_outpace_does_not_import_torch() -> None:
    code = "import sys, outpace; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", outpace.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(outpace, name) is not None
    assert name in dir(outpace)
