"""What CI and scripts/test do about the browser that the tests of the page need."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The two scripts, with stand-ins for all that they call; `bin` is the whole PATH."""
    for name in (".ci/run", "scripts/test"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    write(tmp_path / "scripts/check", "echo checked")
    write(tmp_path / "scripts/setup.sh", 'say() { echo "$*"; }; ready() { :; }')
    for name, does in {"id": "echo 0", "pytest": "echo tested", "dirname": 'exec /usr/bin/dirname "$@"'}.items():
        write(tmp_path / "bin" / name, does)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def ci(clone: Path) -> str:
    """What CI says; it must not fail."""
    shutil.copy("/bin/bash", clone / "bin/bash")
    done = subprocess.run(
        ["/bin/bash", ".ci/run"],
        cwd=clone,
        env={"PATH": str(clone / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "checked" in done.stdout
    assert "tested" in done.stdout
    return done.stdout + done.stderr


def test_item_14_ci_installs_a_browser(clone: Path) -> None:
    write(
        clone / "bin/apt-get", f'echo "$*" >>{clone}/asked; [ "$1" = update ] || /bin/cp /bin/true {clone}/bin/chromium'
    )
    assert "skipped" not in ci(clone)
    assert (clone / "asked").read_text().splitlines() == ["update -qq", "install -y -qq chromium"]
    ci(clone)
    assert len((clone / "asked").read_text().splitlines()) == 2, "it is there"


@pytest.mark.parametrize("apt", ["fails", "is not there"])
def test_item_14_without_a_browser_one_line_says_how_to_get_it(clone: Path, apt: str) -> None:
    if apt == "fails":
        write(clone / "bin/apt-get", "exit 100")
    said = ci(clone)
    assert [line for line in said.splitlines() if "apt-get install chromium" in line] == [
        "tests of the page are skipped: there is no Chromium (Debian: apt-get install chromium)"
    ]
    assert ("could not install" in said) == (apt == "fails")
