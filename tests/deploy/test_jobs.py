"""Job files for Kubernetes, Slurm and SkyPilot: their form is valid, they start what there is, and no secret stands in them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from researcher.main import parser as researcher_parser
from swarm.main import parser as swarm_parser
from tests.deploy.images import ROOT, last, steps_of

DEPLOY = ROOT / "deploy"
GUIDE = (ROOT / "docs" / "guides" / "cluster.md").read_text()
VARIABLES = (ROOT / "docs" / "reference" / "commands.md").read_text().split("\n## Environment\n")[1]
MANIFESTS = [file for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")) if file.stem != "kustomization"]
SBATCH = sorted((DEPLOY / "slurm").glob("*.sbatch"))
SKY = sorted((DEPLOY / "skypilot").glob("*.yaml"))
SKYPILOT = "skypilot==0.14.1"
SECRET = re.compile(r"TOKEN|PASSWORD|API_KEY|DATABASE_URL")


def parsed(words: list[str]) -> None:
    """Raises: SystemExit for a command line that our programs do not take."""
    program = {"swarm": swarm_parser, "researcher": researcher_parser}[words[0]]()
    program.parse_args(words[1:])


def parsed_line(line: str) -> None:
    """The same for a line of a shell script. What the shell would put in is left to it."""
    line = re.sub(r"\$\([^)]*\)|\"?\$\w+\"?", "1", line.replace(' "$@"', ""))
    parsed(shlex.split(line))


# -- the guide --------------------------------------------------------------------------------------------------------

COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL) for line in block.splitlines()]


def test_the_guide_types_commands_and_names_files_that_there_are() -> None:
    ours = [line for line in COMMANDS if re.search(r"(^|[ :](cpu|--) )(researcher|swarm) ", line)]
    for line in ours:
        parsed_line(line[re.search(r"(researcher|swarm) (start|serve|list|doctor)", line).start() :])  # type: ignore[union-attr]
    assert len(ours) >= 6
    named = {name.rstrip("/.`") for name in re.findall(r"deploy/[\w./-]+", GUIDE)}
    assert {name for name in named if not (ROOT / name).exists()} <= {"deploy/researcher"}
    assert {str(file.relative_to(ROOT).parent) for file in [*MANIFESTS, *SBATCH, *SKY]} <= named


# -- Kubernetes -------------------------------------------------------------------------------------------------------

RESOURCES: list[dict[str, Any]] = [each for file in MANIFESTS for each in yaml.safe_load_all(file.read_text())]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for each in RESOURCES if each["kind"] == kind]


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(workload, pod template)"""
    for each in [*of_kind("Deployment"), *of_kind("StatefulSet")]:
        yield each, each["spec"]["template"]


def containers() -> list[dict[str, Any]]:
    return [container for _, pod in pods() for container in pod["spec"]["containers"]]


def test_the_manifests_keep_to_the_schemas_of_kubernetes() -> None:
    tool = Path(sys.executable).with_name("kubernetes-validate")
    checked = subprocess.run([tool, "--strict", *MANIFESTS], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("passed") + checked.stderr.count("passed") == len(RESOURCES)


def test_the_kustomization_names_every_manifest() -> None:
    kustomization = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == [file.name for file in MANIFESTS]
    ours = {each["name"] for each in kustomization["images"]}
    assert {each["image"].partition(":")[0] for each in containers()} - {"postgres"} == ours


def test_containers_run_images_that_there_are_and_commands_that_there_are() -> None:
    for container in containers():
        name, _, tag = container["image"].partition(":")
        if name == "postgres":
            continue
        assert (DEPLOY / "docker" / f"Dockerfile.{tag}").exists()
        if container["args"][0] != "mlflow":
            parsed(container["args"])


def test_mlflow_reads_the_variables_that_it_is_given() -> None:
    code = "from mlflow.cli import server; print(*[each.envvar for each in server.params if each.envvar])"
    read = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    (mlflow,) = [each for each in containers() if each["name"] == "mlflow"]
    assert {each["name"] for each in mlflow["env"]} - {"POSTGRES_PASSWORD"} <= read
    assert mlflow["args"] == ["mlflow", "server"]


def test_our_containers_get_variables_that_we_read() -> None:
    ours = [each for each in containers() if each.get("args", [""])[0] in ("swarm", "researcher")]
    names = {each["name"] for container in ours for each in container["env"]} - {"POSTGRES_PASSWORD"}
    assert {name for name in names if f"`{name}`" not in VARIABLES} == set()


def test_secrets_are_referenced_and_the_guide_makes_each_of_them() -> None:
    keys = set()
    for container in containers():
        for each in container["env"]:
            if "valueFrom" in each:
                reference = each["valueFrom"]["secretKeyRef"]
                assert reference["name"] == "swarm-researcher"
                keys.add(reference["key"])
            elif SECRET.search(each["name"]):
                assert "$(POSTGRES_PASSWORD)" in each["value"]
    assert of_kind("Secret") == []
    assert keys == set(re.findall(r"--from-literal=([\w-]+)=", GUIDE))


def test_services_find_their_pods_at_ports_that_they_open() -> None:
    for service in of_kind("Service"):
        (template,) = [
            pod for _, pod in pods() if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        opened = {
            port["containerPort"] for container in template["spec"]["containers"] for port in container.get("ports", ())
        }
        assert {port["port"] for port in service["spec"]["ports"]} <= opened
    for workload, pod in pods():
        assert workload["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
        if workload["kind"] == "StatefulSet":
            assert workload["spec"]["serviceName"] in {each["metadata"]["name"] for each in of_kind("Service")}


def test_addresses_between_pods_are_those_of_services() -> None:
    ports = {each["metadata"]["name"]: each["spec"]["ports"][0]["port"] for each in of_kind("Service")}
    values = [each["value"] for container in containers() for each in container["env"] if "value" in each]
    named = re.findall(r"(?:@|http://)([a-z-]+):(\d+)", "\n".join(values))
    assert named
    assert all(ports[host] == int(port) for host, port in named)


def test_pods_are_no_root_and_keep_their_state_on_volumes() -> None:
    claims = {each["metadata"]["name"] for each in of_kind("PersistentVolumeClaim")}
    home = last(steps_of(DEPLOY / "docker" / "Dockerfile.cuda"), "VOLUME").text
    for workload, pod in pods():
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        templates = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())}
        volumes = {each["name"]: each for each in pod["spec"].get("volumes", ())}
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"].keys() == {"requests", "limits"}
            mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            state = mounts.get(home, mounts.get("/var/lib/postgresql/data"))
            assert state is not None
            assert state in templates or volumes[state]["persistentVolumeClaim"]["claimName"] in claims


def test_a_swarm_server_has_a_gpu_and_shared_memory() -> None:
    ((_, pod),) = [each for each in pods() if each[0]["metadata"]["name"] == "swarm-server"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    (shared,) = [each for each in pod["spec"]["volumes"] if each["name"] == mounts["/dev/shm"]]
    assert shared["emptyDir"]["medium"] == "Memory"


# -- Slurm ------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+",
    "ntasks": r"\d+",
    "gpus": r"(\w+:)?\d+",
    "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]",
    "time": r"(\d+-)?\d\d:\d\d:\d\d",
    "signal": r"B:USR1@\d+",
    "requeue": "",
    "open-mode": "append|truncate",
    "output": r"[\w-]+%j\.log",
}
"""What we use of sbatch's options, and how their values look."""


@pytest.mark.parametrize("file", SBATCH, ids=lambda file: file.name)
def test_a_batch_script_is_bash_with_options_that_sbatch_knows(file: Path) -> None:
    subprocess.run(["bash", "-n", file], check=True)
    lines = file.read_text().splitlines()
    given = [line.split(maxsplit=1)[1] for line in lines if line.startswith("#SBATCH ")]
    for option in given:
        name, _, value = option.removeprefix("--").partition("=")
        assert re.fullmatch(OPTIONS[name], value), option
    code = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[code:]), "sbatch reads none after the first command"
    ours = re.findall(r"^\s*(?:.*\) )?((?:researcher|swarm) [^>&;\n]*)", "\n".join(lines[code:]), re.MULTILINE)
    assert ours
    for line in ours:
        parsed_line(line)


class Cluster:
    """Slurm, as far as a job sees it: variables, and an `scontrol` that notes what it was asked."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.requeued = place / "requeued"
        program = place / ".venv" / "bin"
        program.mkdir(parents=True)
        for name, does in {
            "researcher": f'exec "{sys.executable}" -m researcher.main "$@"',
            "swarm": f'exec "{sys.executable}" -m swarm.main "$@"',
            "scontrol": f'echo "$@" > "{self.requeued}"',
        }.items():
            (program / name).write_text(f"#!/bin/sh\n{does}\n")
            (program / name).chmod(0o755)
        self.environ = {
            "PATH": os.defpath,
            "HOME": str(place),
            "PYTHONPATH": str(ROOT),
            "SLURM_SUBMIT_DIR": str(place),
            "SLURM_JOB_ID": "7",
            "SWARM_PORT": "0",
            "SWARM_ADMIN_TOKEN": "a" * 32,
            "SWARM_CLIENT_TOKEN": "c" * 32,
        }

    def run(self, file: str, *arguments: str) -> subprocess.Popen[str]:
        with (self.place / "log").open("a") as log:
            return subprocess.Popen(
                ["bash", str(DEPLOY / "slurm" / file), *arguments],
                cwd=self.place,
                env=self.environ,
                text=True,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return (self.place / "log").read_text()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def wait_for(sign: Any, cluster: Cluster, job: subprocess.Popen[str], limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while not sign():
        assert job.poll() is None, cluster.said()
        assert time.monotonic() < deadline, cluster.said()
        time.sleep(0.1)


def test_a_server_whose_time_is_up_ends_in_order_and_queues_again(cluster: Cluster) -> None:
    job = cluster.run("server.sbatch", "echo", "--engine", "echo")
    wait_for(lambda: (cluster.place / "swarm-state" / "job-7" / "server.json").exists(), cluster, job)
    assert (cluster.place / "server-7.url").read_text().startswith("http://")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 0, cluster.said()
    assert cluster.requeued.read_text() == "requeue 7\n"
    assert not (cluster.place / "swarm-state" / "job-7" / "server.json").exists()


@pytest.mark.campaign
def test_a_study_whose_time_is_up_rests_and_its_job_goes_on_with_it(cluster: Cluster) -> None:
    (cluster.place / "study.yaml").write_text(
        "question: Does a higher learning rate help?\ninstrument: arithmetic\nsteps: 6\nseeds: {min: 2, max: 2}\n"
        "compare: {learning_rate: {baseline: 1.0e-5, levels: [4.0e-5]}}\nset: {tasks_per_step: 2, group_size: 4}\n"
    )
    home = cluster.place / "researcher-home" / "job-7"

    def trials() -> set[str]:
        shown = subprocess.run(
            [cluster.place / ".venv/bin/researcher", "status", "--json"],
            env=cluster.environ | {"RESEARCHER_HOME": str(home)},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        return {each["status"] for each in json.loads(shown)["trials"]} if shown.startswith("{") else set()

    job = cluster.run("study.sbatch", "study.yaml", "--engine", "echo")
    wait_for(lambda: "running" in trials(), cluster, job)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(200) == 0, cluster.said()
    assert cluster.requeued.read_text() == "requeue 7\n"
    assert "done" not in cluster.said().splitlines()[-1]
    cluster.requeued.unlink()
    again = cluster.run("study.sbatch", "study.yaml", "--engine", "echo")
    assert again.wait(300) == 0, cluster.said()
    assert not cluster.requeued.exists()
    assert trials() == {"done"}, cluster.said()


# -- SkyPilot ---------------------------------------------------------------------------------------------------------

KEYS = {"name", "resources", "workdir", "envs", "secrets", "setup", "run"}
RESOURCE_KEYS = {"accelerators", "cpus", "memory", "disk_size", "ports"}


@pytest.mark.parametrize("file", SKY, ids=lambda file: file.name)
def test_a_skypilot_task_uses_known_keys_and_starts_what_there_is(file: Path) -> None:
    """SkyPilot itself is not installed here: `test_skypilot_takes_the_tasks` asks it."""
    task = yaml.safe_load(file.read_text())
    assert task.keys() <= KEYS
    assert task["resources"].keys() <= RESOURCE_KEYS
    assert not any(task["secrets"].values())
    assert not any(SECRET.search(name) for name in task["envs"])
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    for line in re.findall(r"\.venv/bin/((?:researcher|swarm) [^>&;\n]*)", task["run"]):
        parsed_line(line)


@pytest.mark.campaign
def test_skypilot_takes_the_tasks(tmp_path: Path) -> None:
    """By its own reading of the files, in an environment of its own (0.5 GB)."""
    venv.EnvBuilder(with_pip=True, symlinks=True).create(tmp_path / "sky")
    python = tmp_path / "sky" / "bin" / "python"
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", SKYPILOT], capture_output=True, text=True, check=False
    )
    if installed.returncode:
        pytest.skip(f"SkyPilot cannot be installed here: {installed.stderr.splitlines()[-1]}")
    code = (
        "import sys, sky, yaml\n"
        "for file in sys.argv[1:]:\n"
        "    task = yaml.safe_load(open(file))\n"
        "    task['secrets'] = {name: 'given' for name in task['secrets']}\n"
        "    print(sky.Task.from_yaml_config(task).name)\n"
    )
    environ = {"HOME": str(tmp_path), "PATH": os.defpath, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    taken = subprocess.run(
        [python, "-c", code, *SKY], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert taken.returncode == 0, taken.stderr
    assert taken.stdout.split() == [file.stem for file in SKY]
