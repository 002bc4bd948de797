"""docs/deploy.md and the files under deploy/ say what is true: flags and routes exist, times fit together."""

import configparser
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from outpace.deploy.plan import CLOSING
from outpace.server.exit_codes import CUT_OFF, WRONG_OPTION
from outpace.server.guard import OPEN
from outpace.server.options import ServerConfig
from outpace.server.placeholder import LIVE
from tests.cli.command import run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy"
GUIDE = (ROOT / "docs/deploy.md").read_text()
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    for line in block.splitlines()
]
OURS = [command for command in COMMANDS if command.startswith("outpace ")]
DOCKERFILE = (FOLDER / "docker/Dockerfile").read_text()


def flags_of(command: str) -> set[str]:
    return set(re.findall(r"--[\w-]+", run(command, "--help").stdout))


def used(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    return {name: flags_of(name) for name in ("serve", "deploy")}


@pytest.mark.parametrize("command", OURS)
def test_commands_of_the_guide_have_the_flags_they_use(command: str, known: dict[str, set[str]]) -> None:
    _, name, *words = shlex.split(command)
    assert used(words) <= known[name]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_guide_parse_and_name_files_that_exist(command: str) -> None:
    words = shlex.split(command)
    assert words[0] in ("outpace", "python3", "pip", "useradd", "cp", "systemctl", "docker", "kubectl")
    for word in words:
        if word.startswith("deploy/"):
            assert (ROOT / word).exists()


def test_the_guide_uses_each_way_to_run() -> None:
    assert {command.split()[1] for command in OURS} == {"serve", "deploy"}
    for name in re.findall(r"\]\(([^)#]+)\)", GUIDE):
        assert (ROOT / "docs" / name).resolve().exists(), name


def test_flags_that_the_guide_promises_are_there(known: dict[str, set[str]]) -> None:
    ray = GUIDE.split("## Ray Serve")[1].split("## Docker")[0]
    promised = set(re.findall(r"`(--[\w-]+)", ray)) - {"--ssl-"}
    assert len(promised) > 20
    assert promised <= known["deploy"]


# Kubernetes


def documents() -> Iterator[tuple[str, Any]]:
    for path in sorted((FOLDER / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    found = {document["kind"]: document for _, document in documents()}
    assert set(found) == {"Deployment", "Service", "PersistentVolumeClaim"}
    return found


@pytest.fixture(scope="module")
def pod(kinds: dict[str, Any]) -> Any:
    return kinds["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: Any) -> Any:
    (only,) = pod["containers"]
    return only


def option(container: Any, name: str) -> str:
    return next(each.partition("=")[2] for each in container["args"] if each.startswith(f"--{name}="))


def test_the_container_is_started_with_flags_that_exist(container: Any, known: dict[str, set[str]]) -> None:
    command, model, *flags = container["args"]
    assert command == "serve"
    assert not model.startswith("-")
    assert all(flag.startswith("--") for flag in flags)
    assert used(flags) <= known["serve"]


def test_probes_ask_routes_that_exist_and_need_no_key(container: Any) -> None:
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {probe["path"] for probe in probes.values()} <= OPEN
    assert probes["liveness"]["path"] == LIVE, "the one route that answers while the model loads"
    assert probes["startup"]["path"] == probes["readiness"]["path"] == "/health/ready"


def test_probes_and_service_use_the_port_that_the_server_listens_on(container: Any, kinds: dict[str, Any]) -> None:
    (port,) = container["ports"]
    assert int(option(container, "port")) == port["containerPort"]
    names = {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")}
    assert names | {kinds["Service"]["spec"]["ports"][0]["targetPort"]} == {port["name"]}


def test_a_pod_lives_as_long_as_its_drain(pod: Any, container: Any) -> None:
    (_, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    drain = float(option(container, "shutdown-timeout"))
    assert pod["terminationGracePeriodSeconds"] >= float(seconds) + drain + CLOSING


def test_the_service_finds_the_pods_and_the_pods_their_volumes(kinds: dict[str, Any], pod: Any, container: Any) -> None:
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"].items() <= labels.items()
    assert kinds["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == kinds["PersistentVolumeClaim"]["metadata"]["name"]
    places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert option(container, "api-key-file").startswith(places["keys"])
    assert f"OUTPACE_CACHE={places['cache']}/" in DOCKERFILE


def test_nobody_is_root(pod: Any) -> None:
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user) > 0


# Docker


def test_the_image_copies_what_exists_and_starts_the_server(known: dict[str, set[str]]) -> None:
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE):
        *names, _ = line.split()
        assert all((ROOT / name).exists() for name in names)
    (command,) = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    name, *flags = yaml.safe_load(command)
    assert used(flags) <= known[name]
    (port,) = re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE)
    assert flags[flags.index("--port") + 1] == port
    (path,) = re.findall(rf"http://127.0.0.1:{port}(/[\w/]+)", DOCKERFILE)
    assert path in OPEN


def test_the_image_has_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (given,) = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)
    assert set(given.split(",")) <= set(extras)
    for named in re.findall(r"outpace\[([\w,]+)\]", GUIDE):
        assert set(named.split(",")) <= set(extras)


# systemd


@pytest.fixture(scope="module")
def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((FOLDER / "systemd/outpace.service").read_text())
    return parser["Service"]


def test_the_unit_starts_the_server_with_flags_that_exist(
    unit: configparser.SectionProxy, known: dict[str, set[str]]
) -> None:
    _, name, *flags = shlex.split(unit["ExecStart"])
    assert name == "serve"
    assert used(flags) <= known["serve"]
    assert float(unit["TimeoutStopSec"]) > float(flags[flags.index("--shutdown-timeout") + 1])


def test_the_unit_knows_the_exit_codes(unit: configparser.SectionProxy) -> None:
    assert (int(unit["RestartPreventExitStatus"]), int(unit["SuccessExitStatus"])) == (WRONG_OPTION, CUT_OFF)
    assert int(unit["LimitNOFILE"]) > ServerConfig().max_connections
