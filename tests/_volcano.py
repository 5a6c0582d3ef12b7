"""A stand-in for a Kubernetes server with Volcano: enough of its API for TorchX to submit, show, log, cancel and list.

It keeps Volcano's jobs in memory and runs each pod's command as a process of this machine. It is no Kubernetes: there
are no images, no admission, no queues.
"""

import contextlib
import datetime
import http.server
import json
import os
import pathlib
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

_JOBS = ["apis", "batch.volcano.sh", "v1alpha1", "namespaces"]


class Cluster:
    """Jobs by namespace and name, and the processes that stand for their pods."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.jobs = folder, {}
        self.pods: dict[tuple[str, str], subprocess.Popen] = {}
        self.lock = threading.Lock()

    def start(self, namespace: str, job: dict) -> None:
        """Volcano tells each pod the hosts of every task; here they are all this machine."""
        tasks = job["spec"]["tasks"]
        hosts = {f"VC_{task['name'].upper().replace('-', '_')}_HOSTS": "localhost" for task in tasks}
        for task in tasks:
            (container,) = task["template"]["spec"]["containers"]
            own = {one["name"]: one["value"] for one in container["env"]}
            name = f"{job['metadata']['name']}-{task['name']}-0"
            with (self.folder / name).open("wb") as output:
                self.pods[namespace, name] = subprocess.Popen(
                    container["command"], env={**os.environ, **hosts, **own}, stdout=output, stderr=output
                )

    def pods_of(self, namespace: str, job: dict) -> dict[str, subprocess.Popen]:
        prefix = job["metadata"]["name"]
        return {t["name"]: self.pods[namespace, f"{prefix}-{t['name']}-0"] for t in job["spec"]["tasks"]}

    def refresh(self, namespace: str, job: dict) -> None:
        if job.get("status", {}).get("state", {}).get("phase") == "Aborted":
            return
        codes = {name: pod.poll() for name, pod in self.pods_of(namespace, job).items()}
        phases = {name: "Running" if c is None else "Failed" if c else "Succeeded" for name, c in codes.items()}
        whole = "Running" if None in codes.values() else "Failed" if any(codes.values()) else "Completed"
        counts = {name: {"phase": {phase: 1}} for name, phase in phases.items()}
        job["status"] = {"state": {"phase": whole}, "taskStatusCount": counts}

    def end(self, namespace: str, job: dict) -> None:
        for pod in self.pods_of(namespace, job).values():
            if pod.poll() is None:
                pod.terminate()

    def answer(self, method: str, path: list[str], query: dict, body: Any) -> tuple[int, Any]:
        with self.lock:
            if path[:4] == _JOBS:
                return self._about_jobs(method, path[4], path[6:], query, body)
            if path[:3] == ["api", "v1", "namespaces"] and path[4:5] == ["pods"]:
                return self._about_pod(path[3], path[5:])
        return 404, _failure(404, "NotFound")

    def _about_jobs(self, method: str, namespace: str, rest: list[str], query: dict, body: Any) -> tuple[int, Any]:
        if method == "POST":
            key = namespace, body["metadata"]["name"]
            if key in self.jobs:
                return 409, _failure(409, "AlreadyExists")
            if "dryRun" not in query:
                now = datetime.datetime.now(datetime.timezone.utc).isoformat()
                body["metadata"] |= {"namespace": namespace, "creationTimestamp": now}
                self.jobs[key] = body
                self.start(namespace, body)
                self.refresh(namespace, body)
            return 201, body
        if not rest:
            mine = [job for (its, _), job in self.jobs.items() if its == namespace]
            for job in mine:
                self.refresh(namespace, job)
            return 200, {"kind": "JobList", "items": mine}
        job = self.jobs.get((namespace, rest[0]))
        if job is None:
            return 404, _failure(404, "NotFound")
        if method == "DELETE":
            self.end(namespace, job)
            del self.jobs[namespace, rest[0]]
            return 200, {"kind": "Status", "status": "Success"}
        if method == "PUT":
            job["status"] = body["status"]
            if job["status"]["state"]["phase"] == "Aborted":
                self.end(namespace, job)
        else:
            self.refresh(namespace, job)
        return 200, job

    def _about_pod(self, namespace: str, rest: list[str]) -> tuple[int, Any]:
        if (namespace, rest[0]) not in self.pods:
            return 404, _failure(404, "NotFound")
        if rest[1:] == ["log"]:
            return 200, (self.folder / rest[0]).read_text()
        about = {"metadata": {"name": rest[0]}, "status": {"phase": "Running", "podIP": "127.0.0.1"}}
        containers = [{"name": rest[0].removesuffix("-0").split("-", 1)[-1]}]
        return 200, {"kind": "Pod", "apiVersion": "v1", "spec": {"containers": containers}, **about}


def _failure(code: int, reason: str) -> dict:
    return {"kind": "Status", "status": "Failure", "reason": reason, "code": code, "message": reason}


@contextlib.contextmanager
def served(folder: pathlib.Path) -> Iterator[tuple[Cluster, pathlib.Path]]:
    """The cluster behind a port of this machine, and the file that the Kubernetes client finds it by."""
    cluster = Cluster(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def _answer(self) -> None:
            url = urllib.parse.urlparse(self.path)
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            path, query = url.path.strip("/").split("/"), urllib.parse.parse_qs(url.query)
            code, found = cluster.answer(self.command, path, query, body)
            data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(found, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815  names that http.server looks for

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "default"}}],
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "me", "user": {}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))  # JSON is YAML
    try:
        yield cluster, folder / "kubeconfig"
    finally:
        server.shutdown()
        for pod in cluster.pods.values():
            pod.kill()
            pod.wait()
