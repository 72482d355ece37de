"""Pods as processes: applies Deployments and ConfigMaps on one machine.

Each container of a pod template becomes a process. Volumes become directories, and a path under a container's
mountPath, in its env or command, becomes the path of that directory. Processes are leaders of their own sessions,
which end with them, as a container does with its first process; all die with this process whatever kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from disagg_operator.children import Object
from disagg_operator.yaml_text import dump

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class LocalError(Exception):
    """A process of a pod did not do what it should; the message has the end of its log."""


@dataclass
class Container:
    """A running container."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        """Process id, also that of its session."""
        return self.process.pid

    def tail(self, lines: int = 5) -> str:
        """End of its log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""


@dataclass
class Pod:
    """A running pod.

    Attributes:
        volumes: directory of each volume.
    """

    name: str
    uid: str
    role: str
    volumes: dict[str, Path]
    containers: dict[str, Container] = field(default_factory=dict)


class LocalCluster:
    """Runs pods.

    Args:
        state: directory for objects and logs, kept after the run.
        scratch: directory for sockets; short, because a socket's path has at most 107 bytes.

    Raises:
        LocalError: the state directory cannot be used, or another run uses it.
    """

    def __init__(self, state: Path, scratch: Path) -> None:
        self._state = state
        self.scratch = scratch
        self.pods: list[Pod] = []
        self._lock = _lock(state)
        self._ends: set[asyncio.Task[None]] = set()
        self._reaper = _start_reaper()
        self._tell_reaper(str(scratch))
        for old in [*state.glob("*.yaml"), *state.glob("*.json*"), state / "configmaps", state / "logs"]:
            _remove(old)

    def apply_object(self, item: Object) -> Path:
        """Write an object as YAML, a ConfigMap's data as files besides; where the YAML is."""
        name = item["metadata"]["name"]
        self._state.mkdir(parents=True, exist_ok=True)
        path = self._state / f"{item['kind'].lower()}-{name}.yaml"
        path.write_text(dump([item]))
        if item["kind"] == "ConfigMap":
            folder = self._config_map(name)
            folder.mkdir(parents=True, exist_ok=True)
            for key, text in item["data"].items():
                (folder / key).write_text(text)
        return path

    def create_pods(self, deployment: Object) -> list[Pod]:
        """Pods of a Deployment, their volumes made, no container started yet."""
        template = deployment["spec"]["template"]
        made = []
        for number in range(deployment["spec"]["replicas"]):
            name = f"{deployment['metadata']['name']}-{number}"
            folder = self.scratch / f"{len(self.pods)}"
            volumes: dict[str, Path] = {}
            for volume in template["spec"].get("volumes", []):
                if "configMap" in volume:
                    volumes[volume["name"]] = self._config_map(volume["configMap"]["name"])
                else:
                    volumes[volume["name"]] = folder / volume["name"]
                    volumes[volume["name"]].mkdir(parents=True)
            pod = Pod(name, str(uuid4()), template["metadata"]["labels"]["disagg.dev/role"], volumes)
            self.pods.append(pod)
            made.append(pod)
        return made

    async def start(self, pod: Pod, container: Object, extra_env: Mapping[str, str]) -> Container:
        """Start one container of a pod.

        Raises:
            LocalError: its command is not on this machine.
        """
        mounts = {mount["mountPath"]: str(pod.volumes[mount["name"]]) for mount in container.get("volumeMounts", [])}
        command = [_translate(word, mounts) for word in [*container["command"], *container.get("args", [])]]
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        program = shutil.which(command[0], path=search)
        if program is None:
            raise LocalError(f"pod {pod.name}: command {command[0]!r} is not installed")
        env = {**os.environ, **extra_env}
        for entry in container.get("env", []):
            value = _env_value(entry, pod)
            if value is not None:
                env[entry["name"]] = _translate(value, mounts)
        logs = self._state / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        path = logs / f"{pod.name}-{container['name']}.log"
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                program,
                *command[1:],
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._tell_reaper(f"+{process.pid}")
        started = Container(container["name"], process, path)
        pod.containers[started.name] = started
        end = asyncio.create_task(self._end_session(process))
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)
        return started

    async def stop(self, grace: float = 5.0) -> None:
        """End every process: engines before agents, politely, then not."""
        running = [
            container
            for pod in self.pods
            for container in reversed(pod.containers.values())
            if container.process.returncode is None
        ]
        for container in running:
            _signal(container, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await asyncio.gather(*(container.process.wait() for container in running))
        for container in running:
            if container.process.returncode is None:
                _signal(container, signal.SIGKILL)
                await container.process.wait()
        await asyncio.gather(*self._ends)
        if self._reaper.stdin is not None:
            self._reaper.stdin.close()
        await asyncio.to_thread(self._reaper.wait)
        os.close(self._lock)

    async def _end_session(self, process: asyncio.subprocess.Process) -> None:
        """End what the first process of a container leaves: nothing outlives it in a pid namespace either."""
        await process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._tell_reaper(f"-{process.pid}")

    def _tell_reaper(self, line: str) -> None:
        if self._reaper.stdin is not None:
            # Without a reaper there is less to clean up after a kill of this process, and nothing else is lost.
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.write(f"{line}\n".encode())
                self._reaper.stdin.flush()

    def _config_map(self, name: str) -> Path:
        return self._state / "configmaps" / name


def _start_reaper() -> subprocess.Popen[bytes]:
    program = Path(__file__).with_name("reaper.py")
    # In a session of its own: an interrupt on the terminal is for the runner, which then cleans up by itself.
    return subprocess.Popen(
        [sys.executable, "-SE", str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _signal(container: Container, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(container.pid, number)


def _die_with_parent() -> None:
    # Runs in the child between fork and exec. Without it a killed runner would leave agents and engines behind.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _translate(text: str, mounts: Mapping[str, str]) -> str:
    for mount, folder in mounts.items():
        prefix = "unix:" if text.startswith("unix:") else ""
        path = text.removeprefix("unix:")
        if path == mount or path.startswith(f"{mount}/"):
            return f"{prefix}{folder}{path.removeprefix(mount)}"
    return text


def _env_value(entry: dict[str, Any], pod: Pod) -> str | None:
    """Value of an env entry, or None where only a cluster has one (Secrets, node facts)."""
    if "valueFrom" not in entry:
        return str(entry.get("value", ""))
    known = {"metadata.name": pod.name, "metadata.uid": pod.uid, "status.podIP": "127.0.0.1"}
    return known.get(str((entry["valueFrom"].get("fieldRef") or {}).get("fieldPath")))


def _lock(state: Path) -> int:
    """Hold the state directory for as long as this process lives."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(state / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LocalError(
            f"the state directory {state} cannot be used: {error.strerror}; choose another with --state"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise LocalError(f"another run uses {state}: end it, or choose another with --state") from error
    return descriptor


def _remove(path: Path) -> None:
    """Remove what an earlier run left."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
